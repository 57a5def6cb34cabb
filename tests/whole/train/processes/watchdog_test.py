"""The watchdog ends a process that makes no progress, and no other."""

import subprocess
import sys
import threading
import time

from loka_jax.train.processes.watchdog import Watchdog

STUCK = """
import time
from loka_jax.train.processes.watchdog import Watchdog, resting
with Watchdog(1.0) as watch:
    until = time.monotonic() + 1.5  # longer in all than the watchdog waits
    while time.monotonic() < until:
        time.sleep(0.01)
        watch.alive()
    print("trained", flush=True)
    with resting():
        time.sleep(1.5)
    print("compiled", flush=True)
    time.sleep(300)
"""


def test_a_process_without_progress_ends_with_a_sentence():
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "trained\ncompiled\n")
    *stacks, sentence = done.stderr.splitlines()
    assert sentence.startswith("error: no step within 1 s (--watchdog): ")
    assert "waits at <string>:13 in <module>" in sentence
    assert any("Thread" in line for line in stacks)


def test_it_ends_once():
    codes = []
    with Watchdog(0.05, end=codes.append) as watch:
        while not codes:
            time.sleep(0.01)
        watch.alive()
    assert codes == [1]


def test_nothing_is_watched_after_it_was_closed():
    with Watchdog(3600.0):
        assert "watchdog" in thread_names()
    assert "watchdog" not in thread_names()


def thread_names():
    return [thread.name for thread in threading.enumerate()]
