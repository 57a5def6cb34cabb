"""`python -m loka_jax.launch --processes 4 experiments/train.py --config fp8_dlrm`.

Or a command of `loka`: `python -m loka_jax.launch --processes 4 train ...`.

Exit codes: 0 done; 2 an error that the user can mend; 1 a process failed, died or hung;
130 or 143 stopped by Ctrl-C or SIGTERM.
"""

import argparse
import os
import sys
from pathlib import Path

from loka_jax.launch.ending import ended_by
from loka_jax.launch.processes import Job, Processes, why_not
from loka_jax.launch.supervisor import Supervisor
from loka_jax.terminal import printable


def main(arguments: list[str]) -> int:
    """Runs a job and returns its exit code."""
    options = _parsed(arguments)
    job = Job(
        command=options.command,
        processes=options.processes,
        logs=options.logs or _new_folder(Path("runs")),
        cpu_devices=options.cpu_devices,
    )
    if (reason := why_not(job, os.environ)) is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    print(f"{job.processes} processes; their output is in {job.logs}/rank-*.log")
    sys.stdout.flush()
    supervisor = Supervisor(processes := Processes(job))
    with processes:
        end = supervisor.wait()
    if (sentence := ended_by(job, end)) is not None:
        print(f"error: {printable(sentence)}", file=sys.stderr)
    return end.code


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loka_jax.launch",
        description="Runs a script in several processes, one for each GPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N")
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="folder of rank-0.log, rank-1.log ...; a new one under runs/ if left out",
    )
    parser.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="runs each process on so many CPU devices, and on no GPU",
    )
    parser.add_argument("script", help="for example experiments/train.py, or train")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    options.command = (options.script, *options.arguments)
    return options


def _new_folder(parent: Path) -> Path:
    """Returns the first folder launch-<n> that is not there."""
    number = 1
    while (parent / f"launch-{number}").exists():
        number += 1
    return parent / f"launch-{number}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
