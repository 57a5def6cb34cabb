"""Warns of outliers, with the operands, the steps and the columns that show them.

    ratio = amax / what its scale covered                     (`scaling.amax_ratios`)

Far above 1 an outlier was clipped; far below, most values became zero. Where outliers
are in every batch, scales cover them, and the values beside them become zero: that is
judged by the dense features.

The histories hold the amaxes of 16 steps, so a look every `LOOK_STEPS` misses none. No
step waits for it: looks are read where a log line or a checkpoint waits anyway.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loka_jax.data import Dataset, Position
from loka_jax.fp8 import E4M3
from loka_jax.recipe import OPERANDS, Recipe
from loka_jax.scaling import DelayedScaling, amax_ratios, smallest_ratio
from loka_jax.train.loop_options import LOOK_STEPS

CLIPPED = 16.0  # ratio above which an amax is an outlier
FLUSHED = 16.0  # amax, in smallest numbers of its scale, below which most values are 0
SWAMPED = 0.5  # share of the dense values that are too small beside the largest one
_E4M3_RANGE = float(jnp.finfo(E4M3).max) / float(jnp.finfo(E4M3).smallest_subnormal)

MAX_READS = 100  # batches of outliers that are read again to find the columns


class Value(NamedTuple):
    """A dense value and its column."""

    column: str
    value: float

    def __str__(self) -> str:  # noqa: D105
        return f"{self.value:.6g} in column {self.column!r}"


class Look(NamedTuple):
    """A look at the newest steps, which the device may still be computing.

    Attributes:
        swamped: share of the nonzero dense values of the newest batch that become zero
            in E4M3 under a scale for the largest of them.
        largest: the place of that value in the batch, and the value.
        skipped: the number of steps skipped so far, which left no amaxes.
    """

    step: int
    position: Position
    recipes: Mapping[str, Recipe]
    ratios: Float[Array, "sites 3 n"]
    swamped: Float[Array, ""]
    largest: tuple[Int[Array, ""], Float[Array, ""]]
    skipped: Int[Array, ""]


class Finding(NamedTuple):
    """The operands that were off their scales in one step, the worst first."""

    fault: str  # "clipped" or "flushed"
    age: int  # steps taken since
    ratios: dict[str, float]  # by "site/operand"

    def text(self, names: list[str]) -> str:
        """Returns a clause on some of the operands, the worst first."""
        worst, *others = names
        ratio = self.ratios[worst]
        event = f"was clipped at 1/{ratio:,.0f} of its amax"
        if self.fault == "flushed":
            covered = f"1/{1 / ratio:,.0f} of what its scale covers"
            event = f"reached {covered}: most values are 0"
        return f"{worst} {event}" + f" (likewise {', '.join(others)})" * bool(others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleWatch:
    """What was found so far.

    Attributes:
        warnings: a sentence for each step that showed a new operand or column.
        known: the operands and columns of these warnings.
        skipped: the number of steps skipped before the newest look.
    """

    warnings: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    skipped: int = 0
    reads: int = 0

    def after(self, look: Look, data: Dataset, batch_size: int) -> "ScaleWatch":
        """Returns the watch after a look, once the device has computed that.

        The batch of an outlier is read from the training data again.
        """
        look = jax.device_get(look)
        watch = dataclasses.replace(self, skipped=int(look.skipped))
        findings = find(look.recipes, np.asarray(look.ratios))
        for finding in findings:
            value = None
            # After a skipped step it is not known whose batch an amax is of.
            if finding.fault == "clipped" and watch.skipped == self.skipped:
                if watch.reads == MAX_READS:
                    continue
                watch = dataclasses.replace(watch, reads=watch.reads + 1)
                value = largest_value(data, look.position, batch_size, finding.age)
            where = "" if value is None else f" {value.column}"
            keys = {f"{finding.fault} {name}{where}": name for name in finding.ratios}
            new = {key: name for key, name in keys.items() if key not in watch.known}
            if new:
                text = finding.text(list(new.values()))
                if value is not None:
                    text += f"; the largest dense value was {value}"
                watch = watch._warned(look.step - finding.age, text, new)
        share, (place, largest) = float(look.swamped), look.largest
        # A scale that has clipped an outlier serves the other values.
        is_clipped = any(finding.fault == "clipped" for finding in findings)
        if is_clipped or not share > SWAMPED:
            return watch
        columns = data.schema.dense
        value = Value(columns[int(place) % len(columns)], float(largest))
        key = f"swamped {value.column}"
        text = (
            f"{share:.0%} of the dense values are too small for FP8 beside {value}: "
            "use --data.transform log1p or --recipe fp8_rowwise, or clip the column in "
            "the files"
        )
        return watch if key in watch.known else watch._warned(look.step, text, [key])

    def _warned(self, step: int, text: str, new: Iterable[str]) -> "ScaleWatch":
        warnings = (*self.warnings, f"step {step:,}: {text}.")
        known = (*self.known, *new)
        return dataclasses.replace(self, warnings=warnings, known=known)


def take_look(
    sites: Mapping[str, DelayedScaling],
    recipes: Mapping[str, Recipe],
    dense: Float[Array, "B n"],
    *,
    step: int,
    position: Position,
    skipped: Int[Array, ""],
) -> Look:
    """Returns a look at the newest steps, without waiting for the device.

    `recipes` may have more sites than `sites`, those with delayed scales. A site that
    `vmap` made several of is one for each of them, `path[0]` and so on.
    """
    own, states = {}, []
    for path in sites:
        for name, state in _each(path, sites[path]):
            own[name] = recipes[path]
            states.append(state)
    measured = _measure(states, dense, skipped, recipes=tuple(own.values()))
    return Look(step, position, own, *measured)


def _each(path: str, state: DelayedScaling) -> Iterator[tuple[str, DelayedScaling]]:
    """Yields the states of a site, of which `vmap` makes several, and their names."""
    table = state.table
    if table.ndim == 2:
        yield path, state
        return
    for number, own in enumerate(table.reshape(-1, *table.shape[-2:])):
        yield f"{path}[{number}]", DelayedScaling(own)


def find(
    recipes: Mapping[str, Recipe], ratios: Float[np.ndarray, "sites 3 n"]
) -> list[Finding]:
    """Returns the worst step of each fault, with the operands that show it there."""
    smallest = _smallest_ratios(tuple(recipes.values()))
    ratios = np.where(smallest > 0, ratios, 0.0)
    nonzero, findings = np.where(ratios > 0, ratios, np.inf), []
    clipped, flushed = ratios / CLIPPED, FLUSHED * smallest / nonzero
    for fault, excess in (("clipped", clipped), ("flushed", flushed)):
        age = int(np.argmax(np.max(excess, axis=(0, 1))))
        worst = sorted(
            np.argwhere(excess[:, :, age] > 1), key=lambda x: -excess[*x, age]
        )
        off = {
            f"{list(recipes)[site]}/{OPERANDS[row]}": float(ratios[site, row, age])
            for site, row in worst
        }
        if off:
            findings.append(Finding(fault, age, off))
    return findings


@functools.cache
def _smallest_ratios(recipes: tuple[Recipe, ...]) -> np.ndarray:
    """Returns `smallest_ratio` of sites and operands, `[sites, 3, 1]`, or 0."""
    return np.array(
        [[[smallest_ratio(x, recipe) or 0.0] for x in OPERANDS] for recipe in recipes]
    )


def largest_value(
    data: Dataset, position: Position, batch_size: int, age: int
) -> Value | None:
    """Returns the dense value with the largest magnitude in a training batch.

    None without dense columns, or before the first batch.

    `position` is of the batch after the newest one, `age` the number of batches before
    that one.
    """
    per_epoch = data.num_batches(batch_size)
    number = position.epoch * per_epoch + position.step - 1 - age
    if number < 0 or not data.schema.dense:
        return None
    place = Position(number // per_epoch, number % per_epoch, position.seed)
    dense = np.asarray(data.batch(place, batch_size, shuffle=True).dense)
    row, column = np.unravel_index(np.nanargmax(np.abs(dense)), dense.shape)
    return Value(data.schema.dense[column], float(dense[row, column]))


@functools.partial(jax.jit, static_argnames="recipes")
def _measure(
    sites: list[DelayedScaling],
    dense: Array,
    skipped: Array,
    recipes: tuple[Recipe, ...],
) -> tuple[Array, Array, tuple[Array, Array], Array]:
    """Returns what a look sees, in one program."""
    ratios = [jnp.empty(0)] * len(sites)
    for recipe in dict.fromkeys(recipes):
        places = [i for i, of_site in enumerate(recipes) if of_site == recipe]
        # Stacked before they are decoded, or each site would add to the program.
        tables = jnp.stack([sites[i].table for i in places])
        histories = DelayedScaling(tables).history
        of = functools.partial(amax_ratios, recipe=recipe, steps=LOOK_STEPS)
        for place, ratio in zip(places, jax.vmap(of)(histories), strict=True):
            ratios[place] = ratio
    sizes = jnp.abs(dense).ravel()
    if not sizes.size:
        sizes = jnp.zeros(1)
    place = jnp.argmax(sizes)
    too_small = sizes[place] / _E4M3_RANGE / 2  # half of the smallest rounds to it
    swamped = jnp.sum((sizes > 0) & (sizes < too_small)) / jnp.sum(sizes > 0)
    # A sum: an argument returned as it came would be donated with the state.
    return jnp.stack(ratios), swamped, (place, sizes[place]), skipped + 0
