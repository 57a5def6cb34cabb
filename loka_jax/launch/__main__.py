"""`python -m loka_jax.launch --processes 4 experiments/train.py --config fp8_dlrm`.

Or a command of `loka`: `python -m loka_jax.launch --processes 4 train ...`.

Exit codes: 0 done; 2 an error that the user can mend; 1 a process failed, died or hung;
130 or 143 stopped by Ctrl-C or SIGTERM.
"""

import os
import sys
from argparse import REMAINDER
from pathlib import Path

from loka_jax.launch.job import Job, require_devices
from loka_jax.launch.supervisor import Supervisor, describe_end
from loka_jax.options import Parser
from loka_jax.terminal import printable


def main(arguments: list[str]) -> int:
    """Runs a job and returns its exit code."""
    try:
        job = _job(arguments)
    except ValueError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    print(f"{job.processes} processes; their output is in {job.logs}/rank-*.log")
    sys.stdout.flush()
    supervisor = Supervisor(job)
    with job.running():
        end = supervisor.wait()
    if (sentence := describe_end(job, end)) is not None:
        print(f"error: {printable(sentence)}", file=sys.stderr)
    return end.code


def _job(arguments: list[str]) -> Job:
    """Returns the job of a command line, whose folder of logs it makes.

    Raises:
        ValueError: if it cannot run here, or its logs cannot be written.
    """
    parser = Parser(
        prog="python -m loka_jax.launch",
        description="Runs a script in several processes, one for each GPU.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=int, required=True, metavar="N")
    logs = "folder of rank-0.log, rank-1.log ...; a new one under runs/ if left out"
    add("--logs", type=Path, metavar="FOLDER", help=logs)
    on_cpu = "runs each process on so many CPU devices, and on no GPU"
    add("--cpu-devices", type=int, metavar="N", help=on_cpu)
    add("script", help="for example experiments/train.py, or train")
    add("arguments", nargs=REMAINDER, help="of the script")
    options = parser.parse_args(arguments)
    require_devices(options.processes, options.cpu_devices)
    try:
        folder = (options.logs or _new_folder(Path("runs"))).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder of logs {error.filename} ({error.strerror}): "
            "choose another --logs."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write to {folder}: choose another --logs.")
    return Job(
        command=(options.script, *options.arguments),
        processes=options.processes,
        logs=folder,
        cpu_devices=options.cpu_devices,
    )


def _new_folder(parent: Path) -> Path:
    """Returns a new folder launch-<n>, which no other launcher has made."""
    parent.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = parent / f"launch-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
