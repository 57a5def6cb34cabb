"""Crash points of a save: every eighth in every run, all by the command."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def test_a_crash_within_a_save_loses_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "tests.drills.crash_points", "--every", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "points, nothing lost" in done.stdout
