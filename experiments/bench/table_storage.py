"""Embedding tables in bfloat16, rounded stochastically or not, against float32: NE.

    python experiments/bench/table_storage.py --out bf16_tables.json

A small DLRM in bfloat16 learns generated click logs. Runs of one seed share initial
weights (but for their rounding) and examples, so that they differ by the tables alone:

    f32                 tables in float32
    bf16                in bfloat16, updates rounded stochastically
    bf16 nearest        updates rounded to the nearest

The relative difference of NE from `f32` has the 95 % interval of the mean over pairs.
Written after every seed.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import tyro

from experiments.bench import result as results
from experiments.bench.paired_seeds import describe, paired
from loka_jax.data import DataConfig, Position
from loka_jax.models import Dlrm
from loka_jax.optim import OptimConfig
from loka_jax.train.build import Run, build
from loka_jax.train.config import DlrmConfig, EmbeddingConfig, LoopConfig
from loka_jax.train.evaluation import evaluate

ARMS: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"dtype": "bf16"},
    "bf16 nearest": {"dtype": "bf16", "rounding": "nearest"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        seeds: of each arm.
        batch_size: examples in a step.
        steps: of a run.
        eval_examples: of the evaluation.
        rows_lr: learning rate of the rows.
    """

    out: pathlib.Path | None = None
    seeds: int = 5
    batch_size: int = 2048
    steps: int = 512
    eval_examples: int = 131_072
    rows_lr: float = 0.4


def config_of(tables: dict[str, Any], arguments: Arguments) -> DlrmConfig:
    """Returns the configuration of an arm's runs, but for their seed."""
    return DlrmConfig(
        name="table_storage",
        model=Dlrm(bottom_mlp=(32,), top_mlp=(64, 32), recipe="bf16"),
        data=DataConfig(
            examples=arguments.batch_size * arguments.steps,
            eval_examples=arguments.eval_examples,
        ),
        embedding=EmbeddingConfig(dim=16, init_stddev=0.05, **tables),
        optim=OptimConfig(
            lr=2e-3, rows_lr=arguments.rows_lr, warmup_steps=32, decay="linear"
        ),
        loop=LoopConfig(batch_size=arguments.batch_size),
        plan="off",
    )


def train_once(run: Run, seed: int) -> dict[str, float]:
    """Returns NE and AUC of one run; all seeds share the compiled step."""
    config = dataclasses.replace(run.config, seed=seed)
    state, step = dataclasses.replace(run, config=config).init(), run.first_step
    for number in range(run.total_steps):
        place = Position(0, number, seed)
        batch = run.splits.train.batch(place, config.loop.batch_size, shuffle=True)
        state = step(state, batch)
    values = evaluate(run, state, run.splits.valid).values
    return {"ne": values["ne"], "auc": values["auc"], "skipped": int(state.skipped)}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns the numbers of all arms."""
    base = [run["ne"] for run in runs["f32"]]
    return {
        name: {
            "ne": describe([run["ne"] for run in records]),
            "auc": describe([run["auc"] for run in records]),
            "relative_difference": paired(
                [run["ne"] / ne for run, ne in zip(records, base, strict=True)],
                [1.0] * len(base),
            ),
            "runs": records,
        }
        for name, records in runs.items()
    }


def main(arguments: Arguments) -> None:
    """Trains, prints and writes."""
    built = {
        name: build(config_of(tables, arguments), None, lambda line: None)
        for name, tables in ARMS.items()
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    head = results.head("table_storage", arguments)
    head["device"] = jax.devices()[0].device_kind
    for seed in range(arguments.seeds):
        for name, run in built.items():
            runs[name].append(train_once(run, seed))
            print(f"{name:14} seed {seed}  NE {runs[name][-1]['ne']:.5f}", flush=True)
        results.write(arguments.out, head | {"arms": summary(runs)})
    for name, arm in summary(runs).items():
        delta = arm["relative_difference"]
        print(
            f"{name:14} NE {arm['ne']['mean']:.5f}  {100 * delta['mean']:+.4f} % "
            f"+- {100 * (delta['half_interval_95'] or 0):.4f}"
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
