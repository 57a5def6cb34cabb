"""The command line: what a user can get wrong ends in one sentence and a code."""

import dataclasses
import errno
import json
import os
import re
from types import SimpleNamespace

import jax
import pytest

from experiments import cli, configs, options, train
from loka_jax import jsonfile, saved_format
from loka_jax.train import session
from loka_jax.train.watch.guard import TrainingFailed
from tests.support.commands import assert_refused
from tests.support.configs import tiny, tiny_config

GENERATED = ["--config", tiny_config("fp8_dlrm")]
CSV = [
    "--config",
    tiny_config("csv_dlrm"),
    "--data.label",
    "click",
    "--data.categorical",
]
CSV += ["user", "--data.dense", "age"]


@pytest.mark.parametrize(
    "line, said",
    [
        ("--config --seed 3", "--config NAME is missing: use one of the above; or"),
        ("TINY --optm.lr 1", "no option --optm.lr (did you mean --optim"),
        ("TINY --run.dry-run", "no option --run.dry-run (did you mean --dry-run?)"),
        ("TINY --norm layer rms", "'rms' belongs to no option"),
        (
            "TINY --loop.batch-size 1.5",
            "--loop.batch-size takes INT, not '1.5'; see ",
        ),
        ("TINY --optim.lr nan", "--optim.lr nan must lie between"),
        ("TINY --recipe fp8_rowise", "did you mean 'fp8_rowwise'?"),
        ("TINY --require-gpu", "--require-gpu was given, but JAX found"),
        ("TINY --resume", "there is no run runs/fp8_dlrm_tiny-"),
        ("CSV --data.path missing.csv", "missing.csv does not exist"),
        ("--config table", "needs --data.path, a file or a folder"),
        ("--config table --model dlrn", "--model dlrn must be one of dcnv2, "),
        ("--config csv_dlrm --model dlrm", "with --config table"),
    ],
)
def test_a_bad_command_line_is_refused(run, tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    line = line.replace("TINY", " ".join(GENERATED)).replace("CSV", " ".join(CSV))
    assert_refused(run(train, *line.split()), said)
    assert not list(tmp_path.iterdir())


def test_bad_data_is_refused_and_leaves_nothing(run, tmp_path):
    rows = "".join(f"{i % 2},u{i % 7},{i}\n" for i in range(100))
    (tmp_path / "clicks.csv").write_text(f"click,user,age\n{rows}1,u1\n")
    places = ["--data.path", tmp_path / "clicks.csv", "--workdir", tmp_path / "run"]
    result = run(train, *CSV, *places, "--data.cache", tmp_path / "cache")
    assert_refused(result, "clicks.csv", "row 101")
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "cache").glob("*"))


@pytest.fixture
def no_data(monkeypatch):
    """Fails the test if data would be read."""
    monkeypatch.setattr(session, "build", lambda *_: pytest.fail("read the data"))


@pytest.fixture
def workdir(tmp_path):
    """A folder with the configuration of a run."""
    config = dataclasses.replace(tiny("fp8_dlrm"), seed=7)
    saved = {saved_format.KEY: saved_format.RUN, **config.identity()}
    jsonfile.write(tmp_path / "config.json", saved)
    return tmp_path


def test_the_configuration_of_a_resumed_run_is_in_its_workdir(workdir):
    config = cli.parse(["--resume", "--workdir", str(workdir), "--loop.epochs", "3"])
    expected = tiny("fp8_dlrm")
    loop = dataclasses.replace(expected.loop, epochs=3)
    run = dataclasses.replace(expected.run, resume=True, workdir=workdir)
    assert config == dataclasses.replace(expected, seed=7, loop=loop, run=run)


@pytest.mark.usefixtures("no_data")
def test_a_workdir_that_cannot_be_used_and_other_options_are_refused(run, workdir):
    at = ["--workdir", workdir]
    assert_refused(run(train, *GENERATED, *at), "continue it with --resume")
    below = workdir / "config.json" / "run"
    result = run(train, *GENERATED, "--workdir", below)
    assert_refused(result, f"cannot write to {below}")
    for option, value, said in (
        ("--optim.lr", "0.5", "(--optim.lr: saved 0.002, now 0.5): leave these"),
        ("--recipe", "bf16", "now 'bf16'"),
        ("--config", tiny_config("bf16_dlrm"), "saved 'fp8_dlrm_tiny', now 'bf"),
    ):
        assert_refused(run(train, "--resume", *at, option, value), said)
    (workdir / "config.json").write_text("{")
    assert_refused(run(train, "--resume", *at), "config.json is not JSON")
    (workdir / "config.json").unlink()
    assert_refused(run(train, "--resume", *at), "(config.json is missing)")


def test_what_print_config_prints_is_a_configuration(run, tmp_path):
    options = ["--seed", "3", "--data.rows", "9", "8", "--norm", "layer"]
    _, printed, _ = run(train, *GENERATED, "--print-config", *options)
    assert '"rows": [\n' in printed and list(tmp_path.iterdir()) == []
    (tmp_path / "mine.json").write_text(printed)
    code, again, _ = run(train, "--config", tmp_path / "mine.json", "--print-config")
    assert (code, again) == (0, printed)
    _, other, _ = run(
        train, f"--config={tmp_path}/mine.json", "--print-config", "--seed", "4"
    )
    assert other == printed.replace('"seed": 3', '"seed": 4')


OWN = """
import dataclasses
from sibling import SEED
from tests.support.configs import tiny

def my_dlrm():
    return dataclasses.replace(tiny("fp8_dlrm"), name="mine", seed=SEED)

def none():
    pass

def bug():
    return 1 / 0
"""


def test_a_configuration_may_be_a_function_in_the_users_file(run, tmp_path):
    (tmp_path / "sibling.py").write_text("SEED = 11")
    (tmp_path / "own.py").write_text(OWN)
    expected = tiny("fp8_dlrm")
    expected = dataclasses.replace(expected, name="mine", seed=12)
    line = ["--config", f"{tmp_path}/own.py:my_dlrm", "--seed", "12"]
    assert cli.parse(line) == expected
    (tmp_path / "wrong.py").write_text("x = 1\ndef f(:\n")
    for name, said in (
        ("own.py:my_dlmr", "(did you mean 'my_dlrm'?): there are my_dlrm, none, bug"),
        ("own.py:", "own.py:FUNCTION must name a function"),
        ("own.py:none", "own.py:none returned a NoneType"),
        ("own.py:bug", "own.py, line 13: ZeroDivisionError: division by zero"),
        ("wrong.py:f", f"{tmp_path}/wrong.py, line 2: SyntaxError: invalid syntax"),
    ):
        assert_refused(run(train, "--config", f"{tmp_path}/{name}"), said)


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ValueError("x is 1: make it 2."), 2, "x is 1: make it 2."),
        (ValueError("[/b] \x1b[2J\r\nerror: y."), 2, r"[/b] \x1b[2J\r\nerror: y."),
        (TrainingFailed("it diverged."), 1, "it diverged."),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), 1, "or --embedding.dim,"),
        (OSError(errno.ENOSPC, "No space"), 1, "No space: make room and run it again"),
    ],
)
def test_a_failure_is_one_sentence_and_a_code(capsys, error, code, said):
    assert cli.run_cli(lambda: _raise(error)) == code
    assert_refused((2, *capsys.readouterr()), said)


def test_codes_and_bugs_are_kept_and_ctrl_c_is_130(capsys, monkeypatch):
    monkeypatch.delenv(memory := "XLA_PYTHON_CLIENT_PREALLOCATE")  # the tests' own
    assert (cli.run_cli(lambda: 0), cli.run_cli(lambda: 3)) == (0, 3)
    assert os.environ[memory] == "false"  # is taken as it is needed
    assert cli.run_cli(lambda: _raise(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    for bug in (jax.errors.JaxRuntimeError("INTERNAL: x"), ZeroDivisionError()):
        with pytest.raises(type(bug)):
            cli.run_cli(lambda bug=bug: _raise(bug))


def test_help_lists_configurations_and_then_all_options(run):
    code, out, err = run(train, "--help")
    assert (code, err) == (0, "")
    assert all(f"\n  {name} " in out for name in configs.names())
    code, out, _ = run(train, "--config", "frappe_dlrm", "--help-all")
    assert code == 0 and "train.py --config frappe_dlrm" in out
    assert "(default: 100)" in " ".join(out.split())  # its epochs
    listed = set(re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", out))
    assert set(options.option_names(configs.get_config("frappe_dlrm"))) <= listed


def test_help_of_a_table_shows_what_matters_first(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(train, "--config", "table", "--model", "wukong", "--help")
    assert code == 0 and len(out.splitlines()) < 100
    shown = re.findall(r"^--([\w.-]+)", out, re.MULTILINE)
    assert [x for x in cli._FIRST if x != "top-mlp"] == [
        x for x in shown if x not in ("top-mlp", "help-all")
    ]
    own = configs.get_config("table_wukong")
    assert f"--help-all shows all {len(options.option_names(own))} options." in out
    assert "--mesh" not in out and "--data.label STR\n      the label column" in out
    assert "--mesh.shards" in run(train, "--config", "fp8_dlrm", "--help")[1]


def test_home_and_near_options_are_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    line = ["--workdir=~/run", "--out", "~/x", "a~/b"]
    expected = ["--workdir=/home/me/run", "--out", "/home/me/x", "a~/b"]
    assert options.expanded(line) == expected
    near = options.near_options("--optim.lrr", ["--optim.lr", "--data.lrr", "--z"])
    assert near == ["--data.lrr", "--optim.lr"]


def _raise(error):
    raise error


def test_a_gpu_without_fp8_is_named_like_any(monkeypatch):
    gpu = {"platform": "gpu", "device_kind": "A100", "compute_capability": "8.0"}
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**gpu)])
    assert session.device_notice(require_gpu=True) == "Running on A100."


def test_settings_by_the_data_give_way_to_options(run, tmp_path):
    rows = "".join(f"{i % 2},u{i % 7},{i / 3}\n" for i in range(100))
    (tmp_path / "log.csv").write_text("click,user,price\n" + rows)
    line = ["--config", "table", "--model", "wukong", "--loop.epochs", "3"]
    line += ["--data.path", tmp_path / "log.csv", "--data.cache", tmp_path / "cache"]
    code, out, err = run(train, *line, "--print-config")
    config = json.loads(out)
    assert code == 0 and "dense: price" in err
    assert config["name"] == "table_wukong" and config["model"]["kind"] == "Wukong"
    assert config["loop"]["epochs"] == 3 and config["loop"]["batch_size"] == 64
    assert config["data"]["categorical"] == ["user"]


def test_without_a_name_the_configurations_are_listed(run, capsys):
    code, said, error = run(train)
    assert code == 2 and "use one of the above" in error
    assert "  table_dlrm           DLRM on a table of your own" in said
