"""Looks at the operands of FP8 sites, and those that a run has not yet read.

A look runs the step to come without training: it changes nothing, and sees the scales
that the step will cast with. No step waits for it: it is read before an evaluation or
a checkpoint, where the run waits anyway.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax.data import Batch
from loka_jax.dispatch.operand_health import health
from loka_jax.dispatch.policy import Decision
from loka_jax.measure.compiling import untuned_here
from loka_jax.nn import by_path
from loka_jax.probe.capture import Sampler
from loka_jax.recipe import Recipe, Role
from loka_jax.scaling import init_delayed
from loka_jax.site import Choice
from loka_jax.train import tasks
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import make_observe_step, named_sites
from loka_jax.train.watch.host_state import Progress

MAX_EXAMPLES = 8192  # that a look runs
MAX_ROWS = 2048  # of the operands of a site whose casts are measured
# Unread looks; older ones are read, as they have been computed.
_MAX_UNREAD = 8

type Look = dict[str, Float[Array, "operands measures"]]


class DriftLooks:
    """Unread looks, the oldest first."""

    def __init__(self, say: Callable[[str], None] = print):
        """Begins without a look; `say` takes a sentence for a site to be told of."""
        self._say = say
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
            assert self._run is not None
            steps = self._run.config.loop.look_every
            before, watch = watch, watch.after(measured(self._unread.popleft()), steps)
            for path in watch.newly_above(before):
                self._say(
                    f"{path}: errors of its FP8 have been above their limit in most "
                    f"looks, by less than twice: --dispatch.rules {path}=bf16 ends it."
                )
        return dataclasses.replace(progress, drift=watch)


def measured(look: Look) -> dict[str, np.ndarray]:
    """Returns the measures of a look by path, once the device has computed them."""
    return jax.device_get(look)


class Watched(NamedTuple):
    """What is looked at of a site.

    Attributes:
        recipe: whose casts, without those that its kernels leave out.
        fp8_results: as in `nn.Site`.
    """

    recipe: Recipe
    fp8_results: tuple[Role, ...]


def watched(run: Run, progress: Progress) -> dict[str, Watched]:
    """Returns what is looked at, by path.

    That are the sites in FP8, and those that have drifted as they were before.
    """
    before = {
        path: Decision(Choice.parse(progress.planned[path]["choice"]), "before drift")
        for path in progress.drift.away
    }
    sites = run.list_sites(run.plan.changed(before), scales_initialized=True)
    return {
        site.path: Watched(
            dataclasses.replace(site.plan.backward_recipe, scales_initialized=False),
            site.fp8_results,
        )
        for site in sites
        if site.has_choice and site.is_fp8
    }


def look_step(
    run: Run, sites: Mapping[str, Watched]
) -> Callable[[TrainState, Batch], Look] | None:
    """Returns the compiled look at some sites, by path; None without sites.

    A site whose recipe is delayed but that has no scales, as it runs in bfloat16, is
    looked at with those of a first step. Up to `MAX_EXAMPLES` are run that a device has
    of a microbatch, so that a look takes no more memory than a step, and not much time.
    The error of drhs is extrapolated to the whole batch. Gradients are those of its
    mean loss, as in the step.
    """
    if not sites:
        return None
    recipes = tuple(dict.fromkeys(site.recipe for site in sites.values()))
    limits = run.config.dispatch.limits
    # All devices look at the part of one of them.
    parts = run.config.loop.microbatches * run.placement.size
    parts *= -(-run.config.loop.batch_size // (parts * MAX_EXAMPLES))
    observer = Sampler(recipes=recipes, max_rows=MAX_ROWS, copies=parts)
    task_weights = run.config.optim.task_weights
    observe = make_observe_step(run.planned, run.placement, observer, task_weights)

    def look(state: TrainState, batch: Batch) -> Look:
        total_weight = jnp.sum(tasks.labels_and_weights(batch)[1], axis=0)
        rows = len(batch.labels) // parts
        part = jax.tree.map(lambda x: jnp.asarray(x)[:rows], batch)
        seen = observe(state, part, total_weight)
        samples, scales = by_path(seen), named_sites(state)
        looks = {}
        for path, (recipe, fp8_results) in sites.items():
            sample = samples[path]
            measures = health(
                sample,
                sample.errors.relative_l2[recipes.index(recipe)],
                recipe,
                scales.get(path, init_delayed(recipe)),
                fp8_results=fp8_results,
                limits=limits,
            )
            looks[path] = jnp.stack(measures, 1)
        return looks

    # A look is rare and small: faster kernels would not make up for their search.
    return jax.jit(look, compiler_options=untuned_here())
