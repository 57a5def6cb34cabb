"""Transforms by column: `--data.transform price=log1p,clip:0:100 at=hour,weekday`.

The steps log1p, standardize, none and clip:LOW:HIGH make a dense input of a column, one
after another; `missing` is another one, 1 where there is no value; buckets:N, hour and
weekday are categorical ones, its parts. An entry without a column is for all dense
columns that have none of their own.
"""

import calendar
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from loka_jax.terminal import clip

type Step = tuple[Any, ...]  # a name and its numbers
# What training rows say of an input: mean and std, or the cuts between its buckets.
type Constants = Mapping[str, tuple[float, ...]]

_NUMERIC = {"log1p": 0, "standardize": 0, "none": 0, "clip": 2}  # how many numbers
_TIMES = {"hour": 0, "weekday": 0}
_VALUES = {"hour": (*map(str, range(24)),), "weekday": (*calendar.day_name,)}
_PARTS = {"buckets": 1, **_TIMES}
_LEARNED = ("standardize", "buckets")


class Input(NamedTuple):
    """An input of the model: the column that it is read from, and the steps."""

    source: str
    steps: tuple[Step, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """What the ids of a part stand for, from id 1 on."""
        name, *cuts = self.steps[0]
        ends = ["-inf", *(f"{x:g}" for x in cuts), "inf"]
        return _VALUES.get(name) or tuple(map(" to ".join, itertools.pairwise(ends)))

    @property
    def rows(self) -> int:
        """The rows of the table of a part, whose id 0 is for missing values."""
        return 1 + len(self.values)


class Inputs(NamedTuple):
    """The inputs that are made of numbers and times, by name; a part has one step."""

    dense: Mapping[str, Input]
    parts: Mapping[str, Input]

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that are read as dense ones."""
        cut = (x.source for x in self.parts.values() if x.steps[0][0] not in _TIMES)
        return tuple(dict.fromkeys([*(x.source for x in self.dense.values()), *cut]))

    @property
    def learned(self) -> dict[str, Input]:
        """The inputs that depend on training rows, up to the step that does."""
        return {
            name: Input(source, steps[: place + 1])
            for name, (source, steps) in {**self.dense, **self.parts}.items()
            for place, step in enumerate(steps)
            if step[0] in _LEARNED
        }

    def bound(self, constants: Constants) -> "Inputs":
        """Returns the inputs with what was learned of the training rows."""

        def known(name: str, made: Input) -> Input:
            own = constants.get(name, ())
            steps = ((s[0], *own) if s[0] in _LEARNED else s for s in made.steps)
            return Input(made.source, tuple(steps))

        return Inputs(*({n: known(n, x) for n, x in kind.items()} for kind in self))


@functools.cache
def parse_transforms(entries: tuple[str, ...]) -> Mapping[str, tuple[Step, ...]]:
    """Returns the steps by column; those of "" are for columns without any.

    Raises:
        ValueError: for an entry of another form, or a column that is named twice.
    """
    found: dict[str, tuple[Step, ...]] = {}
    for entry in entries:
        column, _, texts = entry.rpartition("=")
        try:
            steps = tuple(map(_step, texts.split(",")))
        except ValueError:
            steps = ()
        names = {step[0] for step in steps}
        is_time = bool(names & {*_TIMES})
        if (
            not 0 < len(steps) == len(names)
            or column in found
            or is_time > bool(column)
        ):
            raise ValueError(
                f"--data.transform {clip(entry)} must name a column once and, each "
                "once, some of log1p, standardize, none, clip:LOW:HIGH, missing, "
                "buckets:N of 2 to 999 and, of a time, hour and weekday, as in "
                "price=log1p,clip:0:100."
            )
        found[column] = steps
    return {"": (("log1p",),)} | found


def _step(text: str) -> Step:
    name, *texts = text.split(":")
    numbers = tuple(map(float, texts))
    is_right = len(numbers) == (_NUMERIC | _PARTS | {"missing": 0}).get(name)
    if name == "clip":
        is_right = is_right and -math.inf < numbers[0] < numbers[1] < math.inf
    if not is_right or (name == "buckets" and numbers[0] not in range(2, 1000)):
        raise ValueError
    return (name, *numbers)


@functools.cache
def inputs_of(entries: tuple[str, ...], dense: tuple[str, ...]) -> Inputs:
    """Returns the inputs that are made of dense columns, and of others named."""
    steps = parse_transforms(entries)
    made: dict[str, Input] = {}
    for column in dict.fromkeys((*dense, *filter(None, steps))):
        own = steps.get(column, steps[""])
        numeric = tuple(step for step in own if step[0] in _NUMERIC)
        made |= {column: Input(column, numeric)} if numeric else {}
        rest = (step for step in own if step[0] not in _NUMERIC)
        made |= {f"{column}:{step[0]}": Input(column, (step,)) for step in rest}
    parts = {n: x for n, x in made.items() if x.steps[0][0] in _PARTS}
    numbers = {n: x for n, x in made.items() if n not in parts}
    return Inputs(numbers, parts)


def is_number(steps: tuple[Step, ...]) -> bool:
    """Returns whether steps are of a number, and not of a time alone."""
    return any(step[0] not in _TIMES for step in steps)


def usual_of(entries: tuple[str, ...]) -> str:
    """Returns the entry for dense columns that have none of their own."""
    return next((entry for entry in entries if "=" not in entry), "log1p")
