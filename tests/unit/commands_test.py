"""The command `loka`: the scripts of experiments/ under one name."""

import pathlib
import subprocess
import sys

import pytest

from loka_jax import commands

RUN = """
import pathlib, sys
from loka_jax import commands
commands._IN_WHEEL = pathlib.Path(sys.argv[1])
sys.exit(commands.main(sys.argv[2:]))
"""
ROOT = pathlib.Path(__file__).parents[2]


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
    (folder / "echo.py").write_text(
        '"""Prints its arguments.\n\nAt length."""\nimport sys\n'
        "from experiments.helper import words\n\n"
        "def main():\n    print(*words(), *sys.argv[1:])\n    return 3\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    monkeypatch.setattr(commands, "_IN_WHEEL", folder)


def test_the_help_lists_every_command_with_what_it_does(capsys):
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert "\n  train        Trains a ranking model.\n" in out
    assert {"train", "predict", "compare", "probe", "tune"} <= {*commands.names()}
    assert not {"cli", "options", "first_help"} & {*commands.names()}
    assert all(f"\n  {name} " in out for name in commands.names())


def test_an_unknown_command_is_refused_with_a_near_one(capsys):
    code, out, err = run(capsys, "trian", "--config", "fp8_dlrm")
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no command 'trian': did you mean 'train'? ")
    assert run(capsys)[0] == 2


def test_a_command_runs_as_a_script_and_ends_with_its_code(as_in_a_wheel):
    line = [sys.executable, "-c", RUN, str(commands.folder()), "echo", "b"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "a b\n"), done.stderr


def test_an_interrupt_while_modules_load_ends_without_a_traceback(as_in_a_wheel):
    slow = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    (commands.folder() / "echo.py").write_text(slow + "def main(): ...\n")
    line = [sys.executable, "-c", RUN, str(commands.folder()), "echo"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_texts_name_what_the_installation_has(as_in_a_wheel, monkeypatch):
    text = "run 'uv run python experiments/train.py --resume', or experiments/tune.py"
    assert commands.spoken(text) == "run 'loka train --resume', or loka tune"
    monkeypatch.undo()
    assert commands.spoken(text) == text


def test_python_is_given_a_script_or_a_command(tmp_path, monkeypatch):
    assert commands.run_by_python(("x.py", "--a")) == ["x.py", "--a"]
    command = ["-m", "loka_jax.commands", "train", "--a"]
    assert commands.run_by_python(("train", "--a")) == command
    (tmp_path / "train").touch()
    monkeypatch.chdir(tmp_path)
    assert commands.run_by_python(("train", "--a")) == ["train", "--a"]
