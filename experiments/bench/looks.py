"""Times looks at the operands of FP8 sites, beside training steps.

    python experiments/bench/looks.py --config fp8_wukong_m --out looks.json

For each batch size: microseconds of a step and of a look (wall clock of queued calls),
the kernels of a look by JAX's profiler, the seconds of its first call, which compiles
it, and the most memory in use before and after that call (None on a CPU; of the sizes
so far). With one look in k steps, looks cost `look / (k step)` of the time.

On a CPU: `--config fp8_dlrm --batch-sizes 64 --calls 2`.
"""

import dataclasses
import time
from typing import Any

import jax
import tyro

from experiments.bench import result as results
from experiments.bench.models import Mod
from experiments.bench.step_split import run_of
from experiments.bench.steps import READ_STEP, chain_of, warm_up
from loka_jax.data import Position
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.looks import look_step, watched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        config: a configuration on generated data.
        batch_sizes: examples a step.
        recipe: of all sites, with kernels where they serve.
        mods: of the model.
        calls: steps and looks in a round.
    """

    config: str = "fp8_wukong_m"
    batch_sizes: tuple[int, ...] = (2048, 16384)
    recipe: str = "fp8_tensorwise_delayed"
    mods: tuple[Mod, ...] = ()
    calls: int = 20


def main(arguments: Arguments) -> None:
    """Measures, prints a line for each batch size, writes the result."""
    result = results.head("looks", arguments) | {"runs": {}}
    for size in results.in_time(arguments.batch_sizes, result, arguments):
        record = measure(arguments, size)
        result["runs"][f"{arguments.config} {size}"] = record
        print(
            f"{arguments.config} {size}: look {record['look']['median_us']:.0f} us "
            f"after {record['first_look_s']:.1f} s, step "
            f"{record['step']['median_us']:.0f} us: {record['cost']:.2%} of the time "
            f"at one look in {record['look_every']} steps",
            flush=True,
        )


def measure(arguments: Arguments, size: int) -> dict[str, Any]:
    """Returns the times of steps and of looks at a batch size.

    Raises:
        ValueError: if no site is in FP8.
    """
    arm = f"auto {arguments.recipe}"
    run = run_of(arguments.config, arm, size, arguments.mods)
    state, batches = warm_up(run)
    held = [dataclasses.replace(state, probe={})]
    look = look_step(run, watched(run, Progress(position=Position(0, 0, 0))))
    if look is None:
        raise ValueError(
            f"{arguments.recipe} has no site of {arguments.config} in FP8."
        )
    step_bytes = _peak_bytes()
    start = time.perf_counter()
    jax.block_until_ready(look(held[0], batches[0]))
    first_s = time.perf_counter() - start
    look_bytes = _peak_bytes()

    def looks(count: int) -> Any:
        return [look(held[0], batches[i % len(batches)]) for i in range(count)][-1]

    steps = chain_of(run.train_step(scales_initialized=True), held, batches, READ_STEP)
    times = time_chains({"step": steps, "look": looks}, calls=arguments.calls)
    kernels = profile_kernels(looks, calls=3)
    every = run.config.probe.look_every
    return {
        **{name: timing._asdict() for name, timing in times.items()},
        "look_every": every,
        "cost": times["look"].median_us / (every * times["step"].median_us),
        "first_look_s": first_s,
        "peak_bytes": {"steps": step_bytes, "steps and a look": look_bytes},
        "look_kernels": None if kernels is None else kernels._asdict(),
    }


def _peak_bytes() -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
