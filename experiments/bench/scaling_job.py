"""Times training steps on GPUs of this job; `scaling.py` starts it and compares.

    python experiments/bench/scaling_job.py --config fp8_dlrm --job.points 1x65536
    python -m loka_jax.launch --processes 2 experiments/bench/scaling_job.py \
        --config fp8_dlrm --job.points 2x65536

A point is a number of GPUs x the examples of each. For every point the run is built and
warmed up as in training: lists are routed until all fit, scales are initialized. Then
two chains of steps are timed, one after the other:

    step         on batches that lie on the devices, each routed ahead
    with_input   on batches that the prefetch thread makes meanwhile, as in training

Wall clock of queued steps. `queue_us` is the time of the host to queue a step while the
device is idle: if a step lasts no longer, the host is its limit. `parts` has the
device's kernel time of a step by part, where one process has all GPUs: that of
collectives includes waiting for other GPUs. A plan for as many examples of a GPU is
found in `--job.plans`, or left there; `plan_notes` are what a run prints below it.
"""

import dataclasses
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from experiments.bench import result as results
from experiments.bench.origin import origin
from experiments.bench.step_parts import kernels_by_part
from experiments.bench.steps import NUM_BATCHES, READ_STEP, Chain, chain_of
from experiments.cli import parse_with, run_cli
from loka_jax import jsonfile
from loka_jax.data import Batch, Position
from loka_jax.data.prefetch import placed
from loka_jax.dispatch.plan import as_json
from loka_jax.measure.compiling import NO_CAPTURE
from loka_jax.measure.timing import time_chains
from loka_jax.terminal import one_line
from loka_jax.train.build import Run, build, build_in_turn
from loka_jax.train.config import Config
from loka_jax.train.folder.record import versions
from loka_jax.train.mesh.placement import MeshPlacement
from loka_jax.train.processes.group import Processes, leave, start
from loka_jax.train.state import TrainState

_FIRST = Position(0, 0, 0)
_ROUNDS = 7  # that are timed, after one more
_EPOCH = 64  # batches
_FEW = 3  # steps, of which none needs what another computes


class Point(NamedTuple):
    """What is timed: so many GPUs, and examples of each in a step."""

    gpus: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> "Point":
        """Returns the point of a text such as "2x65536".

        Raises:
            ValueError: if the text is not GPUSxEXAMPLES.
        """
        gpus, _, batch = text.partition("x")
        if not (gpus.isdecimal() and batch.isdecimal() and int(gpus) * int(batch)):
            raise ValueError(f"--job.points {text} must be GPUSxEXAMPLES, as 2x65536.")
        return cls(int(gpus), int(batch))

    def __str__(self) -> str:  # noqa: D105
        return f"{self.gpus}x{self.batch}"


@dataclasses.dataclass(frozen=True)
class Options:
    """What is timed in this job.

    Attributes:
        points: GPUs x examples of each.
        steps: timed steps of a chain.
        parts: also profile a step by part.
        plans: folder of plans by the examples of a GPU; "" for none.
        out: where to write the JSON, after every point; "" for nowhere.
        budget_s: begin no point after that many seconds.
    """

    points: tuple[str, ...] = ("1x65536",)
    steps: int = 1400
    parts: bool = True
    plans: str = ""
    out: str = ""
    budget_s: float = 600.0


def measure_all(config: Config, options: Options) -> int:
    """Times all points, writes them, and returns the exit code."""
    begun = time.perf_counter()
    points = [Point.parse(text) for text in options.points]
    processes = start()
    result: dict[str, Any] = {"versions": versions(), **origin()}
    result |= {"processes": processes.count, "points": []}
    for point in points:
        used = time.perf_counter() - begun
        if processes.same("late" if used > options.budget_s else "in time") == "late":
            record = {"failed": f"not begun: {used:.0f} s are over the budget"}
        else:
            record = _measured_or_failed(config, point, options, processes)
        result["points"].append(point._asdict() | record)
        result["seconds"] = time.perf_counter() - begun
        if processes.is_first:
            print(jsonfile.dumps(result["points"][-1]), flush=True)
            results.write(pathlib.Path(options.out) if options.out else None, result)
    return 0


def _measured_or_failed(
    config: Config, point: Point, options: Options, processes: Processes
) -> dict[str, Any]:
    """Returns the record of a point, or why there is none."""
    try:
        return measure(config, point, options, processes)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        if processes.count > 1:  # the others would wait for this one
            raise
        return {"failed": one_line(error)}


def measure(
    config: Config, point: Point, options: Options, processes: Processes
) -> dict[str, Any]:
    """Returns the times of steps at a point."""
    begun = time.perf_counter()
    run = _run_at(config, point, options, processes)
    batches = [_batch(run, number) for number in range(NUM_BATCHES)]
    held = [_warmed_up(run, batches)]
    ready = time.perf_counter()
    each = config.loop.steps_per_call
    calls = -(-options.steps // (_ROUNDS * each)) * each
    step = _steps_on(run, held, _over_and_over(batches))
    times = time_chains({"step": step}, calls=calls, rounds=_ROUNDS)
    queue_us = _queue_us(step, max(_FEW, 2 * each))
    with run.prefetched(_FIRST) as source:
        steps = {"with_input": _steps_on(run, held, source)}
        times |= time_chains(steps, calls=calls, rounds=_ROUNDS)
    has_parts = options.parts and processes.count == 1
    return {
        "processes": processes.count,
        "fp8_sites": sum(site.is_fp8 for site in run.sites),
        "plan_notes": run.plan_notes,
        "skipped": int(held[0].skipped),
        **{name: timing._asdict() for name, timing in times.items()},
        "queue_us": queue_us,
        **run.placement.numbers(),
        **run.placement.choices(),
        "build_s": ready - begun,
        "timing_s": time.perf_counter() - ready,
        "parts": _parts(run, held[0], batches) if has_parts else None,
    }


def _run_at(
    config: Config, point: Point, options: Options, processes: Processes
) -> Run:
    """Returns the run on so many GPUs, with the plan for its examples of a GPU."""
    replicas = config.mesh.replicas or 1
    if point.gpus % replicas:
        raise ValueError(f"--mesh.replicas {replicas} do not divide {point.gpus} GPUs.")
    size = point.gpus * point.batch
    data = config.data
    if data.kind == "generated":
        data = dataclasses.replace(data, examples=_EPOCH * size, eval_examples=1024)
    config = dataclasses.replace(
        config,
        data=data,
        loop=dataclasses.replace(config.loop, batch_size=size, max_steps=None),
        mesh=dataclasses.replace(
            config.mesh, replicas=replicas, shards=point.gpus // replicas
        ),
    )
    plan = None
    file = pathlib.Path(options.plans) / f"plan-{point.batch}.json"
    if options.plans and file.exists():
        plan = jsonfile.read(file)
    run = build_in_turn(processes, lambda plan: build(config, plan, print), plan)
    if options.plans and plan is None and processes.is_first:
        jsonfile.write(file, as_json(run.plan))
    return run


def _batch(run: Run, number: int) -> Batch:
    """Returns a training batch on the devices of the run."""
    train, size = run.splits.train, run.config.loop.batch_size
    part = run.placement.part
    batch = train.batch(Position(0, number, 0), size, shuffle=True, part=part)
    return jax.block_until_ready(placed(batch, run.placement.sharding, part))


def _warmed_up(run: Run, batches: list[Batch]) -> TrainState:
    """Returns the state after steps that set delayed scales and compiled all."""
    if isinstance(run.placement, MeshPlacement):
        for batch in batches:  # before steps are compiled for lists that are too short
            run.placement.router(batch)
    state = run.init()
    for batch in batches[:3]:
        state = run.train_step()(state, batch)
    step = run.train_step(scales_initialized=True)
    return jax.block_until_ready(step(state, batches[3]))


def _over_and_over(batches: list[Batch]) -> Iterator[tuple[Position, Batch]]:
    """Yields batches without end; each time as another object, as if it were new."""
    return ((_FIRST, batch._replace()) for batch in itertools.cycle(batches))


def _steps_on(
    run: Run, held: list[TrainState], batches: Iterable[tuple[Position, Batch]]
) -> Chain:
    """Returns what queues steps on the next batches, as many a call as in training.

    A round goes on where the last one ended: ids of the first batches of a run are
    routed by programs of their own.
    """
    source = iter(run.placement.look_ahead(batches))
    count = run.config.loop.steps_per_call
    take_steps = run.train_step(scales_initialized=True, steps=count)

    def queue(steps: int) -> jax.Array:
        for _ in range(steps // count):
            pairs = itertools.islice(source, count)
            held[0] = take_steps(held[0], *(batch for _, batch in pairs))
        return held[0].step

    return queue


def _queue_us(queue: Chain, steps: int) -> float:
    """Returns the microseconds of the host to queue a step on an idle device.

    Args:
        queue: queues steps.
        steps: so many, that none of them waits for what another computes.
    """
    seconds = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        last = queue(steps)
        seconds.append(time.perf_counter() - begun)
        jax.block_until_ready(last)
    return 1e6 * statistics.median(seconds) / steps


def _parts(run: Run, state: TrainState, batches: list[Batch]) -> dict[str, Any]:
    """Returns the microseconds of a step's kernels on a device, by part."""
    # The step takes no statistics of Probe where it does not observe.
    state = dataclasses.replace(state, probe={})
    step = run.train_step(scales_initialized=True)
    compiled = step.lower(state, batches[0]).compile(dict(NO_CAPTURE))
    text = compiled.as_text() or ""
    if not isinstance(run.placement, MeshPlacement):
        chain = chain_of(compiled, [state], batches, READ_STEP)
        return kernels_by_part(text, chain)
    router, devices = run.placement.router, run.placement.size

    def next_parts(parts: dict[str, Any], held: list) -> dict[str, Any]:
        placed, routed, spent = held
        after, _, (routing, _) = compiled(parts, placed, routed, placed, spent)
        held[1:] = routing, routed
        return after

    held = [
        [*router.together([batch]), router.together([batch])[1]] for batch in batches
    ]
    chain = chain_of(next_parts, [vars(state)], held, lambda parts: parts["step"])
    return kernels_by_part(text, chain, devices)


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv

    def command() -> int:
        config, options = parse_with(arguments, "bench/scaling_job.py", job=Options())
        return measure_all(config, options["job"])

    return run_cli(command)


if __name__ == "__main__":
    leave(main)
