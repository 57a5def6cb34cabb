"""The watchdog ends a process that makes no progress, and no other."""

import subprocess
import sys
import time

from loka_jax.train.watchdog import Watchdog

STUCK = """
import time
from loka_jax.train.watchdog import Watchdog, resting
with Watchdog(0.2) as watch:
    for _ in range(8):
        time.sleep(0.1)  # longer in all than the watchdog waits
        watch.alive()
    print("trained", flush=True)
    with resting():
        time.sleep(0.8)
    print("compiled", flush=True)
    time.sleep(60)
"""


def test_a_process_without_progress_ends_with_a_sentence():
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - began < 30
    assert (done.returncode, done.stdout) == (1, "trained\ncompiled\n")
    *stacks, sentence = done.stderr.splitlines()
    assert sentence.startswith("error: no step within 0.2 s (--watchdog): ")
    assert "waits at <string>:12 in <module>" in sentence
    assert any("Thread" in line for line in stacks)


def test_it_ends_once_and_not_after_it_was_closed():
    codes = []
    with Watchdog(0.05, end=codes.append) as watch:
        while not codes:
            time.sleep(0.01)
        watch.alive()
    assert codes == [1]
    with Watchdog(0.05, end=codes.append):
        pass
    time.sleep(0.1)
    assert codes == [1]
