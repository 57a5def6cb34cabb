"""The command `loka`: the scripts of experiments/ under one name."""

import signal
import subprocess
import sys

import pytest

from loka_jax import commands


def run(capsys, *arguments):
    """Runs a command line; returns exit code, standard output and error."""
    code = commands.main(list(arguments))
    return code, *capsys.readouterr()


@pytest.fixture
def as_in_a_wheel(tmp_path, monkeypatch):
    """Makes a wheel's folder of scripts with one command and one module."""
    folder = tmp_path / "scripts" / "experiments"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("def words(): return ['a']\n")
    (folder / "echo.py").write_text('"""Prints.\n\nAll."""\n\ndef main():\n    ...\n')
    monkeypatch.setattr(commands, "_IN_WHEEL", folder)
    return folder


def test_the_help_lists_every_command_and_an_unknown_one_is_refused(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert {"train", "predict", "compare", "probe", "tune"} <= {*commands.names()}
    assert not {"cli", "options"} & {*commands.names()}
    assert all(f"\n  {name} " in out for name in commands.names())
    code, out, err = run(capsys, "trian", "--config", "fp8_dlrm")
    assert (code, out) == (2, "")
    said = "error: there is no command 'trian' (did you mean 'train'?): "
    assert err.startswith(said)
    assert run(capsys)[0] == 2


def test_a_command_is_a_script_with_a_main(as_in_a_wheel, capsys):
    assert "\n  echo         Prints.\n" in run(capsys, "-h")[1]
    assert run(capsys, "helper")[0] == 2


def test_texts_and_processes_name_what_the_installation_has(as_in_a_wheel, monkeypatch):
    text = "run 'uv run python experiments/train.py --resume', or experiments/tune.py"
    assert commands.as_commands(text) == "run 'loka train --resume', or loka tune"
    monkeypatch.undo()
    assert commands.as_commands(text) == text
    assert commands.run_by_python(("x.py", "--a")) == ["x.py", "--a"]
    command = ["-m", "loka_jax.commands", "train", "--a"]
    assert commands.run_by_python(("train", "--a")) == command


LOST = """
import os, signal, sys, time
from loka_jax.commands import unwind_on_sigterm

class Value:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})

unwind_on_sigterm()
try:
    value = Value()
    del value
    time.sleep(20)
except {error}:
    print("unwound")
    raise
"""


@pytest.mark.parametrize(
    "name, error, code",
    [("SIGTERM", "SystemExit", 143), ("SIGINT", "KeyboardInterrupt", -signal.SIGINT)],
)
def test_a_signal_in_a_finalizer_is_not_lost(name, error, code):
    """Python ignores what is raised there."""
    script = LOST.format(name=name, error=error)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=15
    )
    assert (done.returncode, done.stdout) == (code, "unwound\n"), done.stderr
