"""Batches and states of steps that are timed."""

from types import SimpleNamespace

import jax.numpy as jnp

from experiments.bench import steps
from loka_jax.data import Batch, Events


def test_batches_of_one_size_are_timed():
    rows = [4, 8, 4, 4, 8, 4, 2, 4]  # of histories

    def batch(position, size, *, shuffle):
        ids = jnp.zeros((rows[position.step], 3))
        return Batch(*[None] * 4, events=Events(ids, *[None] * 7))

    run = SimpleNamespace(
        splits=SimpleNamespace(train=SimpleNamespace(batch=batch)),
        config=SimpleNamespace(loop=SimpleNamespace(batch_size=2)),
        train_step=lambda: lambda state, batch: state + 1,
    )
    batches = steps.batches_of(run)
    assert [len(batch.events.ids) for batch in batches] == [4] * 5
    assert steps.warm_up(run, 0, batches) == 3
