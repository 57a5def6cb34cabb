"""Training from Python is the training of the command line."""

import json
import pathlib

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet

import loka_jax
from experiments.cli import parse
from loka_jax import fitting
from loka_jax.train.session import Trained

DRAW = np.random.default_rng(0)
ROWS = {
    "click": DRAW.integers(0, 2, 300),
    "user": [f"u{i % 20}" for i in range(300)],
    "price": DRAW.normal(0, 1, 300),
}


class Frame:
    """A data frame, as pandas and Polars have it for Arrow."""

    def __arrow_c_stream__(self, schema=None):
        return pa.table(ROWS).__arrow_c_stream__(schema)


@pytest.fixture
def fitted(monkeypatch, tmp_path):
    """Returns a function to the configuration that a call of `fit` trains."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(data, *, code=0, **options):
        seen = []

        def train(config, arguments, console):
            seen.append(config)
            return Trained(code, tmp_path / "run")

        monkeypatch.setattr(fitting, "train", train)
        run = loka_jax.fit(data, **options)
        assert run.workdir == tmp_path / "run"
        return seen[0]

    return call


def test_a_call_trains_what_the_command_line_does(fitted, tmp_path):
    path = str(tmp_path / "log.parquet")
    parquet.write_table(pa.table(ROWS), path)
    settings = {"loop.epochs": 3, "top-mlp": (8,), "seed": 4, "data.min_count": 2}
    settings["workdir"] = f"{tmp_path}/w"
    found = fitted(path, label="click", settings=settings)
    line = f"--config table --data.path {path} --data.label click --loop.epochs 3"
    line += f" --workdir {tmp_path}/w --top-mlp 8 --seed 4 --data.min-count 2"
    assert found == parse(line.split())


def test_rows_in_memory_are_kept(fitted):
    first, again = (fitted(Frame(), test=pa.table(ROWS)).data for _ in range(2))
    assert first == again and first.label == "click"
    assert parquet.read_table(first.path) == pa.table(ROWS)
    assert parquet.read_table(first.test).num_rows == 300
    both = fitted(ROWS, label=["click"], model="mmoe")
    assert both.data.labels == ("click",) and both.model.num_tasks == 1


class HuggingFace:
    """A dataset of Hugging Face, as much as is used of it."""

    def with_format(self, name):
        assert name == "arrow"
        return pa.table(ROWS)


def test_rows_come_in_tables_one_after_another(fitted):
    table = pa.table(ROWS)
    parts = (table.slice(start, 100) for start in (0, 100, 200))
    for data in (parts, dataset.dataset(table), HuggingFace()):
        found = fitted(data, label="click")
        assert parquet.read_table(found.data.path) == table
    other = table.drop_columns(["user"])
    for wrong, why in ((iter([table, other]), "table 2 of the"), (iter([]), "without")):
        with pytest.raises(ValueError, match=why):
            fitted(wrong, label="click")
    folder = pathlib.Path(found.data.path).parent
    assert {path.suffix for path in folder.iterdir()} == {".parquet"}


def test_a_run_tells_its_sites_and_report(tmp_path, monkeypatch):
    (tmp_path / "sites.json").write_text('[{"path": "head"}]')
    (tmp_path / "report.html").write_text("<p>&</p>")
    run = fitting.FittedRun(tmp_path)
    assert run.sites == [{"path": "head"}]
    assert run.report() == tmp_path / "report.html"
    assert 'srcdoc="&lt;p&gt;&amp;&lt;/p&gt;"' in run._repr_html_()
    asked = []
    monkeypatch.setattr(fitting, "export_run", lambda *a, **k: asked.append((a, k)))
    run.export("model", batch_sizes=(8,))
    assert asked == [((tmp_path, pathlib.Path("model")), {"batch_sizes": (8,)})]


def test_what_is_wrong_is_one_sentence(fitted):
    for options, why in (
        ({"settings": {"loop.epoch": 3}}, "no option 'loop.epoch' .did you mean"),
        ({"model": "dlrn"}, "the model 'dlrn' must be one of dlrm, dcnv2"),
        ({"label": "nothing"}, "no column is named 'nothing'"),
        ({"label": 3}, "'data.labels': it is wrong .Expected array, got int"),
        ({"settings": {"optim.lr": "high"}}, "'optim.lr': .*Expected float, got str"),
        ({"settings": {"loop.batch_size": 2.5}}, "Expected int, got float"),
        ({"settings": {"data.dense": "price"}}, "'data.dense': .* got str"),
        ({"settings": {"norm": "layers"}}, "'norm': .* use one of none, layer, rms"),
        ({"settings": {"optim": 3}}, "'optim': .*Expected object, got int"),
    ):
        with pytest.raises(ValueError, match=why):
            fitted(ROWS, **options)
    with pytest.raises(ValueError, match="neither paths nor a table"):
        fitted([1, 2])
    with pytest.raises(KeyboardInterrupt):
        fitted(ROWS, code=130)


def test_a_run_is_its_folder(monkeypatch, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 8}))
    run = fitting.FittedRun(tmp_path)
    assert run.summary == {"steps": 8}
    monkeypatch.setattr(fitting, "load", lambda workdir: {"of": workdir})
    assert run.predictor == {"of": tmp_path}
