"""Times training steps that Probe observes, beside those that it does not.

    python experiments/bench/probe_cost.py --out probe_cost.json

Wall clock of queued steps. With one step of k observed, Probe costs
`(observed - plain) / (k plain)` of the training time, where `observed` is the mean of
steps with and without the covariances of weights, as often as they occur.

On a CPU: `--batch-sizes 64 --models fp8_dlrm --calls 2`.
"""

import dataclasses
import pathlib
from typing import Any

import tyro

from experiments.bench import result as results
from experiments.bench.steps import READ_STEP, chain_of, warm_up
from experiments.bench.train_step import MODELS, make_run
from loka_jax.measure.timing import time_chains
from loka_jax.train.config import ProbeOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        recipe: of the models.
        every: steps of which one is observed.
        batch_sizes: examples a step.
        models: fp8_dlrm, mlperf_dlrm.
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
    result = results.head("probe_cost", arguments) | {"rows": []}
    for model in arguments.models:
        for batch_size in arguments.batch_sizes:
            row = measure(model, batch_size, arguments)
            result["rows"].append(row)
            print(
                f"{model:12} {batch_size:6}: step {row['plain']['median_us']:.0f} us, "
                f"observed {row['rows']['median_us']:.0f}, with covariances of "
                f"weights {row['whole']['median_us']:.0f}: "
                f"{row['cost']:.2%} at one step of {arguments.every}",
                flush=True,
            )
            results.write(arguments.out, result)
    return result


def measure(model: str, batch_size: int, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of a step without Probe and of both kinds with it."""
    every = arguments.every
    probe = ProbeOptions(every=every)
    run = make_run(model, arguments.recipe, batch_size, probe)
    chains = {}
    for name, config in (
        ("plain", None),
        ("rows", probe.config_at(every)),
        ("whole", probe.config_at(0)),
    ):
        state, batches = warm_up(run)
        step = run.train_step(scales_initialized=True, probe=config)
        chains[name] = chain_of(step, [state], batches, READ_STEP)
    times = time_chains(chains, calls=arguments.calls)
    plain, rows, whole = (times[name].median_us for name in chains)
    share = 1 / probe.covariances_every
    return {
        "model": model,
        "batch_size": batch_size,
        **{name: times[name]._asdict() for name in chains},
        "cost": ((1 - share) * rows + share * whole - plain) / (every * plain),
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
