"""Says what each mesh of GPUs would take of memory, wire and time; nothing runs.

    python experiments/plan.py --config fp8_dlrm --gpus 8
    python experiments/plan.py --config fp8_dlrm --simulate

For every mesh of M replicas x L shards: gigabytes a GPU, megabytes that a GPU sends in
a step, and the time of the step, by part. The batch of the configuration is that of all
GPUs. `--simulate` gives every GPU that batch instead, on 1 to 4,096 GPUs, and prints
the fastest mesh of each number, and its speed as a share of that many single GPUs.

Rates are those of an H200 and of links between H100, or yours: `--rates.link-gb-s`,
`--rates.network-gb-s`, ... `--dense-us` is the measured time of a step without its
tables; else it is estimated. docs/distributed.md has the model.

Exit codes: 0 printed; 2 no mesh fits, or an option that you can mend.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import math
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from experiments.cli import parse_with, run_cli
from loka_jax import jsonfile
from loka_jax.commands import as_commands
from loka_jax.data import Schema, generated, open_data
from loka_jax.options import require, require_folder
from loka_jax.train.config import Config
from loka_jax.train.planner.mesh_plan import (
    GB,
    Estimate,
    Mesh,
    Rates,
    estimate,
    fastest,
    meshes,
    require_fit,
)
from loka_jax.train.planner.workload import Workload, workload_of

SIMULATED = tuple(2**k for k in range(13))
_NO_FILE = pathlib.Path()


def plan(config: Config, options: Mapping[str, Any]) -> int:
    """Prints what meshes take, and returns the exit code.

    Raises:
        ValueError: if no mesh fits.
    """
    rates, gpus, dense_us = (options[name] for name in ("rates", "gpus", "dense_us"))
    batch = config.loop.batch_size
    require(gpus >= 1, "--gpus", gpus, "at least 1")
    require_folder("--out", options["out"])
    require(0 <= dense_us < math.inf, "--dense-us", dense_us, "a time, at least 0")
    schema, dense_us = schema_of(config), dense_us or None
    if options["simulate"]:
        workload = workload_of(config, schema, batch, dense_us)
        estimates = [fastest(workload, n, rates) for n in SIMULATED]
        print(simulation(workload, estimates, rates))
    else:
        is_even = batch % gpus == 0
        require(is_even, "--loop.batch-size", batch, f"a multiple of --gpus {gpus}")
        workload = workload_of(config, schema, batch // gpus, dense_us)
        estimates = [estimate(workload, mesh, rates) for mesh in meshes(gpus)]
        print(report(workload, estimates, rates))
        print(f"fastest: {require_fit(workload, gpus, rates).mesh}")
    if options["out"] != _NO_FILE:
        command = shlex.join(["python", "experiments/plan.py", *sys.argv[1:]])
        found = {
            "command": as_commands(command),
            "workload": dataclasses.asdict(workload),
            "rates": dataclasses.asdict(rates),
            "meshes": [
                dataclasses.asdict(one)
                | {"step_us": one.step_us, "why_not": one.why_not(rates)}
                for one in estimates
            ],
        }
        text = jsonfile.dumps(found, indent=1)
        jsonfile.write_text(options["out"], text + "\n")
    return 0


def report(workload: Workload, estimates: list[Estimate], rates: Rates) -> str:
    """Returns a table of meshes with parts of memory, wire and time."""
    head = f"{workload.name}, {workload.batch} examples a GPU"
    lines = [head, "", "mesh        GB    MB sent   us a step"]
    for one in estimates:
        sent = sum(one.wire.values()) / 1e6
        lines.append(
            f"{one.mesh!s:9}{one.memory_bytes / GB:7.2f}{sent:9.1f}{one.step_us:11.0f}"
        )
        if reason := one.why_not(rates):
            lines.append(f"          does not fit: {reason}")
        lines.append(f"          GB: {_parts(one.memory, GB, 2)}")
        lines.append(f"          MB: {_parts(one.wire, 1e6, 1)}")
        lines.append(f"          us: {_parts(one.us, 1, 0)}")
    return "\n".join(lines)


def simulation(workload: Workload, estimates: list[Estimate], rates: Rates) -> str:
    """Returns a table of the fastest mesh of each number of GPUs."""
    alone = estimate(workload, Mesh(1, 1), rates).step_us
    lines = [
        f"{workload.name}, {workload.batch} examples a GPU, "
        f"{rates.link_gb_s:g} GB/s in a host of {rates.gpus_per_host}, "
        f"{rates.network_gb_s:g} between hosts",
        "",
        " GPUs  mesh         GB   us a step  of linear",
    ]
    for one in estimates:
        fits = one.why_not(rates) is None
        lines.append(
            f"{one.mesh.gpus:5}  {one.mesh!s:9}{one.memory_bytes / GB:6.1f}"
            f"{one.step_us:12.0f}{alone / one.step_us:10.1%}"
            f"{'' if fits else '  does not fit'}"
        )
    return "\n".join(lines)


def _parts(parts: Mapping[str, float], unit: float, digits: int) -> str:
    return ", ".join(f"{name} {x / unit:,.{digits}f}" for name, x in parts.items() if x)


def schema_of(config: Config) -> Schema:
    """Returns the data's columns; generated data need not be made for that."""
    if config.data.kind == "generated":
        return generated.schema_of(config.data)
    splits = open_data(config.data, seed=config.seed)
    return splits.crossed(config.embedding.crosses).train.schema


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""

    def command() -> int:
        own = dict(gpus=8, simulate=False, dense_us=0.0, rates=Rates(), out=_NO_FILE)
        return plan(*parse_with(arguments, "plan.py", **own))

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
