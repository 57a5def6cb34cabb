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


def wait():
    say("waiting")
    while True:
        time.sleep(0.05)


def wait_until(is_true):
    """Waits as long as the job may last: the test that has started it has a limit."""
    while not is_true():
        time.sleep(0.02)


def has_text(path):
    return path.exists() and path.stat().st_size > 0


def note(name, text):
    (pathlib.Path(os.environ["LOKA_LOGS"]) / name).write_text(text)


def deaf():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: say(f"heard {number}"))
    wait()


def save():
    def stop(number, _):
        say(f"saved on signal {number}")
        sys.exit(128 + number)

    signal.signal(signal.SIGINT, stop)
    wait()


def main(what, *arguments):
    if what == "done":
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "JAX_PLATFORMS")
        say(" ".join(os.environ[name] for name in names))
    elif what == "die" and RANK == 1:
        note("workdir", arguments[0])
        say("step 7")
        note("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "fail" and RANK == 1:
        say("Traceback\nKeyError: 3")
        sys.exit(1)
    elif what == "refuse" and RANK == 1:
        say("error: no such file.")
        sys.exit(2)
    elif what == "stuck" and RANK == 0:
        wait_until(lambda: "T" in state_of_peer(arguments[0]))
        say("no step for 1 s")
        os._exit(1)
    elif what == "stuck":
        pathlib.Path(arguments[0]).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "nest":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        started = [pathlib.Path(arguments[0], rank) for rank in "01"]
        started[RANK].write_text(str(child.pid))
        # The launcher ends rank 0 with rank 1, which may have started long before it.
        wait_until(lambda: RANK == 1 and all(map(has_text, started)))
        sys.exit(3)
    elif what == "deaf":
        deaf()
    elif what == "save" or (what == "late" and RANK == 0):
        save()
    elif what == "late":
        deaf()
    else:
        wait()


def state_of_peer(path):
    try:
        pid = pathlib.Path(path).read_text()
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


main(*sys.argv[1:])
