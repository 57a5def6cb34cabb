"""Groups that update embedding rows alone against exact updates: NE, bytes and time.

    python experiments/bench/two_dimensions.py --folder runs2d --out two_dimensions.json

A small DLRM learns generated click logs on CPU devices, M groups of one device each, so
that everything but how rows are kept equal is the same. Arms:

    1D            one device; with half and with twice the learning rate of the rows,
                  which is what c = 1/4 and c = 4 are to it; and lagged
    gradients M   all groups get the row gradients of all: 1D but for rounding
    weights M     groups update alone and average: c = 1, sqrt(M), M, lagged or not,
                  and k = 4, 16 steps from one average to the next

Runs of one seed share initial weights and examples. Each run is kept in the folder as
soon as it is done, and not done again: the command may be interrupted and repeated.
With `--jobs` arms run side by side, and their times say little.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

DEVICES = 8
# Before jax is imported.
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES}")

import jax  # noqa: E402
import tyro  # noqa: E402

from experiments.bench import result as results  # noqa: E402
from experiments.bench.paired_seeds import describe, paired  # noqa: E402
from loka_jax.data import Batch, DataConfig, Position  # noqa: E402
from loka_jax.models import Dlrm  # noqa: E402
from loka_jax.ops.row_codec import row_bytes  # noqa: E402
from loka_jax.optim import OptimConfig  # noqa: E402
from loka_jax.train.build import Run, build  # noqa: E402
from loka_jax.train.config import (  # noqa: E402
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
)
from loka_jax.train.evaluation import evaluate  # noqa: E402
from loka_jax.train.mesh.devices import MeshConfig  # noqa: E402

FIRST = "1D"
_UNTIMED = 16  # steps before the clock starts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        folder: of the runs.
        out: where to write the JSON; printed only if None.
        seeds: of each arm.
        groups: numbers of groups.
        batch_size: examples in a step, of all groups together.
        steps: of a run.
        eval_examples: of the evaluation.
        rows_lr: learning rate of the rows in 1D.
        jobs: arms at a time, each a process.
        arms: those to run, by name; all if empty.
    """

    folder: pathlib.Path
    out: pathlib.Path | None = None
    seeds: int = 5
    groups: tuple[int, ...] = (2, 4, 8)
    batch_size: int = 2048
    steps: int = 512
    eval_examples: int = 131_072
    rows_lr: float = 0.4
    jobs: int = 1
    arms: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """How the rows of an arm are updated.

    Attributes:
        groups: M.
        sync: of the mesh.
        c: of row-wise AdaGrad.
        lagged: whether it divides by the sums before the step.
        every: steps from one average to the next.
        rate: factor on the learning rate of the rows.
    """

    groups: int = 1
    sync: Any = "gradients"
    c: float = 1.0
    lagged: bool = False
    every: int = 1
    rate: float = 1.0

    @property
    def name(self) -> str:
        """A name with all that is not as in 1D."""
        parts = [FIRST if self.groups == 1 else f"{self.sync} {self.groups}"]
        if self.sync == "weights":
            parts.append(f"c={self.c:.3g}")
        if self.every > 1:
            parts.append(f"k={self.every}")
        if self.rate != 1:
            parts.append(f"lr x{self.rate:g}")
        return " ".join(parts + ["lagged"] * self.lagged)


def arms_of(arguments: Arguments) -> dict[str, Arm]:
    """Returns all arms by name, 1D first."""
    arms = [Arm(), Arm(lagged=True), Arm(rate=0.5), Arm(rate=2.0)]
    for m in arguments.groups:
        arms.append(Arm(groups=m))
        weights = Arm(groups=m, sync="weights")
        for c, lagged in itertools.product((1.0, m**0.5, float(m)), (False, True)):
            arms.append(dataclasses.replace(weights, c=c, lagged=lagged))
        for every in (4, 16):
            arms.append(dataclasses.replace(weights, c=float(m), every=every))
    return {arm.name: arm for arm in arms}


def config_of(arm: Arm, arguments: Arguments) -> DlrmConfig:
    """Returns the configuration of an arm's runs, but for their seed."""
    return DlrmConfig(
        name="two_dimensions",
        model=Dlrm(bottom_mlp=(32,), top_mlp=(64, 32), recipe="bf16"),
        data=DataConfig(
            examples=arguments.batch_size * arguments.steps,
            eval_examples=arguments.eval_examples,
        ),
        embedding=EmbeddingConfig(dim=16, init_stddev=0.05),
        optim=OptimConfig(
            lr=2e-3,
            rows_lr=arguments.rows_lr * arm.rate,
            rows_c=arm.c,
            rows_lagged=arm.lagged,
            warmup_steps=32,
            decay="linear",
        ),
        loop=LoopConfig(batch_size=arguments.batch_size),
        plan="off",
        mesh=MeshConfig(
            replicas=arm.groups,
            shards=1,
            wire_rows="f32",
            wire_gradients="f32",
            sync=arm.sync,
            sync_every=arm.every,
        ),
    )


def train_once(run: Run, arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    """Returns the numbers of one run."""
    config = dataclasses.replace(run.config, seed=seed)
    state = dataclasses.replace(run, config=config).init()
    step = run.train_step(scales_initialized=False)
    start = 0.0
    for position, batch in run.ahead(_batches(run, seed, steps)):
        if position.step == _UNTIMED:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state = step(state, batch)
    state = jax.block_until_ready(run.synced(state))
    seconds = time.perf_counter() - start
    values = evaluate(run, state, run.splits.valid).values
    return {
        "arm": arm.name,
        "seed": seed,
        "ne": values["ne"],
        "auc": values["auc"],
        "skipped": int(state.skipped),
        "ms_per_step": 1e3 * seconds / (steps - _UNTIMED),
        "sync_bytes": sync_bytes(run, arm),
    }


def _batches(run: Run, seed: int, steps: int) -> Iterator[tuple[Position, Batch]]:
    size = run.config.loop.batch_size
    for step in range(steps):
        place = Position(0, step, seed)
        yield place, run.splits.train.batch(place, size, shuffle=True)


def sync_bytes(run: Run, arm: Arm) -> float:
    """Returns the bytes that a device receives in a step to keep groups equal.

    Of each entry in the lists of the other groups its number, and its gradient; or its
    change, and that of its sum of squares.
    """
    if run.spread is None:
        return 0.0
    dim = run.config.embedding.dim
    entry = 4 + row_bytes(run.config.mesh.wire_gradients, dim)
    if arm.sync == "weights":
        entry += 4
    rows = run.spread.router.capacity  # of the only shard
    if arm.every > 1:
        rows = run.spread.sync.capacity / arm.every
    return (arm.groups - 1) * rows * entry


def run_arm(arm: Arm, arguments: Arguments) -> None:
    """Trains the runs of an arm that are not in the folder yet."""
    paths = {seed: path_of(arm, seed, arguments) for seed in range(arguments.seeds)}
    missing = [seed for seed, path in paths.items() if not path.exists()]
    if not missing:
        return
    run = build(config_of(arm, arguments), None, lambda line: None)
    for seed in missing:
        done = train_once(run, arm, seed, arguments.steps)
        print(
            f"{arm.name:28} seed {seed}  NE {done['ne']:.5f}  "
            f"{done['ms_per_step']:.1f} ms a step",
            flush=True,
        )
        results.write(paths[seed], done)


def path_of(arm: Arm, seed: int, arguments: Arguments) -> pathlib.Path:
    """Returns the file of a run."""
    name = arm.name.replace(" ", "_").replace("=", "")
    return arguments.folder / f"{name}_seed{seed}.json"


def run_in_processes(arms: list[str], arguments: Arguments) -> None:
    """Runs arms side by side, each in a process of its own.

    Raises:
        subprocess.CalledProcessError: if one fails.
    """
    options = [
        f"--{field.name.replace('_', '-')}={getattr(arguments, field.name)}"
        for field in dataclasses.fields(arguments)
        if field.name not in ("out", "groups", "jobs", "arms")
    ]
    groups = ["--groups", *map(str, arguments.groups)]

    def run(name: str):
        command = [sys.executable, *sys.argv[:1], *options, *groups, "--arms", name]
        subprocess.run(command, check=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, arms))


def summary(arms: dict[str, Arm], arguments: Arguments) -> dict[str, Any]:
    """Returns the numbers of all arms whose runs are done."""
    records = {}
    for name, arm in arms.items():
        paths = [path_of(arm, seed, arguments) for seed in range(arguments.seeds)]
        if all(path.exists() for path in paths):
            records[name] = [json.loads(path.read_text()) for path in paths]
    base = [run["ne"] for run in records[FIRST]]
    return {
        name: dataclasses.asdict(arms[name])
        | {
            "ne": describe([run["ne"] for run in runs]),
            "relative_difference": paired(
                [run["ne"] / ne for run, ne in zip(runs, base, strict=True)],
                [1.0] * len(base),
            ),
            "auc": describe([run["auc"] for run in runs]),
            "skipped": sum(run["skipped"] for run in runs),
            "sync_bytes": max(run["sync_bytes"] for run in runs),
            "ms_per_step": statistics.median(run["ms_per_step"] for run in runs),
        }
        for name, runs in records.items()
    }


def main(arguments: Arguments) -> None:
    """Runs, prints and writes."""
    arms = arms_of(arguments)
    wanted = list(arguments.arms or arms)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.jobs > 1:
        run_in_processes(wanted, arguments)
    else:
        for name in wanted:
            run_arm(arms[name], arguments)
    if arguments.arms:  # a part, perhaps of one of several processes
        return
    result = results.head("two_dimensions", arguments)
    result |= {"device": jax.devices()[0].device_kind, "arms": summary(arms, arguments)}
    results.write(arguments.out, result)
    for name, arm in result["arms"].items():
        delta = arm["relative_difference"]
        print(
            f"{name:28} NE {arm['ne']['mean']:.5f}  {100 * delta['mean']:+.3f} % "
            f"+- {100 * (delta['half_interval_95'] or 0):.3f}  "
            f"{arm['sync_bytes'] / 1e6:7.3f} MB  {arm['ms_per_step']:6.1f} ms"
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
