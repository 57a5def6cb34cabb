"""Times whole training steps by XLA alone, with kernels, under Dispatch, by part.

    python experiments/bench/step_split.py --config fp8_dlrm --out step_split.json

For each arm: microseconds a step (wall clock of queued steps, on batches made before),
the device's kernel time by part of the step (`steps`), and the memory of the
compiled step. Arms, by default the first two, xla RECIPE and dispatch:

    xla bf16     bfloat16 by XLA alone
    auto bf16    bfloat16 with kernels where they serve
    cudnn bf16   as xla, and the attention of an InterFormer by cuDNN, padded
    xla RECIPE   the configuration's recipe, or another, by XLA alone
    dispatch     the configuration's recipe or better, as the table for this GPU says
    auto RECIPE  a recipe at every site, with kernels where they serve

Without a GPU the parts are zero: `--batch-size 64 --calls 2`.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import tyro

from experiments.bench import result as results
from experiments.bench.models import MODS, Mod
from experiments.bench.padded_attention import in_place_of_jagged
from experiments.bench.steps import (
    READ_STEP,
    batches_of,
    chain_of,
    kernels_by_part,
    memory_bytes,
    warm_up,
)
from experiments.configs import get_config
from loka_jax.data import Batch
from loka_jax.dispatch.plan import plan_rows
from loka_jax.measure.compiling import NO_CAPTURE
from loka_jax.measure.timing import time_chains
from loka_jax.models import InterFormer
from loka_jax.ops import softmax_attention
from loka_jax.train.build import Run, build
from loka_jax.train.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        config: a configuration on generated data.
        batch_size: examples a step.
        calls: steps in a round.
        plan: of the arm "dispatch": "auto", a table or a plan.
        arms: to time; the first is the base of the speed-ups.
        mods: of the model in every arm.
    """

    out: pathlib.Path | None = None
    config: str = "fp8_dlrm"
    batch_size: int = 65536
    calls: int = 60
    plan: str = "auto"
    arms: tuple[str, ...] | None = None
    mods: tuple[Mod, ...] = ()


def main(arguments: Arguments) -> None:
    """Measures, prints a table, writes the result."""
    arms = arguments.arms or _arms(arguments.config)
    options = arguments.batch_size, arguments.mods, arguments.plan
    runs = {arm: run_of(arguments.config, arm, *options) for arm in arms}
    lowered = {}
    for arm, run in runs.items():
        with _attention_of(arm, run):
            lowered[arm] = _lowered(run)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = (pool.submit(job) for own in lowered.values() for job in own.jobs)
        for job in list(jobs):
            job.result()
    chains, measured = {}, {}
    for arm, run in runs.items():
        chains[arm], measured[arm] = _measured(run, lowered.pop(arm))
    times = time_chains(chains, calls=arguments.calls)
    base = next(iter(times.values())).median_us
    result = results.head("step_split", arguments) | {
        "arms": {
            arm: {
                "step": times[arm]._asdict(),
                "speedup": base / times[arm].median_us,
                **measured[arm],
                "plan": plan_rows(run.plan),
            }
            for arm, run in runs.items()
        }
    }
    results.write(arguments.out, result)
    _print(result)


def _arms(config: str) -> list[str]:
    recipe = get_config(config).model.recipe
    return ["xla bf16", "auto bf16", f"xla {recipe}", "dispatch"]


def run_of(
    config_name: str, arm: str, size: int, mods: Sequence[Mod], plan: str = "auto"
) -> Run:
    """Returns the run of an arm, at batches of `size` generated examples.

    Args:
        config_name: of the configuration.
        arm: "auto RECIPE" or "xla RECIPE" at every site, "dispatch" for the plan's.
        size: examples a step.
        mods: of the model.
        plan: of "dispatch".
    """
    config = get_config(config_name)
    provider, _, recipe = arm.partition(" ")
    model, rows = config.model, config.embedding
    for mod in mods:
        model = model.clone(**MODS[mod])
    if recipe:
        implementation = None if provider == "auto" else "xla"
        model = model.clone(recipe=recipe, implementation=implementation)
        rows = dataclasses.replace(rows, implementation=implementation)
        plan = "off"
    data = dataclasses.replace(config.data, examples=size * 64, eval_examples=1024)
    loop = dataclasses.replace(config.loop, batch_size=size)
    return build(
        dataclasses.replace(
            config, model=model, embedding=rows, data=data, loop=loop, plan=plan
        )
    )


def _attention_of(arm: str, run: Run) -> contextlib.AbstractContextManager:
    """Returns a context in which an arm's attention is that of its provider."""
    if not arm.startswith("cudnn"):
        return contextlib.nullcontext()
    model = run.config.model
    if not isinstance(model, InterFormer):
        raise ValueError(
            f"{arm} is an arm of an InterFormer, not of {type(model).__name__}."
        )
    longest = model.max_length + model.num_cls
    attention = in_place_of_jagged(run.config.loop.batch_size, longest)
    return mock.patch.object(softmax_attention, "softmax_attention", attention)


class _Lowered(NamedTuple):
    """A run that begins, jobs that compile its steps, and that without captures."""

    state: TrainState
    batches: list[Batch]
    jobs: list[Callable[[], None]]
    compiled: concurrent.futures.Future


def _lowered(run: Run) -> _Lowered:
    """Returns a run whose steps are lowered, to be compiled beside those of others."""
    state, batches = run.init(), batches_of(run)
    first, step = run.train_step(), run.train_step(scales_initialized=True)
    without_captures = step.lower(state, batches[0])
    compiled = concurrent.futures.Future()
    programs = [first] if first is step else [first, step]  # of delayed scales, two
    jobs = [program.lowered(state, batches[0]) for program in programs]
    jobs.append(lambda: compiled.set_result(without_captures.compile(dict(NO_CAPTURE))))
    return _Lowered(state, batches, jobs, compiled)


def _measured(run: Run, lowered: _Lowered):
    """Returns steps as a chain, and a step's memory and its kernel time by part."""
    batches, compiled = lowered.batches, lowered.compiled.result()
    state = warm_up(run, lowered.state, batches)
    # The step takes no statistics of Probe where it does not observe.
    held = [dataclasses.replace(state, probe={})]
    chain = chain_of(compiled, held, batches, READ_STEP)
    parts = kernels_by_part(compiled.as_text() or "", chain)
    measured = {"memory_bytes": memory_bytes(compiled), "kernels_us": parts}
    step = run.train_step(scales_initialized=True)
    return chain_of(step, held, batches, READ_STEP), measured


def _print(result: dict[str, Any]):
    for arm, record in result["arms"].items():
        step_us, speedup = record["step"]["median_us"], record["speedup"]
        memory = f"{record['memory_bytes'] / 1e9:.2f} GB"
        print(f"{arm}: {step_us:.0f} us by wall clock, {speedup:.2f}x, {memory}")
        print("  kernels:")
        for part, time_us in record["kernels_us"].items():
            print(f"  {part:24}{time_us:8.0f} us")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
