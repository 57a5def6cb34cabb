"""Ends a process at every file event of a save; no acknowledged checkpoint may be lost.

    python -m tests.drills.crash_points [--every N]

A process with the checkpoints 1 and 2 saves step 3 and ends just before its n-th file
event, for n = 1, 2, ... until a save completes. Another process must then find step 2
or 3, bit for bit, save step 4, and leave nothing else behind. It prints the number of
points, and exits with 1 and the first point that fails.

Processes are forked from one that has imported everything and started no thread. What
Orbax's C++ code writes raises no Python event; the drill of kills covers that.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from loka_jax.train.checkpoints.checkpoint import Checkpoints

# Audit events that change a file system.
_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link")
_KILLED = 9


def state(step: int) -> dict[str, np.ndarray]:
    params = np.random.default_rng(step).standard_normal((64, 16))
    return {"params": params.astype(np.float32), "step": np.asarray(step, np.int32)}


def in_child(action: Callable, *arguments, **options) -> int:
    """Returns the exit code of a forked process that acts."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        action(*arguments, **options)
    except BaseException as error:  # a forked child must not run its parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def save(directory: Path, *steps: int, end_at: int = 0) -> None:
    """Saves states, and ends this process before a file event in the directory."""
    left = [end_at]

    def hook(event: str, arguments: tuple) -> None:
        is_open = event == "open" and isinstance(arguments[0], str)
        is_change = event in _EVENTS or (is_open and "r" not in (arguments[1] or "r"))
        path = os.fsdecode(arguments[0]) if is_change else ""
        # A tree is removed by names relative to open folders.
        if not path or (os.path.isabs(path) and not path.startswith(str(directory))):
            return
        left[0] -= 1
        if not left[0]:
            os._exit(_KILLED)

    sys.addaudithook(hook)
    with Checkpoints(directory, keep=2) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {})


def check(directory: Path) -> None:
    """Raises AssertionError unless the checkpoints are whole and a save works."""
    with Checkpoints(directory, keep=2) as checkpoints:
        saved = checkpoints.newest()
        assert saved is not None
        step, restored = saved.step, checkpoints.read(saved, state(0))
        assert step in (2, 3), f"step {step} is the newest"
        for name, array in state(step).items():
            assert restored[name].tobytes() == array.tobytes(), name
        checkpoints.save(4, state(4), {})
        checkpoints.wait()
        newest = checkpoints.newest()
        assert newest is not None and newest.step == 4
    names = {path.name for path in directory.iterdir()}
    assert names == {str(step), "4"}, f"left behind: {names}"


def drill(every: int, folder: Path) -> int:
    """Returns the number of points; raises AssertionError at the first that fails."""
    before = folder.resolve() / "before"
    assert in_child(save, before, 1, 2) == 0
    for point in range(1, 10_000, every):
        directory = Path(shutil.copytree(before, before.with_name(f"{point}")))
        code = in_child(save, directory, 3, end_at=point)
        if code == 0:  # the save has fewer events
            return (point - 1) // every
        assert code == _KILLED, f"point {point}: the save failed"
        assert in_child(check, directory) == 0, f"point {point}"
        shutil.rmtree(directory)
    raise AssertionError("the save does not end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try every N-th point")
    try:
        with tempfile.TemporaryDirectory() as folder:
            points = drill(parser.parse_args().every, Path(folder))
    except AssertionError as error:
        print(f"failed: {error}")
        return 1
    print(f"{points} points, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
