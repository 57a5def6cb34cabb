"""Times training steps that Probe observes, beside those that it does not.

    python experiments/bench/probe_cost.py --out probe_cost.json

Wall clock of queued steps. With one step of k observed Probe costs
`(observed - plain) / (k plain)` of the training time, where `observed` is the mean of
steps with and without the covariances of weights, as often as they occur.
"""

import dataclasses
import json
import pathlib
import shlex
import sys
from typing import Any

import jax
import tyro

from experiments.bench.train_step import MODELS, make_run
from loka_jax.data import Position
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.nn import ProbeConfig
from loka_jax.train.build import Run
from loka_jax.train.config import ProbeOptions
from loka_jax.train.record import versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        recipe: of the models.
        every: steps of which one is observed.
        batch_sizes: examples a step.
        models: of those in `train_step.py`.
        calls: steps queued in a round.
    """

    out: pathlib.Path | None = None
    recipe: str = "fp8_tensorwise_delayed_bf16_drhs"
    every: int = 100
    batch_sizes: tuple[int, ...] = (8192, 65536)
    models: tuple[str, ...] = tuple(MODELS)
    calls: int = 60


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints a table, writes and returns the result."""
    result: dict[str, Any] = {
        "benchmark": "probe_cost",
        "command": shlex.join(["python", *sys.argv]),
        "arguments": dataclasses.asdict(arguments) | {"out": None},
        "versions": versions(),
        "rows": [],
    }
    for model in arguments.models:
        for batch_size in arguments.batch_sizes:
            row = measure(model, batch_size, arguments)
            result["rows"].append(row)
            print(
                f"{model:12} {batch_size:6}: step {row['plain']['median_us']:.0f} us, "
                f"observed {row['rows']['median_us']:.0f}, with covariances of "
                f"weights {row['whole']['median_us']:.0f}: "
                f"{row['cost']:.2%} at one step of {arguments.every}"
            )
            if arguments.out is not None:
                text = json.dumps(result, indent=1, allow_nan=False)
                arguments.out.write_text(text + "\n")
    return result


def measure(model: str, batch_size: int, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of both steps, and what Probe costs."""
    every = arguments.every
    probe = ProbeOptions(every=every)
    run = make_run(model, arguments.recipe, batch_size, probe)
    chains = {
        "plain": _chain(run, batch_size, None),
        "rows": _chain(run, batch_size, probe.config_at(every)),
        "whole": _chain(run, batch_size, probe.config_at(0)),
    }
    kernels = {name: profile_kernels(chain) for name, chain in chains.items()}
    times = time_chains(chains, calls=arguments.calls)
    plain, rows, whole = (times[name].median_us for name in chains)
    share = 1 / probe.covariances_every
    return {
        "model": model,
        "batch_size": batch_size,
        **{name: times[name]._asdict() for name in chains},
        "kernels": {k: v and v._asdict() for k, v in kernels.items()},
        "cost": ((1 - share) * rows + share * whole - plain) / (every * plain),
    }


def _chain(run: Run, batch_size: int, probe: ProbeConfig | None):
    """Returns a function that queues that many steps."""
    train = run.splits.train
    held = {"state": run.init()}
    batches = [
        jax.block_until_ready(train.batch(Position(0, i, 0), batch_size, shuffle=True))
        for i in range(8)
    ]
    for batch in batches[:3]:  # initializes delayed scales
        held["state"] = run.first_step(held["state"], batch)
    step = run.train_step(scales_initialized=True, probe=probe)

    def steps(count: int):
        for i in range(count):
            held["state"] = step(held["state"], batches[i % len(batches)])
        return held["state"].step

    return steps


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
