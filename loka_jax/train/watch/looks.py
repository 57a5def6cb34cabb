"""Looks at FP8 sites while a run trains, and those that it has not yet read.

operands    before a step, which is run without training: what its casts will do, by
            the scales that it will cast with (`dispatch.drift`)
scales      after a step: amaxes that were far off their scales (`scale_watch`)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.data import Batch
from loka_jax.dispatch.drift import SiteDrift, health
from loka_jax.dispatch.policy import Decision, Limits
from loka_jax.measure.compiling import Ahead, untuned_here
from loka_jax.nn import by_path
from loka_jax.probe.site import Capture, Sample
from loka_jax.recipe import Recipe, Role
from loka_jax.site import Choice
from loka_jax.train.build import Run
from loka_jax.train.observe import observe_step, parts_of
from loka_jax.train.state import TrainState
from loka_jax.train.step import named_sites
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.scale_watch import Look as ScaleLook
from loka_jax.train.watch.scale_watch import take_look

MAX_ROWS = 2048  # of the operands of a site whose casts are measured
# Unread looks; older ones are read, as they have been computed.
_MAX_UNREAD = 8

type Look = dict[str, Float[Array, "operands measures"]]


class Looks:
    """Unread looks, the oldest first.

    No step waits for a look: it is read before a log line, a review of the plan or a
    checkpoint, where the run waits anyway.
    """

    def __init__(self, say: Callable[[str], None]):
        """Begins without a look; `say` takes a sentence on what was found."""
        self._say = say
        # Each waits for the device, and returns a progress with its look.
        self._unread: list[Callable[[Progress], Progress]] = []
        self._run: Run | None = None
        self._step: Ahead | None = None

    def before_step(
        self, run: Run, state: TrainState, progress: Progress, batch: Batch
    ) -> Progress:
        """Looks at operands in the step to come; returns progress with old looks."""
        if self._run is not run:  # under another plan
            self._run, self._step = run, look_step(run, watched(run, progress))
        if self._step is None:
            return progress
        look = self._step(state, batch)
        self._unread.append(functools.partial(self._with_operands, run, look))
        return self.read(progress, keep=_MAX_UNREAD)

    def after_step(
        self, run: Run, state: TrainState, progress: Progress, batch: Batch
    ) -> Progress:
        """Looks at scales after a step on `batch`; returns progress with old looks."""
        sites = named_sites(state)
        if not sites:
            return progress
        look = take_look(
            sites,
            {site.path: site.plan.choice.recipe for site in run.sites},
            jnp.asarray(batch.dense),
            step=progress.step,
            position=progress.position,
            skipped=state.skipped,
        )
        self._unread.append(functools.partial(self._with_scales, run, look))
        return self.read(progress, keep=_MAX_UNREAD)

    def read(self, progress: Progress, keep: int = 0) -> Progress:
        """Returns the progress with all looks but the newest, waiting for the device.

        `keep` is the number of looks that are left unread.
        """
        while len(self._unread) > keep:
            progress = self._unread.pop(0)(progress)
        return progress

    def drop(self) -> None:
        """Forgets unread looks, for a run that goes back to a step before them."""
        self._unread.clear()

    def _with_operands(self, run: Run, look: Look, progress: Progress) -> Progress:
        drift, every = dict(progress.drift), run.config.probe.look_every
        for path, measures in jax.device_get(look).items():
            before = drift.get(path, SiteDrift())
            drift[path] = site = before.after(measures, every)
            if site.is_long_above and not before.is_long_above:
                self._say(
                    f"{path}: errors of its FP8 have been above their limit in most "
                    f"looks, by less than twice: --dispatch.rules {path}=bf16 ends it."
                )
        return dataclasses.replace(progress, drift=drift)

    def _with_scales(self, run: Run, look: ScaleLook, progress: Progress) -> Progress:
        before, size = progress.scale_watch, run.config.loop.batch_size
        watch = before.after(look, run.splits.train, size)
        for sentence in watch.warnings[len(before.warnings) :]:
            self._say(sentence)
        return dataclasses.replace(progress, scale_watch=watch)


class Watched(NamedTuple):
    """What is looked at of a site: the casts that it runs, see also `nn.Site`."""

    recipe: Recipe
    fp8_results: tuple[Role, ...]


def watched(run: Run, progress: Progress) -> dict[str, Watched]:
    """Returns what is looked at: sites in FP8, and as they were, those that drifted."""
    before = {
        path: Decision(Choice.parse(site.left["choice"]), "before drift")
        for path, site in progress.drift.items()
        if site.left is not None
    }
    found = {}
    for site in run.list_sites(run.plan.changed(before), scales_initialized=True):
        if site.has_choice and site.is_fp8:
            recipe = site.plan.backward_recipe
            recipe = dataclasses.replace(recipe, scales_initialized=False)
            found[site.path] = Watched(recipe, site.fp8_results)
    return found


def look_step(run: Run, sites: Mapping[str, Watched]) -> Ahead | None:
    """Returns a look at some sites, by path; None without sites.

    It takes the state and a batch, and is the same for the same arguments. A site that
    has no delayed scales, as it runs in bfloat16, is looked at with those of a first
    step. The error of drhs is extrapolated to the whole batch.
    """
    if not sites:
        return None
    key = tuple(sites.items())
    if key not in run.programs:
        run.programs[key] = _look_step(run, sites)
    return run.programs[key]


def _look_step(run: Run, sites: Mapping[str, Watched]) -> Ahead:
    recipes = tuple(dict.fromkeys(site.recipe for site in sites.values()))
    copies, limits = parts_of(run), run.config.dispatch.limits
    observer = Capture(recipes=recipes, max_rows=MAX_ROWS, copies=copies)
    observe = observe_step(run, observer)

    def look(state: TrainState, batch: Batch) -> Look:
        samples = by_path(observe(dataclasses.replace(state, probe={}), batch))
        return {
            path: _health(samples[path], site, recipes.index(site.recipe), limits)
            for path, site in sites.items()
        }

    # A look is rare and small: faster kernels would not make up for their search.
    return Ahead(jax.jit(look, compiler_options=untuned_here()))


def _health(
    sample: Sample, site: Watched, place: int, limits: Limits
) -> Float[Array, "3 4"]:
    """Returns the `health` of a site; the largest measures of a stack of layers.

    Args:
        place: of the site's recipe among those of which errors were measured.
    """
    how = dict(recipe=site.recipe, fp8_results=site.fp8_results, limits=limits)
    of_layers: Any = functools.partial(health, **how)
    errors = sample.errors.relative_l2[..., place, :]
    for _ in range(errors.ndim - 1):
        of_layers = jax.vmap(of_layers)
    measures = of_layers(sample.operands, errors)
    return jnp.nanmax(measures.reshape(-1, *measures.shape[-2:]), axis=0)
