"""A sweep of options, with Optuna's own study; training stands in here."""

import functools
import importlib.util
import re

import pytest

from experiments import sweep
from tests.support.commands import assert_refused
from tests.support.configs import tiny, tiny_config

optuna = pytest.importorskip("optuna")
LINE = ["--config", tiny_config("fp8_dlrm"), "--seed", "3"]


def drawn(entry, **values):
    trial = optuna.trial.FixedTrial({f"--{k}": v for k, v in values.items()})
    return sweep.draw_of(tiny("fp8_dlrm"), entry)(trial), trial.distributions


def test_an_option_is_drawn_as_its_entry_and_its_kind_say():
    floats = optuna.distributions.FloatDistribution
    ints = optuna.distributions.IntDistribution
    for entry, value, words, kept in (
        ("dropout-rate=0:1", 0.25, ["0.25"], floats(0, 1)),
        ("optim.lr=1e-4:1e-2:log", 0.001, ["0.001"], floats(1e-4, 1e-2, log=True)),
        ("loop.batch-size=64:512:log", 100, ["100"], ints(64, 512, log=True)),
    ):
        name = entry.partition("=")[0]
        found, distributions = drawn(entry, **{name: value})
        assert found == [f"--{name}", *words]
        assert distributions == {f"--{name}": kept}
    assert drawn("top-mlp=8 4,8", **{"top-mlp": "8 4"})[0] == ["--top-mlp", "8", "4"]
    assert drawn("model=dlrm,dhen", model="dhen")[0] == ["--model", "dhen"]
    assert drawn("bias=True,False", bias="True")[0] == ["--bias"]
    assert drawn("bias=True,False", bias="False")[0] == ["--no-bias"]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (["optim.lrr=1:2"], "there is no option 'optim.lrr' (did you mean 'optim.lr'"),
        (["optim.lr=0:1:log"], "with LOW < HIGH, above 0 for a logarithm"),
        (["optim.lr=1:0.1"], "'optim.lr=1:0.1' must be OPTION=LOW:HIGH"),
        (["optim.lr=1:2:lin"], "must be OPTION=LOW:HIGH"),
        (["optim.lr="], "must be OPTION=LOW:HIGH"),
        ([], "--space is missing: name options"),
    ],
)
def test_a_wrong_space_is_one_sentence(run, tmp_path, space, said):
    options = ["--space", *space] if space else []
    workdir = ["--workdir", tmp_path / "sweep"]
    assert_refused(run(sweep, *LINE, *options, *workdir), said)
    assert not (tmp_path / "sweep").exists()


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: the NE is the rate; returns what is called.

    A rate above 0.9 fails; the calls whose numbers are `interrupted` are.
    """
    lines, interrupted = [], []
    seeded = functools.partial(optuna.samplers.TPESampler, seed=1)
    monkeypatch.setattr(optuna.samplers, "TPESampler", seeded)

    def train(line, output):
        lines.append(line)
        rate = float(line[line.index("--optim.lr") + 1])
        if rate > 0.9:
            raise sweep.Failed("failed: it diverged.")
        if len(lines) in interrupted:
            raise KeyboardInterrupt

    def rate_of(workdir):
        line = next(x for x in reversed(lines) if str(workdir) in x)
        return float(line[line.index("--optim.lr") + 1])

    monkeypatch.setattr(sweep, "_train", train)
    monkeypatch.setattr(sweep, "validation_ne", rate_of)
    train.lines, train.interrupted = lines, interrupted
    return train


def begun(run, folder, trials, *space):
    space = space or ("optim.lr=0.1:1.0",)
    options = ["--trials", trials, "--space", *space, "--workdir", folder]
    return run(sweep, *LINE[:2], *options, *LINE[2:])


def test_the_best_command_is_told_and_failures_are_recorded(run, tmp_path, trained):
    folder = tmp_path / "sweep"
    code, said, _ = begun(run, folder, 3, "optim.lr=0.95,0.5,0.4")
    assert code == 0
    *trials, best, command = said.splitlines()
    assert len(trials) == 3
    rates = [line[line.index("--optim.lr") + 1] for line in trained.lines]
    for number, (trial, rate) in enumerate(zip(trials, rates, strict=True)):
        came = "failed: it diverged" if rate == "0.95" else "has validation NE 0."
        assert trial.startswith(f"Trial {number}, --optim.lr {rate}: {came}")
    known = [rate for rate in rates if rate != "0.95"]
    assert 0 < len(known) < 3
    assert re.match(rf"Best: trial \d, validation NE {float(min(known)):.5f}", best)
    assert command.endswith(f"train.py {' '.join(LINE)} --optim.lr {min(known)}")
    assert all(line[:-4] == LINE for line in trained.lines)

    code, said, _ = begun(run, folder, 3, "optim.lr=0.95,0.5,0.4")  # all have ended
    assert (code, len(said.splitlines()), len(trained.lines)) == (0, 2, 3)
    assert_refused(begun(run, folder, 3, "optim.lr=1,2"), "a sweep with other options")
    assert_refused(
        run(sweep, *LINE[:2], "--space", "optim.lr=0.1:1.0", "--workdir", folder),
        "seed: saved 3, now 0",
    )


def test_an_interrupted_trial_goes_on_in_its_folder(run, tmp_path, trained):
    folder, space = tmp_path / "sweep", "optim.lr=0.2:0.3"
    trained.interrupted.append(2)
    assert begun(run, folder, 3, space)[0] == 130
    code, said, _ = begun(run, folder, 3, space)
    assert code == 0 and len(trained.lines) == 4
    before, after = trained.lines[1:3]
    assert after == [*before, "--resume"]
    assert before[-1] == str(folder / "trial-1")
    assert "--resume" not in trained.lines[3]


def test_a_missing_library_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = begun(run, tmp_path / "sweep", 1)
    assert_refused(result, "a sweep needs Optuna: install loka-jax[sweep].")
