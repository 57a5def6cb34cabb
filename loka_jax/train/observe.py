"""Runs a part of a batch without training, and tells what an observer sees of sites.

All devices run the same part. It has at most as many examples as a device has of a
microbatch, and some thousand, so that it takes no more memory than a training step, and
not much time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from loka_jax import nn
from loka_jax.data import Batch
from loka_jax.measure.compiling import Ahead, untuned_here
from loka_jax.ops.tap import Observer
from loka_jax.probe.site import ErrorsAlone, ProbeConfig
from loka_jax.train import tasks
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import make_observe_step

_MAX_EXAMPLES = 8192


def parts_of(run: Run) -> int:
    """Returns the number of parts of a batch of which one is run."""
    loop = run.config.loop
    parts = loop.microbatches * run.placement.size
    if run.config.data.is_log:  # the part of a device is not divided
        return parts
    return parts * -(-loop.batch_size // (parts * _MAX_EXAMPLES))


def observe_step(run: Run, observer: Observer) -> Callable[[TrainState, Batch], Any]:
    """Returns a function of state and batch: what an observer tells of each site.

    Gradients are those of the batch's mean loss.
    """
    parts, objective = parts_of(run), tasks.objective_of(run.config.optim)
    observe = make_observe_step(run.planned, run.placement, observer, objective)

    def observed(state: TrainState, batch: Batch) -> Any:
        total_weight = jnp.sum(tasks.labels_and_weights(batch)[1], axis=0)
        if parts > 1:
            batch = jax.tree.map(lambda x: jnp.asarray(x)[: len(x) // parts], batch)
        return observe(state, batch, total_weight)

    return observed


def probe_step(run: Run, probe: ProbeConfig | ErrorsAlone) -> Ahead:
    """Returns a function of state and batch: Probe's statistics after the batch.

    It is the same for the same arguments.
    """
    if probe not in run.programs:
        observe = observe_step(run, dataclasses.replace(probe, copies=parts_of(run)))

        def step(state: TrainState, batch: Batch) -> Any:
            return nn.merge_stats(state.probe, observe(state, batch), probe)

        # It runs rarely: faster kernels would not make up for their search.
        run.programs[probe] = Ahead(jax.jit(step, compiler_options=untuned_here()))
    return run.programs[probe]
