"""When the operands of an FP8 site have left what they were, and when they are back.

Looks at a site measure what its casts do to its operands, and how large these are
(`operand_health.py`). Each measure is compared with its usual value, which follows it
at a limited pace: training moves operands, slowly.

    off    a measure is farther from its usual value than its tolerance
    home   all are within three quarters of it

A site that was off in `LOOKS` looks in a row has drifted. It is then looked at with the
casts that it had, and returns once it was home in enough looks in a row: twice as many
after each time.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from loka_jax.recipe import OPERANDS

SETTLING = 4  # first looks of a site, in which training itself moves the most
LOOKS = 3  # looks in a row that are off, and are drift; a single batch proves nothing
HOME = 0.75  # share of a tolerance within which a measure is home
HOME_LOOKS = 4  # looks in a row at home before the first return
_MAX_DOUBLINGS = 8


class Rule(NamedTuple):
    """What a measure may do.

    Attributes:
        rise, fall: distances from its usual value beyond which it is off.
        pace: largest step of its usual value at a look.
        text: a clause on a measure that is off.
    """

    rise: float
    fall: float
    pace: float
    text: str


# A tenth of all rows or columns lost is above what any limit on errors allows. Scales
# follow sizes; but operands of other sizes are not those whose errors were measured.
# Gradients shrink as a model learns, so that a fall counts from 1/64 on.
RULES = {
    "clipped": Rule(0.05, math.inf, 0.0, "{value:.0%} of a column of {name} clip"),
    "flushed": Rule(
        0.1, math.inf, 0.0, "rows or columns of {name} lose {value:.0%} to zeros"
    ),
    "level": Rule(2.0, 6.0, 0.01, "{name} is {times:.3g} times its usual size"),
    "peak": Rule(
        2.0,
        6.0,
        0.01,
        "the largest column of {name} is {times:.3g} times its usual size",
    ),
}
_RISE, _FALL, _PACE = (np.array([rule[i] for rule in RULES.values()]) for i in range(3))

type Measures = np.ndarray  # float32 [operands, measures], NaN where there is none


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteDrift:
    """What the looks at a site have shown.

    Attributes:
        looks: looks so far.
        usual: usual measures, `[operands][measures]`; None where there are none.
        off: looks in a row at which a measure was off.
        home: looks in a row at which all were home.
        why: what was off at the newest look at which anything was.
        away: whether the site was demoted for it.
        demotions: the number of times that it was.
    """

    looks: int = 0
    usual: list[list[float | None]] | None = None
    off: int = 0
    home: int = 0
    why: str = ""
    away: bool = False
    demotions: int = 0

    def after(self, measures: Measures) -> "SiteDrift":
        """Returns what is known after a look; the same if that is not finite."""
        known = np.isfinite(measures)
        if not np.any(known):
            return self
        if self.usual is None or self.looks < SETTLING:
            usual = measures
        else:
            usual = np.array(self.usual, np.float64)
            usual = np.where(np.isfinite(usual), usual, measures)
            step = np.clip(measures - usual, -_PACE, _PACE)
            usual = usual + np.where(known, step, 0.0)
        change = np.where(known, measures - usual, 0.0)
        excess = np.maximum(change / _RISE, -change / _FALL)
        is_off = np.max(excess) > 1
        why = _describe(excess, measures, change) if is_off else self.why
        return dataclasses.replace(
            self,
            looks=self.looks + 1,
            usual=[[None if np.isnan(x) else float(x) for x in row] for row in usual],
            off=self.off + 1 if is_off else 0,
            home=self.home + 1 if np.max(excess) <= HOME else 0,
            why=why,
        )

    @property
    def has_drifted(self) -> bool:
        """True if the site is to be demoted."""
        return not self.away and self.off >= LOOKS

    @property
    def is_back(self) -> bool:
        """True if a demoted site is to return."""
        doublings = min(self.demotions - 1, _MAX_DOUBLINGS)
        return self.away and self.home >= HOME_LOOKS * 2**doublings


def _describe(excess: Measures, measures: Measures, change: Measures) -> str:
    """Returns a clause on what is off most."""
    place = np.unravel_index(np.argmax(excess), excess.shape)
    return list(RULES.values())[place[1]].text.format(
        name=OPERANDS[place[0]],
        value=measures[place],
        times=2.0 ** float(change[place]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """The looks at all sites so far; `dataclasses.asdict` gives JSON values.

    Attributes:
        sites: by path.
    """

    sites: Mapping[str, SiteDrift] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Watch":
        """Returns the watch from JSON values."""
        sites = {path: SiteDrift(**site) for path, site in data["sites"].items()}
        return cls(sites=sites)

    def after(self, measures: Mapping[str, Measures]) -> "Watch":
        """Returns the watch after a look, with its measures by path."""
        seen = {
            path: self.sites.get(path, SiteDrift()).after(found)
            for path, found in measures.items()
        }
        return Watch(sites={**self.sites, **seen})

    @property
    def drifted(self) -> dict[str, str]:
        """Why sites have drifted that are not demoted yet, by path."""
        return {path: x.why for path, x in self.sites.items() if x.has_drifted}

    @property
    def back(self) -> list[str]:
        """Paths of the demoted sites whose operands are back."""
        return [path for path, x in self.sites.items() if x.is_back]

    @property
    def away(self) -> list[str]:
        """Paths of the demoted sites."""
        return [path for path, x in self.sites.items() if x.away]

    def without(self, paths: Iterable[str]) -> "Watch":
        """Returns the watch as if some sites had never been looked at."""
        kept = self.sites.keys() - set(paths)
        return Watch(sites={path: x for path, x in self.sites.items() if path in kept})

    def changed(self, demoted: Iterable[str], returned: Iterable[str]) -> "Watch":
        """Returns the watch after sites were demoted, and others have returned."""
        sites = dict(self.sites)
        for path in demoted:
            site = sites[path]
            sites[path] = dataclasses.replace(
                site, away=True, home=0, demotions=site.demotions + 1
            )
        for path in returned:
            sites[path] = dataclasses.replace(sites[path], away=False, off=0)
        return Watch(sites=sites)
