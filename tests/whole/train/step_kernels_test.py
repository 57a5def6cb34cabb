"""Training steps whose dense parameters a kernel updates."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from loka_jax.optim import Adam, adam
from loka_jax.train.placement import Placement
from loka_jax.train.step import make_train_step
from loka_jax.train.tables.update import RowUpdate
from tests.support import hopper, linear
from tests.support.linear import TABLES, Linear, make_batch
from tests.support.triton import interpreted, skip_without_triton

__all__ = ["interpreted"]

skip_without_triton()

ROWS = RowUpdate(Adam(), lambda step: jnp.float32(0.1), 0.0)
PLACEMENT = Placement(TABLES)


def by(implementation):
    """Returns Adam with a schedule, whose kernel runs or does not."""
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    return adam(schedule, max_norm=0.5, implementation=implementation)


def step_of(optimizer):
    return make_train_step(Linear(), PLACEMENT, optimizer, ROWS)


def states(optimizer):
    """Returns the states after each of four steps, of which the third is skipped."""
    state, step = linear.make_state(Linear(), optimizer, Adam()), step_of(optimizer)
    for seed in range(4):
        batch = make_batch(seed)
        if seed == 2:
            batch = batch._replace(dense=np.full_like(batch.dense, np.inf))
        batch = jax.tree.map(jnp.asarray, batch)
        state, _ = step(dataclasses.replace(state, lr_scale=jnp.float32(0.5)), batch)
        yield state


@pytest.mark.usefixtures("interpreted")
def test_steps_by_the_kernel_are_those_by_optax():
    previous = None
    for ours, theirs in zip(states(by("triton")), states(by("xla")), strict=True):
        assert int(ours.skipped) == int(theirs.skipped)
        trained = [(x.params, x.opt_state, x.table) for x in (ours, theirs)]
        assert jax.tree.structure(trained[0]) == jax.tree.structure(trained[1])
        for x, y in zip(*map(jax.tree.leaves, trained), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        if int(ours.skipped_in_a_row):
            jax.tree.map(np.testing.assert_array_equal, trained[0], previous)
        previous = trained[0]
    assert int(ours.skipped) == 1 and int(ours.opt_state[1][0].count) == 3


class Mlp(linen.Module):
    """Two hidden layers."""

    @linen.compact
    def __call__(self, dense, embeddings, *, train=False):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        for size in (512, 256):
            x = jax.nn.relu(linen.Dense(size)(x))
        return linen.Dense(1)(x)[:, 0]


def test_a_step_updates_its_parameters_in_place_by_one_launch():
    optimizer, batch = by("triton"), jax.tree.map(jnp.asarray, make_batch())
    state = linear.make_state(Mlp(), optimizer, Adam())
    step = make_train_step(Mlp(), PLACEMENT, optimizer, ROWS)
    run = lambda s, b: step(s, b)[0]  # noqa: E731
    hlo = hopper.compiled(run, state, batch, donate_argnums=(0,))
    launches = [kernel.opcode for kernel in hopper.kernels(hlo)]
    assert launches.count("custom-call") == 1
    assert not re.search(r" copy\(%s\w*_(params|mu|nu)_", hlo)
