"""A run, and what it exports, score rows as its evaluation did, bit for bit."""

import json
import shutil
import signal
import sys

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv, parquet

import loka_jax
from experiments import predict
from loka_jax.export import export_run, loader
from loka_jax.predict import score_file
from loka_jax.server import app
from tests.support import predict as support
from tests.support.commands import signalled
from tests.support.export import in_a_clean_environment
from tests.support.permissions import modes, umask
from tests.support.predict import RECIPE, rows, sigmoid, write

BATCH = 32  # of the runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return support.train_and_lose_the_data(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A run on lists with weights, and weighted examples."""
    return support.train_on_lists(tmp_path_factory.mktemp("lists"))


def losses(labels, scores):
    """Returns the log loss of each row."""
    return -np.where(labels, np.log(scores), np.log1p(-scores))


def test_scores_are_the_evaluations_without_the_files_it_was_trained_on(trained):
    table, model = csv.read_csv(trained.test), loka_jax.load(trained.workdir)
    scores = model.scores(table.drop_columns(["label"]))
    assert (model.config.model.recipe, scores.dtype) == (RECIPE, np.float32)
    assert np.array_equal(scores, sigmoid(trained.logits))
    loss = float(np.mean(losses(np.asarray(table["label"]), scores)))
    expected = trained.summary["final_eval"]["logloss"]
    assert loss == pytest.approx(expected, rel=1e-6)
    scores = loka_jax.load(trained.workdir, plan="off").scores(table)
    assert np.isfinite(scores).all() and np.ptp(scores) > 0


def test_sigterm_leaves_no_file(trained, tmp_path):
    """Neither the scores nor what was to become them, on a disk that hangs."""
    write(tmp_path / "new.csv", rows(100))
    options = ["--data.path", tmp_path / "new.csv", "--out", tmp_path / "s.parquet"]
    hangs = "import os, time; os.fsync = lambda file: time.sleep(600)"
    run = f"import runpy; runpy.run_path({predict.__file__!r}, run_name='__main__')"
    command = [sys.executable, "-c", f"{hangs}; {run}"]
    command += ["--workdir", trained.workdir, *options]
    ended = signalled(command, signal.SIGTERM, tmp_path, ".s.parquet.*")
    assert ended == (143, "")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_what_is_no_whole_run_is_refused(trained, tmp_path):
    with pytest.raises(ValueError, match="holds no run .* name the --workdir of one"):
        loka_jax.load(tmp_path)
    assert not list(tmp_path.iterdir())
    workdir = shutil.copytree(trained.workdir, tmp_path / "run")
    for lost, said in (
        ("encoding", "encoding of the run, cannot be used .*again"),
        ("checkpoints", "no checkpoint yet"),
    ):
        shutil.rmtree(workdir / lost)
        with pytest.raises(ValueError, match=said):
            loka_jax.load(workdir)


def test_lists_weights_of_values_and_of_examples_count(lists, tmp_path):
    table = parquet.read_table(lists.test)
    model, expected = loka_jax.load(lists.workdir), sigmoid(lists.logits)
    scores = model.scores(table.drop_columns(["label", "importance"]))
    assert np.array_equal(scores, expected)
    own = losses(table["label"], scores)
    loss = float(np.average(own, weights=table["importance"]))
    assert loss == pytest.approx(lists.summary["final_eval"]["logloss"], rel=1e-6)
    out = tmp_path / "scores.parquet"
    score_file(model, lists.test, out, keys=("user",))
    written = parquet.read_table(out)
    assert np.array_equal(written["score"], expected)
    assert written["user"] == table["user"]
    lengths = np.asarray(pc.list_value_length(table["tags"]))
    for name in ("tags", "strengths", "price", "at"):  # else equal scores say nothing
        values = table[name].to_pylist()
        are_lists = isinstance(values[0], list)
        turned = pa.array([x[::-1] for x in values] if are_lists else values[::-1])
        place = table.column_names.index(name)
        other = model.scores(table.set_column(place, name, turned))
        assert (other != expected)[lengths > 1].mean() > 0.8
    out, options = tmp_path / "model", dict(batch_sizes=(BATCH,), platforms=("cpu",))
    assert export_run(lists.workdir, out, **options).differences == {BATCH: 0.0}
    arrays = loader.read_arrays(out / "weights.safetensors")
    assert arrays["table_0"].dtype == ml_dtypes.bfloat16  # as the run has them
    served = loader.load(out)
    assert np.array_equal(served.scores(table.to_pydict()), expected)
    body = json.dumps({"rows": table.to_pylist()}, default=str)  # dates as text
    asked = app.columns_of(body.encode(), served.encoding.columns, len(table))
    assert np.array_equal(served.scores(asked), expected)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Returns a folder of programs of three sizes, and what was written."""
    out = tmp_path_factory.mktemp("exported") / "model"
    with umask(0o027):
        return out, export_run(trained.workdir, out, batch_sizes=(16, 1, BATCH))


def columns(trained, count):
    """Returns the first rows that the final evaluation saw."""
    table = csv.read_csv(trained.test).slice(0, count)
    return {name: table[name].to_pylist() for name in ("price", "user", "item")}


def test_exported_scores_are_the_evaluations_where_only_jax_is_installed(
    trained, exported, tmp_path
):
    assert modes(exported[0]) == {0o640, 0o750}  # by the umask
    given = columns(trained, 2 * BATCH), tmp_path, "cpu"
    scores, modules = in_a_clean_environment(exported[0], *given)
    assert np.array_equal(scores, sigmoid(trained.logits[: 2 * BATCH]))
    top = {name.partition(".")[0] for name in modules}
    assert not top & {"loka_jax", "flax", "pyarrow", "safetensors"}
    assert "flatbuffers" in top


def test_programs_of_each_size_and_platform_equal_the_evaluation(trained, exported):
    model, found = loader.load(exported[0]), exported[1]
    assert model.batch_sizes == (1, 16, BATCH)
    assert found.differences == {1: 0.0, 16: 0.0, BATCH: 0.0}
    (whole,) = (p for p in found.programs if p.form[:2] == ("cpu", BATCH))
    assert sum("e4m3" in runs for runs in whole.form.runs.values()) == 2
    for_gpu = [p for p in found.programs if p.form.platform == "cuda"]
    assert [p.form.batch_size for p in for_gpu] == [1, 16, BATCH]  # made without one
    assert {p.compute_capability for p in for_gpu} == {None}
    inputs = model.encoding.inputs(columns(trained, 75))
    logits = model.logits(inputs)
    assert np.array_equal(logits[:64], trained.logits[:64])  # two whole batches
