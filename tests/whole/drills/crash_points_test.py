"""Crash points of a save: every eighth in every run, all by the command."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def test_a_crash_within_a_save_loses_nothing():
    command = [sys.executable, "-m", "tests.drills.crash_points", "--every", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "5 points, nothing lost\n"
