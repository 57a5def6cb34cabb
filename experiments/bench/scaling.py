"""Times training steps on several GPUs of a host, against one GPU.

    python experiments/bench/scaling.py --config fp8_dlrm --loop.batch-size 65536 \
        --scaling.gpus 1 4 --scaling.out scaling.json
    python -m loka_jax.launch --processes 4 experiments/bench/scaling.py \
        --config fp8_dlrm --loop.batch-size 65536 \
        --scaling.gpus 4 --scaling.out scaling.json

Every GPU gets the batch of the configuration. One process drives all GPUs, or each has
its own; rows are added to the file, and follow the plan of its first one. For each the
run is built and warmed up as in training: lists are routed until all fit, scales are
initialized. Then two chains of steps are timed, one after the other, by wall clock:

    step         on batches that lie on the devices, each routed ahead
    with_input   on batches that the prefetch thread makes meanwhile, as in training

`of_linear` is the time of one GPU over that of the row.

Without a GPU, to try it: `--loop.batch-size 64 --scaling.steps 7`, with
JAX_NUM_CPU_DEVICES=2 or the launcher's `--cpu-devices 1`.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from experiments.bench import result as results
from experiments.bench.steps import NUM_BATCHES, Chain
from experiments.cli import parse_with, run_cli
from loka_jax import jsonfile
from loka_jax.data import Batch, Position
from loka_jax.data.prefetch import placed
from loka_jax.dispatch.plan import as_json
from loka_jax.measure.timing import time_chains
from loka_jax.train.build import Run, build
from loka_jax.train.config import Config
from loka_jax.train.folder.record import versions
from loka_jax.train.in_turn import build_in_turn
from loka_jax.train.mesh.placement import MeshPlacement
from loka_jax.train.processes.group import Processes, leave, start
from loka_jax.train.state import TrainState

_FIRST = Position(0, 0, 0)
_ROUNDS = 7  # that are timed, after one more
_EPOCH = 64  # batches


@dataclasses.dataclass(frozen=True)
class Options:
    """What is timed.

    Attributes:
        gpus: numbers of GPUs.
        steps: timed steps of a chain.
        out: the JSON file that gets the rows; printed only if empty.
    """

    gpus: tuple[int, ...] = (1,)
    steps: int = 1400
    out: str = ""


def measure_all(config: Config, options: Options) -> int:
    """Times steps on each number of GPUs, and returns the exit code."""
    processes = start()
    out = pathlib.Path(options.out) if options.out else None
    if out is not None and out.exists():
        result = jsonfile.as_dict(jsonfile.read(out))
    else:
        about = {"benchmark": "scaling", "config": config.identity(), "commands": []}
        result = about | {"versions": versions(), "plan": None, "rows": []}
    result["commands"].append(results.command())
    for gpus in options.gpus:
        run = _run_on(config, gpus, processes, result["plan"])
        result["plan"] = result["plan"] or as_json(run.plan)
        result["rows"].append({"gpus": gpus} | measure(run, options.steps, processes))
        alone = [row["step_us"] for row in result["rows"] if row["gpus"] == 1]
        for row in result["rows"]:
            row["of_linear"] = alone[0] / row["step_us"] if alone else None
        if processes.is_first:
            print(jsonfile.dumps(result["rows"][-1]), flush=True)
            results.write(out, result)
    return 0


def measure(run: Run, steps: int, processes: Processes) -> dict[str, Any]:
    """Returns the times of a run's steps."""
    batches = [_batch(run, number) for number in range(NUM_BATCHES)]
    held = [_warmed_up(run, batches)]
    each = run.config.loop.steps_per_call
    calls = -(-steps // (_ROUNDS * each)) * each
    chain = {"step": _steps_on(run, held, _over_and_over(batches))}
    times = time_chains(chain, calls=calls, rounds=_ROUNDS)
    with run.prefetched(_FIRST) as source:
        chain = {"with_input": _steps_on(run, held, source)}
        times |= time_chains(chain, calls=calls, rounds=_ROUNDS)
    return {
        "processes": processes.count,
        "step_us": times["step"].median_us,
        "with_input_us": times["with_input"].median_us,
        **{name: timing._asdict() for name, timing in times.items()},
        "fp8_sites": sum(site.is_fp8 for site in run.sites),
        "plan_notes": run.plan_notes,
        "skipped": int(held[0].skipped),
        **run.placement.numbers(),
        **run.placement.choices(),
    }


def _run_on(config: Config, gpus: int, processes: Processes, plan: Any) -> Run:
    """Returns the run on so many GPUs, with a plan if there is one already."""
    replicas = config.mesh.replicas or 1
    if gpus % replicas:
        raise ValueError(f"--mesh.replicas {replicas} do not divide {gpus} GPUs.")
    size = gpus * config.loop.batch_size
    data = config.data
    if data.kind == "generated":
        data = dataclasses.replace(data, examples=_EPOCH * size, eval_examples=1024)
    config = dataclasses.replace(
        config,
        data=data,
        loop=dataclasses.replace(config.loop, batch_size=size, max_steps=None),
        mesh=dataclasses.replace(
            config.mesh, replicas=replicas, shards=gpus // replicas
        ),
    )
    return build_in_turn(processes, lambda plan: build(config, plan, print), plan)


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
        state = run.train_step(scales_initialized=False)(state, batch)
    return jax.block_until_ready(
        run.train_step(scales_initialized=True)(state, batches[3])
    )


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


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""

    def command() -> int:
        config, options = parse_with(arguments, "bench/scaling.py", scaling=Options())
        return measure_all(config, options["scaling"])

    return run_cli(command)


if __name__ == "__main__":
    leave(lambda: main(sys.argv[1:]))
