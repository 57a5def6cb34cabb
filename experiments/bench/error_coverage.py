"""Whether the intervals of live errors cover the real errors of later steps.

    python experiments/bench/error_coverage.py --out coverage.json

Trains each model while Probe observes it, takes the intervals of the errors that were
seen, and trains on. At later steps, which Probe has not seen, every product is
multiplied whole on its own operands. For each site, role, recipe and measure: does the
mean error of the later steps lie in the interval, and below its upper end? Stated is
95 % of all means inside, 97.5 % below the upper end. Means drift together, so that a
model's share varies more than that of independent ones would.

The models are the generated configurations, two that no table knows, and those on
Frappe and Criteo if their data are given. On a CPU: `--tiny`.
"""

import dataclasses
import pathlib
from collections.abc import Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float

from experiments.bench import apart
from experiments.bench import result as results
from experiments.configs import get_config
from loka_jax import nn, scaling
from loka_jax.data import Position
from loka_jax.dispatch.live import live_intervals
from loka_jax.measure.errors import errors
from loka_jax.measure.site_errors import operand_amaxes, scaling_state
from loka_jax.ops import roles
from loka_jax.probe import live_errors
from loka_jax.probe.live_errors import MEASURES
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, ROLES, Recipe, Role, get_recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.survey.sensitivity import can_be_fp8
from loka_jax.train.build import Run, build
from loka_jax.train.config import Config, ProbeOptions
from loka_jax.train.step import make_observe_step

NEW = ("norm_dlrm", "deep_dcnv2")  # see `_new`
MODELS = ("fp8_dlrm", "fp8_dcnv2", *NEW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        models: to train.
        frappe, criteo: data of the configurations on them, which are trained too.
        tiny: the `_tiny` variants, and small ones of the new models.
        steps: of training before the intervals are taken.
        every: Probe observes every so many of these steps.
        later: further steps, of which every fifth is measured.
        batch_size: of all models; None for their own.
        jobs: models at a time, each in a process of its own.
    """

    out: pathlib.Path | None = None
    models: tuple[str, ...] = MODELS
    frappe: pathlib.Path | None = None
    criteo: pathlib.Path | None = None
    tiny: bool = False
    steps: int = 300
    every: int = 10
    later: int = 50
    batch_size: int | None = None
    jobs: int = 1


@dataclasses.dataclass(frozen=True)
class Whole:
    """An observer that multiplies whole products in every recipe of `live_errors`."""

    def init(self, m: int, k: int, n: int) -> Float[Array, "..."]:
        """Returns errors of zero."""
        del m, k, n
        return jnp.zeros((len(live_errors.RECIPES), len(ROLES), len(MEASURES)))

    def observe(self, stats, lhs, rhs, g, scales, axis_names=()) -> Array:
        """Returns the errors by recipe, role and measure."""
        del stats, axis_names
        operands = {"lhs": lhs, "rhs": rhs, "g": g}
        rows = [
            [self._errors(role, get_recipe(name), operands, scales) for role in ROLES]
            for name in live_errors.RECIPES
        ]
        return jnp.stack([jnp.stack(row) for row in rows])

    def _errors(self, role: Role, recipe: Recipe, operands, scales) -> Array:
        first, second = (operands[name] for name in ROLE_OPERANDS[role])
        recipe = dataclasses.replace(recipe, scales_initialized=True)
        state = _state(recipe, operands, scales) if recipe.is_delayed else None
        ref = roles.exact_product(role, first, second)
        out = roles.product(role, first, second, recipe, state)
        measures = errors(ref, jax.lax.optimization_barrier(out))
        return jnp.stack([getattr(measures, name) for name in MEASURES])


def _state(recipe: Recipe, operands, scales) -> DelayedScaling:
    """Returns the state of a site, or the one that equal earlier amaxes leave."""
    amaxes = operand_amaxes(tuple(operands[name] for name in OPERANDS))
    state = scaling_state(recipe, amaxes)
    assert state is not None
    stored = jnp.stack([jnp.zeros(()) if x is None else x for x in scales])
    factors = jnp.where(stored > 0, stored, state.scale_inv)
    return scaling.stored(factors, recipe)


def measure(config: Config, arguments: Arguments) -> dict[str, Any]:
    """Returns the coverage of a model, and each mean with its interval."""
    probe = ProbeOptions(every=arguments.every)
    loop = dataclasses.replace(config.loop, epochs=1000, max_steps=None)
    run = build(dataclasses.replace(config, probe=probe, loop=loop, plan="off"))
    batches, state = _batches(run), run.init()
    for step in range(arguments.steps):
        initialized = step > 0
        advance = run.train_step(
            scales_initialized=initialized, probe=probe.config_at(step)
        )
        state = advance(state, next(batches))
    paths = [site.path for site in run.sites if can_be_fp8(site)]
    stats = nn.by_path(state.probe)
    seen = {path: live_intervals(stats[path].errors, probe.recipes) for path in paths}
    model = run.planned.with_initialized_scales()
    parts = model, run.tables, Whole(), config.optim.task_weights
    observe = jax.jit(make_observe_step(*parts))
    advance = run.train_step(scales_initialized=True)
    real = []
    for step in range(arguments.later):
        batch = next(batches)
        if step % 5 == 4:
            real.append(jax.device_get(nn.by_path(observe(state, batch))))
        state = advance(state, batch)
    means = {path: np.mean([one[path] for one in real], axis=0) for path in paths}
    rows = list(_rows(seen, means))
    return {
        "batch_size": config.loop.batch_size,
        "inside": _share(row["low"] <= row["real"] <= row["high"] for row in rows),
        "below": _share(row["real"] <= row["high"] for row in rows),
        "count": len(rows),
        "rows": rows,
    }


def _batches(run: Run) -> Iterator[Any]:
    size, epoch = run.config.loop.batch_size, 0
    while True:
        for step in range(run.splits.train.num_batches(size)):
            yield run.splits.train.batch(Position(epoch, step, 0), size, shuffle=True)
        epoch += 1


def _rows(seen, means) -> Iterator[dict[str, Any]]:
    for path, by_role in seen.items():
        for j, role in enumerate(ROLES):
            for name, by_measure in by_role[role].items():
                i = live_errors.RECIPES.index(name)
                for measure_name, interval in by_measure.items():
                    place = i, j, MEASURES.index(measure_name)
                    where = dict(path=path, role=role, recipe=name)
                    real = float(means[path][place])
                    yield (
                        where
                        | {"measure": measure_name, "real": real}
                        | (interval._asdict())
                    )


def _share(values) -> float:
    return float(np.mean(list(values)))


def _configs(arguments: Arguments) -> Iterator[Config]:
    for config in _named(arguments):
        size = arguments.batch_size or config.loop.batch_size
        loop = dataclasses.replace(config.loop, batch_size=size)
        yield dataclasses.replace(config, loop=loop)


def _named(arguments: Arguments) -> Iterator[Config]:
    suffix = "_tiny" if arguments.tiny else ""
    for name in arguments.models:
        yield _new(name, suffix) if name in NEW else get_config(name + suffix)
    for name, path in (("frappe", arguments.frappe), ("criteo", arguments.criteo)):
        for model in ("dlrm", "dcnv2") if path is not None else ():
            config = get_config(f"{name}_{model}{suffix}")
            data = dataclasses.replace(config.data, path=path)
            yield dataclasses.replace(config, data=data)


def _new(name: str, suffix: str) -> Config:
    """Returns a model that no table knows, its batch size no power of two."""
    widths = (48, 32) if suffix else (640, 384, 192)
    changes: dict[str, Any]
    if name == "norm_dlrm":
        like, changes = "fp8_dlrm", dict(top_mlp=widths, norm="layer")
    else:
        like, changes = "fp8_dcnv2", dict(deep_mlp=widths, activation="swish")
    config = get_config(like + suffix)
    model = config.model.clone(**changes)
    loop = dataclasses.replace(config.loop, batch_size=112 if suffix else 3600)
    return dataclasses.replace(config, name=name, model=model, loop=loop)


def main(arguments: Arguments):
    """Measures the coverage of every model, prints and writes it."""
    models: dict[str, dict[str, Any]] = {}
    calls = [(config, arguments) for config in _configs(arguments)]
    for (config, _), coverage in apart.measured(measure, calls, arguments.jobs):
        models[config.name] = coverage
        shares = _shares(models.values())
        for name, one in ((config.name, coverage), ("all", shares)):
            print(
                f"{name}: {one['inside']:.1%} inside, {one['below']:.1%} below the "
                f"upper end, of {one['count']}",
                flush=True,
            )
        head = results.head("error_coverage", arguments)
        results.write(arguments.out, head | shares | {"models": models})


def _shares(models: Collection[dict[str, Any]]) -> dict[str, Any]:
    """Returns the shares over all models."""
    count = sum(coverage["count"] for coverage in models)
    return {"count": count} | {
        key: sum(coverage[key] * coverage["count"] for coverage in models) / count
        for key in ("inside", "below")
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments))
