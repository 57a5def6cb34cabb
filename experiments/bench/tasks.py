"""Trains one model of two labels, and two of one each, at paired seeds on MovieLens.

    python experiments/bench/tasks.py --ratings u.data.gz --out tasks.json

Labels are `like`, a rating of 4 or 5, and `love`, one of 5. A seed draws a random split
of the ratings (80, 10 and 10 % for training, validation and test), the initial weights
and the order of the examples; the arms share it. Each arm takes the features of DLRM on
user and item, an expert and a tower. The loss of two labels is their mean, so that the
L2 of the tables weighs as much as with one:

    alone           one model a label
    shared bottom   one expert for both labels
    mmoe            four experts, gates
"""

import dataclasses
import gzip
import io
import pathlib
import tempfile

import numpy as np
import tyro
from rich.console import Console

from experiments.bench import result as results
from loka_jax.data import DataConfig
from loka_jax.measure.intervals import interval
from loka_jax.models import Mmoe
from loka_jax.optim import OptimConfig
from loka_jax.train.config import LoopConfig, MmoeConfig, RunOptions
from loka_jax.train.folder.record import read_run
from loka_jax.train.session import train

LABELS = ("like", "love")
ARMS = {"alone": 1, "shared bottom": 1, "mmoe": 4}  # experts
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the comparison.

    Attributes:
        ratings: u.data.gz of MovieLens-100K: user, item, rating and time, by tabs.
        out: where to write the JSON; printed only if None.
        seeds: number of seeds.
        recipe: of all models.
        epochs: at most; training stops when the mean NE of the validation rows stalls.
    """

    ratings: pathlib.Path
    out: pathlib.Path | None = None
    seeds: int = 5
    recipe: str = "f32"
    epochs: int = 12


def write_splits(ratings: np.ndarray, seed: int, folder: pathlib.Path) -> None:
    """Writes train.csv, valid.csv and test.csv of a seed."""
    rows = np.random.default_rng(seed).permutation(len(ratings))
    tenth = len(rows) // 10
    parts = np.split(rows, [len(rows) - 2 * tenth, len(rows) - tenth])
    for name, part in zip(SPLITS, parts, strict=True):
        user, item, rating = ratings[part, :3].T
        columns = np.stack([rating >= 4, rating == 5, user, item], axis=1)
        head = f"{','.join(LABELS)},user,item"
        np.savetxt(folder / f"{name}.csv", columns, "%d", ",", header=head, comments="")


def config_of(
    arm: str, labels: tuple[str, ...], seed: int, folder: pathlib.Path, arguments
) -> MmoeConfig:
    """Returns the run of an arm on some of the labels."""
    return MmoeConfig(
        name="tasks",
        seed=seed,
        model=Mmoe(
            num_tasks=len(labels),
            num_experts=ARMS[arm],
            expert_mlp=(64, 32),
            tower_mlp=(16,),
            interaction="cat",
            dropout_rate=0.2,
            recipe=arguments.recipe,
        ),
        data=DataConfig(
            kind="table",
            path=str(folder),
            label=labels[0],
            labels=labels if len(labels) > 1 else (),
            categorical=("user", "item"),
            cache=str(folder / "cache"),
        ),
        optim=OptimConfig(
            lr=1e-3,
            rows="adam",
            rows_lr=1e-3,
            rows_l2=0.02,
            plateau_patience=2,
            task_weights=(0.5, 0.5) if len(labels) > 1 else (),
        ),
        loop=LoopConfig(batch_size=1024, epochs=arguments.epochs, log_every=1000),
        run=RunOptions(workdir=folder / "-".join((arm, *labels)).replace(" ", "-")),
    )


def test_ne(config: MmoeConfig) -> dict[str, float]:
    """Returns the NE of the test rows by label, at the best evaluation."""
    train(config, [], Console(file=io.StringIO()))
    assert config.run.workdir is not None
    final = read_run(config.run.workdir).summary["final_eval"]
    tasks = final.get("tasks", {config.data.label: final})
    return {name: tasks[name]["ne"] for name in tasks}


def of_seed(ratings: np.ndarray, seed: int, arguments: Arguments) -> dict:
    """Returns the test NE of each arm, by label."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_splits(ratings, seed, folder)
        ne = {}
        for arm in ARMS:
            groups = [(label,) for label in LABELS] if arm == "alone" else [LABELS]
            runs = [
                config_of(arm, labels, seed, folder, arguments) for labels in groups
            ]
            ne[arm] = {k: v for run in runs for k, v in test_ne(run).items()}
    return ne


def described(seeds: list[dict], arm: str, label: str) -> dict:
    """Returns the NE of all seeds, and how it differs from that of `alone`."""
    ne = np.array([record[arm][label] for record in seeds])
    change = interval(ne - np.array([record["alone"][label] for record in seeds]))
    print(f"{arm:14} {label}: {ne.mean():.5f}, {change.mean:+.5f} +- {change.half:.5f}")
    return {
        "ne": {"values": ne.tolist(), "mean": float(ne.mean())},
        "minus_alone": {"mean": change.mean, "half_interval_95": change.half},
    }


def main(arguments: Arguments) -> None:
    """Trains all arms, prints and writes NE and their paired differences."""
    with gzip.open(arguments.ratings) as file:
        ratings = np.loadtxt(file, np.int64)
    seeds = []
    for seed in range(arguments.seeds):
        seeds.append(of_seed(ratings, seed, arguments))
        print(seed, seeds[-1], flush=True)
    arms = {
        arm: {label: described(seeds, arm, label) for label in LABELS} for arm in ARMS
    }
    results.write(arguments.out, results.head("tasks", arguments) | {"arms": arms})


if __name__ == "__main__":
    main(tyro.cli(Arguments))
