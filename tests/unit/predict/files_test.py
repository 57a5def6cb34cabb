"""`experiments/predict.py`: files of any size to files of scores."""

import functools
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import loka_jax
from experiments import predict
from loka_jax.data import blocks, text
from loka_jax.predict import files, predictor, score_file
from tests.support import predict as support
from tests.support.predict import HEADER, rows, write
from tests.unit.experiments.cli_test import assert_refused

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return support.train_and_lose_the_data(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained, capsys):
    def run(path, out, *options):
        arguments = ["--workdir", trained.workdir, "--data.path", path, "--out", out]
        try:
            code = predict.main([str(part) for part in (*arguments, *options)])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def test_a_csv_file_gives_parquet_with_keys_and_counts(trained, run, tmp_path):
    out = tmp_path / "scores.parquet"
    code, said, err = run(trained.test, out, "--data.keys", "item", "user")
    assert (code, err) == (0, "")
    table = parquet.read_table(out)
    assert table.column_names == ["item", "user", "score"]
    expected = csv.read_csv(trained.test)
    for name in ("item", "user"):
        assert table[name].to_pylist() == list(map(str, expected[name].to_pylist()))
    logits = trained.logits.astype(np.float64)
    assert np.array_equal(table["score"], (1 / (1 + np.exp(-logits))).astype("f4"))
    unknown = sum(user in ("u12", "u13") for user in expected["user"].to_pylist())
    assert unknown and f"user: {unknown} not in the vocabulary\n" in said
    assert "75 rows scored" in said


def test_many_blocks_and_groups_give_the_same_scores(trained, tmp_path, monkeypatch):
    rng = np.random.default_rng(3)
    sizes = rng.multinomial(75, [1 / 9] * 9)
    monkeypatch.setattr(predictor, "_GROUP_BYTES", 300)
    parts = []
    table = csv.read_csv(trained.test)
    for start, size in zip(np.cumsum(sizes) - sizes, sizes, strict=True):
        numbers = np.arange(start + 1, start + size + 1)
        parts.append(blocks.Block(table.slice(start, size), numbers, "parts"))
    model = loka_jax.load(trained.workdir)
    counts = predictor.Counts()
    scored = [part.scores for part in model.scored(iter(parts), counts)]
    assert len(scored) > 3
    assert np.array_equal(np.concatenate(scored), model.scores(table))


def test_parquet_gives_csv_whose_scores_are_read_back_whole(trained, run, tmp_path):
    parquet.write_table(csv.read_csv(trained.test), tmp_path / "new.parquet")
    code, _, err = run(tmp_path / "new.parquet", tmp_path / "s.csv")
    assert (code, err) == (0, "")
    table = csv.read_csv(tmp_path / "s.csv")
    model = loka_jax.load(trained.workdir)
    scores = np.asarray(table["score"]).astype(np.float32)
    assert np.array_equal(scores, model.scores(csv.read_csv(trained.test)))


def test_no_plan_scores_in_the_models_recipe(trained):
    model = loka_jax.load(trained.workdir, plan="off")
    scores = model.scores(csv.read_csv(trained.test))
    assert np.isfinite(scores).all() and np.ptp(scores) > 0


@pytest.mark.parametrize("plan, implementation", [("saved", None), ("off", "xla")])
def test_without_its_plan_a_model_runs_by_xla_alone(
    trained, monkeypatch, plan, implementation
):
    models = []
    compiled = predictor.eval_step
    monkeypatch.setattr(
        predictor, "eval_step", lambda *of: models.append(of) or compiled(*of)
    )
    loka_jax.load(trained.workdir, plan=plan)
    ((planned, *_),) = models
    assert planned.model.implementation == implementation


def test_an_existing_file_is_not_overwritten(trained, run, tmp_path):
    out = write(tmp_path / "scores.csv", [])
    assert_refused(run(trained.test, out), "exists already: remove it")
    assert out.read_text() == HEADER


@pytest.mark.parametrize(
    "text, options, parts",
    [
        ("price,user\n1,u1\n", (), ["no column 'item', only price, user"]),
        (HEADER + "1,2,u1,3\n", ("--data.keys", "age"), ["no column 'age'"]),
        (HEADER + "1,x,u1,3\n", (), ["row 1 column 'price' holds 'x', not a number"]),
        (HEADER, (), ["no rows"]),
    ],
)
def test_bad_rows_leave_nothing(run, tmp_path, text, options, parts):
    source = tmp_path / "new.csv"
    source.write_text(text)
    assert_refused(run(source, tmp_path / "scores.csv", *options), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_bytes_are_no_keys_of_a_csv_file(run, tmp_path):
    table = pa.table({"price": [1.0], "user": ["u1"], "item": [3], "bin": [b"\xff"]})
    parquet.write_table(table, tmp_path / "new.parquet")
    options = ["--data.keys", "bin"]
    result = run(tmp_path / "new.parquet", tmp_path / "s.csv", *options)
    assert_refused(result, "--data.keys bin holds binary, which CSV cannot")
    code, *_ = run(tmp_path / "new.parquet", tmp_path / "s.parquet", *options)
    assert code == 0


@pytest.mark.slow
def test_sigterm_leaves_no_file(trained, tmp_path):
    """Neither the scores nor what was to become them."""
    write(tmp_path / "new.csv", rows(1_000_000))
    options = ["--data.path", tmp_path / "new.csv", "--out", tmp_path / "s.parquet"]
    command = [sys.executable, predict.__file__, "--workdir", trained.workdir, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
    )
    while not list(tmp_path.glob(".s.parquet.*")):
        assert process.poll() is None
        time.sleep(0.005)
    process.terminate()
    _, error = process.communicate()
    assert (process.returncode, error) == (143, b"")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_wrong_names_are_refused_before_anything_is_read(trained, run, tmp_path):
    out = tmp_path / "scores.csv"
    assert_refused(run(tmp_path / "gone.csv", out), "gone.csv does not exist")
    assert_refused(run(trained.test, tmp_path / "s.json"), "end in .parquet or .csv")
    assert_refused(run(trained.test, tmp_path / "no" / "s.csv"), "there is no folder")
    assert_refused(run(trained.test, out, "--workdir", tmp_path), "holds no run")
    assert_refused(run(tmp_path, out), "is a folder")
    keys = ["--data.keys", "user", "user"]
    assert_refused(run(trained.test, out, *keys), "user user: name each column once")


def test_a_long_file_is_held_in_parts(trained, tmp_path, monkeypatch):
    """At no time are more rows waiting than a group and a batch have."""
    write(tmp_path / "new.csv", rows(4000))
    monkeypatch.setattr(predictor, "_GROUP_BYTES", 1 << 12)
    read = functools.partial(text.read_text, delimiter=",", block_bytes=1 << 10)
    monkeypatch.setattr(files, "reader_of", lambda config, path: read)
    seen, held = [], []
    plain = predictor._groups

    def groups(blocks):
        for group in plain(blocks):
            seen.append(sum(block.table.num_rows for block in group))
            yield group

    monkeypatch.setattr(predictor, "_groups", groups)
    scored = score_file(
        loka_jax.load(trained.workdir),
        tmp_path / "new.csv",
        tmp_path / "s.parquet",
        progress=lambda rows: held.append(sum(seen) - rows),
    )
    assert scored.rows == sum(seen) == 4000
    assert max(held) <= max(seen) + 2 * 32 < 500
    assert parquet.read_metadata(tmp_path / "s.parquet").num_rows == 4000


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--plan", "on"], "--plan is 'on': "),
        (["--workdir"], "--workdir lacks its value: add one"),
        (
            [],
            "--workdir, --out, --data.path must be given: python experiments/predict",
        ),
    ],
)
def test_a_bad_value_is_one_sentence(capsys, arguments, said):
    assert predict.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") and error.count("\n") == 1
