"""The command that searches; trials stand in, and cost no training."""

import errno
import importlib.util
import json

import pytest

from experiments import search
from loka_jax import jsonfile
from loka_jax.search import trial
from loka_jax.search.history import Outcome, read_trials
from loka_jax.train.folder.config_file import read_config
from tests.support.commands import assert_refused
from tests.support.configs import tiny_config
from tests.support.report import Page

LINE = ["--config", tiny_config("fp8_dlrm"), "--seed", "3"]
SPACE = ["--space", "batch-size=64,128", "mesh=1x1"]  # tests have eight devices


@pytest.fixture
def tried(monkeypatch):
    """Stands in for trials: more steps a call are faster, 8 crash; returns all."""
    configs = []

    def measured(own, seconds, *_):
        for config in own:
            configs.append(config)
            steps, size = config.loop.steps_per_call, config.loop.batch_size
            if steps == 8:
                yield Outcome(status="crash", why="a bad \x1b[2J kernel", seconds=1.0)
                continue
            rate = 1000.0 * steps + size
            yield Outcome(status="ok", rates=(rate, rate, 9 * rate), seconds=2.0)

    monkeypatch.setattr(trial, "measured", measured)
    return configs


def searched(run, folder, *more):
    return run(search, *LINE, *SPACE, "--workdir", folder, *more)


def test_the_winner_is_told_and_is_a_configuration_of_train_py(run, tmp_path, tried):
    folder = tmp_path / "search"
    code, said, _ = searched(run, folder)
    assert code == 0
    trials = read_trials(folder / "trials.json")
    assert len(trials) == len(tried) <= 8
    first = tried[0].loop
    assert (first.steps_per_call, first.batch_size) == (1, 128)  # the user's own
    best = read_config(folder / "best.json")
    assert (best.loop.steps_per_call, best.loop.batch_size) == (4, 128)
    assert best.seed == 3 and best.name == "fp8_dlrm_tiny"
    assert "Best: steps-per-call 4: 4,128 examples/s, 3.66 times your own." in said
    assert f"--config {folder / 'best.json'}" in said
    assert "Left out: recipe, as it rounds otherwise (--space recipe" in said
    page = Page(folder / "report.html")
    assert page.tiles["Most examples/s"] == ("4,128", "steps-per-call 4")
    assert page.rows("What mattered")[1][:2] == ["steps-per-call", "1"]
    assert page.rows("Trials")[1][1] == "your own" and "\x1b" not in said
    assert trials[0].expected is None and trials[2].expected is not None

    code, said, _ = searched(run, folder)  # nothing is left to gain
    assert code == 0 and len(tried) == len(trials)
    code, said, _ = searched(run, folder, "--space", "batch-size=64", "mesh=1x1")
    assert code == 0 and "Best: steps-per-call 4: 4,128" in said
    smaller = ["--space", "steps-per-call=1,2", "mesh=1x1", "batch-size=64,128"]
    code, said, _ = searched(run, folder, *smaller)
    assert code == 0 and "Best: steps-per-call 2: 2,128" in said
    other = tmp_path / "other"
    learned = folder / "trials.json"
    assert searched(run, other, "--earlier", learned)[0] == 0
    assert_refused(run(search, *LINE[:2], "--workdir", folder), "seed: saved 3, now 0")


def test_a_full_disk_ends_it_and_the_same_command_goes_on(
    run, tmp_path, tried, monkeypatch
):
    folder, write = tmp_path / "search", jsonfile.write_bytes

    def full(path, content):
        if path.name == "trials.json" and len(tried) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(jsonfile, "write_bytes", full)
    code, _, err = searched(run, folder)
    assert code == 1 and "No space left on device: make room and run it again" in err
    assert len(read_trials(folder / "trials.json")) == 1
    assert searched(run, folder)[0] == 0
    assert tried[1] == tried[2]  # whose outcome was lost


def test_a_search_ends_in_time(run, tmp_path, tried):
    code, _, err = searched(run, tmp_path / "search", "--minutes", 1e-9)
    assert (code, tried) == (2, []) and "there was no time for one" in err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--space", "recipes"], "--space recipes is no axis (did you mean 'recipe'?)"),
        (["--minutes", "0"], "--minutes 0.0 must be positive."),
        (["--trial-seconds", "-1"], "--trial-seconds -1.0 must be positive."),
        (["--earlier", "none.json"], "cannot read none.json (No such file"),
        (["--init-from", "run"], "run"),
    ],
)
def test_a_wrong_line_is_one_sentence(run, tmp_path, tried, more, said):
    workdir = tmp_path / "search"
    assert_refused(run(search, *LINE, "--workdir", workdir, *more), said)
    assert not tried and not workdir.exists()


def test_a_missing_library_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = searched(run, tmp_path / "search")
    assert_refused(result, "a search needs scikit-learn: install loka-jax[search].")


def test_crashes_alone_are_an_error(run, tmp_path, tried):
    folder = tmp_path / "search"
    line = [
        *LINE,
        "--loop.steps-per-call",
        8,
        "--space",
        "mesh=1x1",
        "steps-per-call=8",
    ]
    result = run(search, *line, "--workdir", folder)
    assert (
        result[0] == 2 and "no trial has a speed (a bad \\x1b[2J kernel)" in result[2]
    )
    (only,) = json.loads((folder / "trials.json").read_text())["trials"]
    assert only["status"] == "crash"
