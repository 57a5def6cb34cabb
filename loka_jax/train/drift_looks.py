"""Looks at the operands of FP8 sites, and those that a run has not yet read.

A look runs the step to come without training: it changes nothing, and sees the scales
that the step will cast with. No step waits for it: it is read before an evaluation or
a checkpoint, where the run waits anyway.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax.data import Batch
from loka_jax.dispatch.operand_health import health
from loka_jax.nn import by_path
from loka_jax.probe.capture import Sampler
from loka_jax.recipe import Recipe
from loka_jax.scaling import init_delayed
from loka_jax.site import Choice
from loka_jax.train.build import Run
from loka_jax.train.host_state import Progress
from loka_jax.train.mesh_step import look_up_everywhere
from loka_jax.train.state import TrainState
from loka_jax.train.step import make_observe_step, named_sites

MAX_ROWS = 2048  # of a batch
# Unread looks; older ones are read, as they have been computed.
_MAX_UNREAD = 8

type Look = dict[str, Float[Array, "operands measures"]]


class DriftLooks:
    """Unread looks, the oldest first."""

    def __init__(self):
        """Begins without a look."""
        self._unread: collections.deque[Look] = collections.deque()
        self._run: Run | None = None
        self._step: Callable[[TrainState, Batch], Look] | None = None

    def after(
        self, run: Run, state: TrainState, progress: Progress, batch: Batch
    ) -> Progress:
        """Looks at the step to come on `batch`; returns the progress with old looks."""
        if self._run is not run:  # under another plan
            self._run, self._step = run, look_step(run, watched(run, progress))
        if self._step is not None:
            self._unread.append(self._step(state, batch))
        return self._read(progress, _MAX_UNREAD)

    def read(self, progress: Progress) -> Progress:
        """Returns the progress with all looks, after waiting for the device."""
        return self._read(progress, 0)

    def drop(self) -> None:
        """Forgets unread looks, for a run that goes back to a step before them."""
        self._unread.clear()

    def _read(self, progress: Progress, keep: int) -> Progress:
        """Returns the progress with all looks but the newest `keep`."""
        watch = progress.drift
        while len(self._unread) > keep:
            watch = watch.after(measured(self._unread.popleft()))
        return dataclasses.replace(progress, drift=watch)


def measured(look: Look) -> dict[str, np.ndarray]:
    """Returns the measures of a look by path, once the device has computed them."""
    return jax.device_get(look)


def watched(run: Run, progress: Progress) -> dict[str, Recipe]:
    """Returns the recipes whose casts are looked at, by path.

    They are those of the sites in FP8, and of the sites that have drifted those before.
    """
    recipes = {
        site.path: site.plan.choice.recipe
        for site in run.sites
        if site.has_choice and site.is_fp8
    }
    away = {
        path: Choice.parse(progress.planned[path]["choice"]).recipe
        for path in progress.drift.away
    }
    return recipes | away


def look_step(
    run: Run, recipes: Mapping[str, Recipe]
) -> Callable[[TrainState, Batch], Look] | None:
    """Returns the compiled look at some sites, by path; None without sites.

    A site whose recipe is delayed but that has no scales, as it runs in bfloat16, is
    looked at with those of a first step.
    """
    if not recipes:
        return None
    observer, parts = Sampler(max_rows=MAX_ROWS), run.config.loop.microbatches
    if run.spread is None:
        observe = make_observe_step(run.planned, run.tables, observer)
    else:  # all devices look at the part of one of them
        parts *= run.spread.mesh.size
        observe = run.spread.everywhere(
            make_observe_step(run.planned, run.tables, observer, look_up_everywhere)
        )

    def look(state: TrainState, batch: Batch) -> Look:
        part = jax.tree.map(lambda x: jnp.asarray(x)[: len(x) // parts], batch)
        samples, scales = by_path(observe(state, part)), named_sites(state)
        return {
            path: jnp.stack(
                health(samples[path], recipe, scales.get(path, init_delayed(recipe))), 1
            )
            for path, recipe in recipes.items()
        }

    return jax.jit(look)
