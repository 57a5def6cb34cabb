"""Alarms: monitors of sites that leave their bounds, before the loss does.

A monitor raises an alarm when it was beyond its threshold in the two newest observed
steps, once for each site. Some thresholds are absolute; others are relative to the
median over the observed steps, as what is usual differs by site. The numbers of a site
are those of `probe.monitors`, and

    gradient_to_noise    rms of a site's weight gradient over the rms error of the FP8
                         product that it is, as live errors tell
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loka_jax.dispatch.review import LEAST_STEPS
from loka_jax.nn import by_path
from loka_jax.probe import monitors
from loka_jax.probe.monitors import FIELDS
from loka_jax.probe.site import errors_of
from loka_jax.quality import MEASURES
from loka_jax.recipe import ROLES, Recipe, get_recipe
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState

_FOR_MEDIAN = 16  # observed steps, or some more, spread evenly


class Thresholds(NamedTuple):
    """Values beyond which monitors raise alarms.

    They are chosen from what is published, or by what healthy training does, and not
    yet calibrated on recorded runs.

    Attributes:
        least: observed steps before the first alarm. At its start a model leaves its
            initial values, and all numbers move by large factors.
        recent: newest observed steps whose slope is a growth that goes on. Fewer say
            little beside the noise of batches.
        growth: slope of the logarithm of a site's output a step, above which it grows:
            twice as large after 23 steps. A size that grows as a power p of the time,
            as in healthy training, has a slope of p / step: below this after 33 p.
        rise: times its median that an output, or a kurtosis, is too large: more than a
            square of the time grows from the middle of a window to its end, 4.
        logit: largest logit. QK-Clip (Kimi K2, arXiv 2507.20534) cuts logits at 100;
            ours are bounds by norms, about sqrt(d) times as large for rows that have
            nothing in common, which is 8 to 11 for heads of 64 to 128.
        noise: gradient over quantization noise, below which training stalls: sqrt(3)
            (FP4 All the Way, arXiv 2505.19115).
        zeros: rise of the share of lost elements over its median: a quarter of all. The
            share itself is large in healthy training, as most gradients are small.
        saturated: share of elements beyond their scale. A current scale clips none, a
            delayed one few, while it does not lag behind growth.
    """

    least: int = 50
    recent: int = 20
    growth: float = 0.03
    rise: float = 8.0
    logit: float = 1000.0
    noise: float = 3**0.5
    zeros: float = 0.25
    saturated: float = 0.01


THRESHOLDS = Thresholds()


class Seen(NamedTuple):
    """What the observed steps say of a site, by the fields of `probe.monitors`.

    Attributes:
        steps: their number, of the newest ones.
        newest: of the last one.
        lower: the lower values of the last two.
        usual: the medians.
        growth: slope of log `out_rms`, one a step; NaN if it is not known.
        recent_growth: over the last `Thresholds.recent` steps.
        gradient_to_noise: None if the site has no noise.
    """

    steps: int
    newest: list[float]
    lower: list[float]
    usual: list[float]
    growth: float
    recent_growth: float
    gradient_to_noise: float | None = None

    def line(self) -> dict[str, float]:
        """Returns the numbers of the newest step by name."""
        told = monitors.named(self.newest, self.growth)
        if self.gradient_to_noise is not None:
            told["gradient_to_noise"] = self.gradient_to_noise
        return told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alarms:
    """The alarms of a run so far.

    Attributes:
        warnings: a sentence for each.
        known: the site and the monitor of each.
        lowered: how often learning rates were lowered by alarms.
    """

    warnings: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    lowered: int = 0

    def after(self, step: int, seen: Mapping[str, Seen]) -> "Alarms":
        """Returns the alarms after a look at all sites, by path."""
        found = {
            f"{path} {name}": f"step {step:,}: {path}: {text}."
            for path, site in seen.items()
            for name, text in beyond(site).items()
        }
        new = {key: text for key, text in found.items() if key not in self.known}
        return dataclasses.replace(
            self,
            warnings=(*self.warnings, *new.values()),
            known=(*self.known, *new),
        )

    def sites_since(self, before: "Alarms") -> list[str]:
        """Returns the paths of the sites of later alarms, each once."""
        keys = self.known[len(before.known) :]
        return list(dict.fromkeys(key.rpartition(" ")[0] for key in keys))


def seen_by(run: Run, state: TrainState) -> dict[str, Seen]:
    """Returns what Probe's monitors say of each site that was observed, by path.

    A site that `vmap` made several of is one for each of them, `path[0]` and so on.
    """
    errors = {path: errors_of(x) for path, x in by_path(state.probe).items()}
    if not errors:
        return {}
    recipes = {site.path: site.plan.choice.recipe for site in run.sites}
    own = [(x.monitors, x.sums) for x in errors.values()]
    histories, noises = jax.device_get(_read(own))
    names = [own for path, x in errors.items() for own in _each(path, x.steps.shape)]
    found = {}
    for i, seen in seen_in(histories).items():
        recipe = recipes.get(names[i].partition("[")[0])
        ratio = gradient_to_noise(noises[i], run.config.probe.recipes, recipe)
        found[names[i]] = seen._replace(gradient_to_noise=ratio)
    return found


def seen_in(histories: np.ndarray, recent: int = THRESHOLDS.recent) -> dict[int, Seen]:
    """Returns what monitors say of sites that were observed, by index.

    Args:
        histories: [sites, steps, fields], as `probe.monitors` has each.
    """
    counts = np.sum(histories[:, :, 0] > 0, axis=1)
    found = {}
    for count in {*counts.tolist()} - {0}:  # most sites are observed in the same steps
        (places,) = np.nonzero(counts == count)
        rows = histories[places, -count:]
        some = np.sort(rows[:, :: max(count // _FOR_MEDIAN, 1)], axis=1)
        sizes = rows[:, :, FIELDS.index("out_rms")]
        columns = (
            rows[:, -1],
            np.min(rows[:, -2:], axis=1),
            some[:, (some.shape[1] - 1) // 2],
            monitors.growth_of(sizes),
            monitors.growth_of(sizes[:, -recent:]),
        )
        each = zip(places.tolist(), *(x.tolist() for x in columns), strict=True)
        found |= {place: Seen(count, *numbers) for place, *numbers in each}
    return dict(sorted(found.items()))


def gradient_to_noise(
    noise: np.ndarray, names: Sequence[str], recipe: Recipe | None
) -> float | None:
    """Returns the ratio of a site that runs in a recipe; None if it is not known.

    Args:
        noise: [recipes, 4], the sums of drhs's relative L2 in the recipes named.
    """
    gemm = None if recipe is None else recipe.drhs
    for name, (weight, squares, total, _) in zip(names, noise.tolist(), strict=True):
        is_enough = weight**2 >= LEAST_STEPS * squares > 0  # their effective number
        if gemm is not None and get_recipe(name).drhs == gemm and is_enough:
            return weight / total if total > 0 else None
    return None


def beyond(site: Seen, limits: Thresholds = THRESHOLDS) -> dict[str, str]:
    """Returns the monitors of a site that are beyond their thresholds, with clauses.

    What is not finite is left to what watches the loss.
    """
    if site.steps < limits.least:
        return {}
    numbers = dict(zip(FIELDS, map(_Numbers, site.lower, site.usual), strict=True))
    found = {}
    slope, size = site.recent_growth, numbers["out_rms"]
    if slope > limits.growth and size.now > limits.rise * size.usual > 0:
        times = size.now / size.usual
        found["growth"] = f"its output is {times:.3g} times its usual size, and grows"
    found |= _beyond_of("lhs", "input", numbers, limits)
    found |= _beyond_of("g", "gradient", numbers, limits)
    if (logit := numbers["largest_logit"].now) > limits.logit:
        found["largest_logit"] = f"its logits reach up to {logit:.3g}"
    ratio = site.gradient_to_noise
    if ratio is not None and ratio < limits.noise:
        text = f"its gradient is {ratio:.3g} times its quantization noise"
        found["gradient_to_noise"] = text
    return found


class _Numbers(NamedTuple):
    """The lower value of the two newest steps, and the median of all."""

    now: float
    usual: float


def _beyond_of(
    operand: str, word: str, numbers: Mapping[str, _Numbers], limits: Thresholds
) -> dict[str, str]:
    """Returns those of an operand."""
    found = {}
    now, usual = numbers[f"{operand}_kurtosis"]
    if now > limits.rise * usual > 0:
        text = f"the kurtosis of its {word} is {now:.3g}, and usually {usual:.3g}"
        found[f"{operand}_kurtosis"] = text
    now, usual = numbers[f"{operand}_zeros"]
    if now > usual + limits.zeros:
        text = f"FP8 makes {now:.0%} of its {word} zero, and usually {usual:.0%}"
        found[f"{operand}_zeros"] = text
    now, _ = numbers[f"{operand}_saturated"]
    if now > limits.saturated:
        text = f"{now:.0%} of its {word} are beyond what their scale covers"
        found[f"{operand}_saturated"] = text
    return found


def _each(path: str, shape: tuple[int, ...]) -> list[str]:
    """Returns the names of a site, of which `vmap` makes several."""
    return [f"{path}[{i}]" for i in range(math.prod(shape))] if shape else [path]


@jax.jit
def _read(own: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Returns the monitors of all sites, and the sums of drhs's relative L2.

    In one array each: the host would wait for every single one.
    """
    place = ROLES.index("drhs"), MEASURES.index("relative_l2")
    histories = [history.reshape(-1, *history.shape[-2:]) for history, _ in own]
    noises = [sums[..., *place, :] for _, sums in own]
    noises = [x.reshape(-1, *x.shape[-2:]) for x in noises]
    return jnp.concatenate(histories), jnp.concatenate(noises)
