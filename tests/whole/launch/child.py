"""Stand-ins for a training process: each does what its first argument says."""

import os
import pathlib
import signal
import subprocess
import sys
import time

RANK = int(os.environ["RANK"])


def say(text):
    print(text, flush=True)


def has_text(path):
    return path.exists() and path.stat().st_size > 0


def deaf():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: say(f"heard {number}"))
    say("waiting")
    while True:
        time.sleep(0.05)


def nest(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = [pathlib.Path(folder, rank) for rank in "01"]
    started[RANK].write_text(str(child.pid))
    # The launcher ends rank 0 with rank 1, which may have started long before it.
    while RANK == 0 or not all(map(has_text, started)):
        time.sleep(0.02)
    sys.exit(3)


def done():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "JAX_PLATFORMS")
    say(" ".join(os.environ[name] for name in names))


def main(what, *arguments):
    {"deaf": deaf, "nest": nest, "done": done}[what](*arguments)


main(*sys.argv[1:])
