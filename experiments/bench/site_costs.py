"""Scores a trained run with the forward pass of each site in FP8: what it costs in NE.

    python experiments/bench/site_costs.py --workdir runs/RUN --out site_costs.json

Weights and test examples are those of the run throughout, so that a difference is that
of the roundings alone, free of the chance that two trainings differ by: 262,144
examples show a thousandth of a percent. One site is in FP8 at a time, then all sites of
each part of the model, then all; everything else is in bfloat16, by XLA. Scales are
those of each batch, as a run in bfloat16 has no others.

What FP8 does to training is not seen: `paired_seeds.py` trains.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import tyro

from experiments.bench import result as results
from loka_jax import nn
from loka_jax.data import Dataset, Position, Splits, open_data
from loka_jax.dispatch.plan import DispatchPlan, is_open
from loka_jax.predict.trained import Trained, read_trained
from loka_jax.site import Choice
from loka_jax.train import metrics
from loka_jax.train.folder.source_run import SourceRun, encoding_of, open_run
from loka_jax.train.step import compiled_eval_step

_ALL = "all sites"
Choices = tuple[tuple[str, Choice], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        workdir: the folder of a trained run with labels of one task.
        out: where to write the JSON, after every evaluation; printed only if None.
        recipe: whose forward pass the sites have in FP8, without delayed scales.
    """

    workdir: pathlib.Path
    out: pathlib.Path | None = None
    recipe: str = "fp8_tensorwise"


def main(arguments: Arguments) -> dict[str, Any]:
    """Evaluates, prints, writes and returns the result."""
    source = open_run(arguments.workdir, best=False)
    splits = _splits_of(source)
    held_out = splits.valid if splits.test is None else splits.test
    trained = read_trained(source, splits.train.schema)
    exact = ne_of(trained, held_out, ())
    result = results.head("site_costs", arguments) | {
        "config": source.config.name,
        "trained_in": str(source.config.model.recipe),
        "seed": source.config.seed,
        "step": trained.step,
        "bf16_ne": exact,
        "costs": {},
    }
    for name, choices in cases(trained, arguments.recipe):
        cost = ne_of(trained, held_out, choices) / exact - 1
        result["costs"][name] = cost
        print(f"{name:40} {100 * cost:+.4f} %", flush=True)
        results.write(arguments.out, result)
    return result


def _splits_of(source: SourceRun) -> Splits:
    config, base = source.config, encoding_of(source.saved, source.workdir)
    return open_data(config.data, seed=config.seed, base=base)


def cases(trained: Trained, recipe: str) -> Iterator[tuple[str, Choices]]:
    """Yields names and choices: of each site, of parts of several sites, and of all.

    Args:
        trained: the model.
        recipe: of the forward pass.
    """
    sites = trained.network.list_sites(DispatchPlan())
    paths = [site.path for site in sites if is_open(site)]
    choice = Choice.parse(f"xla {recipe}/bf16/bf16")
    cases = {path: [path] for path in paths}
    for part, group in itertools.groupby(paths, lambda path: path.split("/")[0]):
        if len(some := list(group)) > 1:
            cases[part] = some
    for name, some in {**cases, _ALL: paths}.items():
        yield name, tuple((path, choice) for path in some)


def ne_of(trained: Trained, dataset: Dataset, choices: Choices) -> float:
    """Returns the NE of a trained model, in bfloat16 but for these choices."""
    model = trained.config.model.clone(recipe="bf16", implementation="xla")
    step = compiled_eval_step(nn.Planned(model, choices), trained.network.tables)
    seen, size = metrics.init(), trained.config.loop.batch_size
    for i in range(dataset.num_batches(size)):
        batch = dataset.batch(Position(0, i, 0), size, shuffle=False)
        seen, _ = step(trained.state, seen, batch)
    ne = metrics.compute(seen)["ne"]
    assert ne is not None
    return ne


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
