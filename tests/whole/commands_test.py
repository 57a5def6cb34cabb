"""The command `loka` as a process: its exit code, and Ctrl-C while modules load."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
RUN = """
import pathlib, sys
from loka_jax import commands
commands._IN_WHEEL = pathlib.Path(sys.argv[1])
sys.exit(commands.main(sys.argv[2:]))
"""
ECHO = """
import sys
from experiments.helper import words

def main(): ...

if __name__ == "__main__":
    print(*words(), *sys.argv[1:])
    sys.exit(3)
"""
INTERRUPTED = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
def main(): ...
"""


def test_a_command_runs_as_a_script_and_ends_with_its_code(tmp_path):
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "helper.py").write_text("def words(): return ['a']")
    (folder / "echo.py").write_text(ECHO)
    (folder / "stopped.py").write_text(INTERRUPTED)
    for command, expected in (("echo", (3, "a b\n", "")), ("stopped", (130, "", ""))):
        line = [sys.executable, "-c", RUN, str(folder), command, "b"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == expected
