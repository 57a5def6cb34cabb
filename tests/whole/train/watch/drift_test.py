"""A feature that changes its size: the site leaves FP8, and returns when it is back."""

import dataclasses

import numpy as np

from experiments.configs import get_config
from loka_jax.train import build as build_lib
from loka_jax.train import loop as loop_lib
from loka_jax.train.watch import verdict
from tests.support import train as support

COLUMN, FACTOR = 2, 1000.0
SINCE, UNTIL = 10, 30  # steps of the jump


class Planted(build_lib.Prefetcher):
    """Batches with another size of a dense column in some steps."""

    step = 0

    def __next__(self):
        position, batch = super().__next__()
        if SINCE <= Planted.step < UNTIL:
            dense = np.array(batch.dense)
            dense[:, COLUMN] *= FACTOR
            batch = batch._replace(dense=dense)
        Planted.step += 1
        return position, batch


def test_a_jump_demotes_a_site_and_it_returns_with_the_data(tmp_path, monkeypatch):
    recipe = "fp8_tensorwise"
    base = get_config("fp8_dlrm_tiny")
    config = dataclasses.replace(
        base,
        model=base.model.clone(recipe=recipe),
        # So slow that the jump does not ruin the model itself.
        optim=dataclasses.replace(base.optim, lr=1e-6, rows_lr=1e-6),
        loop=dataclasses.replace(base.loop, epochs=4, look_every=1),
        run=dataclasses.replace(base.run, workdir=tmp_path),
    )
    Planted.step = 0
    monkeypatch.setattr(build_lib, "Prefetcher", Planted)
    # The logits jump too: without the guard, which would end the run.
    monkeypatch.setattr(verdict, "judged", lambda run, state, progress: progress)
    monkeypatch.setattr(verdict, "is_healthy", lambda *_: True)
    monkeypatch.setattr(verdict, "refuse_ruin", lambda *_: None)
    code, _ = support.train(config)
    assert code == 0
    changes = support.summary(tmp_path)["changes"]
    of_site = [x for x in changes if "bottom_mlp/dense_1" in x]
    # Off in looks 10 to 12, and home from 30 on: at the next evaluations of every 8.
    assert [x.split(":")[0] for x in of_site] == ["step 16", "step 40"]
    assert "in bfloat16 now: " in of_site[0] and f"xla {recipe} again" in of_site[1]
    assert len(changes) % 2 == 0  # every site that left is back


def test_looks_change_nothing(tmp_path, monkeypatch):
    support.share_steps(monkeypatch)
    ends, plain = [], loop_lib.Loop.train

    def spy(self, stop):
        plain(self, stop)
        ends.append((support.digest(self.state), self.progress.drift.sites))

    monkeypatch.setattr(loop_lib.Loop, "train", spy)
    for every in (3, 1000):
        workdir = tmp_path / str(every)
        support.train(
            support.config(workdir, look_every=every, microbatches=2, max_steps=8)
        )
    (looked, sites), (not_looked, none) = ends
    assert looked == not_looked
    assert not none and {site.looks for site in sites.values()} == {2}
