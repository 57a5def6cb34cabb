"""How many steps are taken by one call."""

import dataclasses

from loka_jax.train.config import LoopConfig, ProbeOptions, RunOptions
from tests.support.train import config


def of(step, *, end=1000, probe=0, profile=None, **loop):
    """Returns the steps of a call at some step; log lines are far apart."""
    rare = dict(log_every=512, eval_every=512, steps_per_call=4)
    asked = dataclasses.replace(
        config(),
        loop=LoopConfig(**{**rare, **loop}),
        probe=ProbeOptions(every=probe),
        run=RunOptions(profile=profile),
    )
    return asked.steps_at_once(step, steps_per_epoch=700, end=end)


def test_what_is_due_between_steps_ends_a_call(monkeypatch):
    assert [of(step) for step in (0, 4, 8, 508, 512)] == [4] * 5
    # Scales are looked at after every eighth step.
    assert [of(step) for step in (5, 6, 7)] == [1] * 3
    for name in ("log_every", "eval_every", "save_every"):
        due = {name: 10}
        assert [of(step, **due) for step in (0, 8, 9, 10, 12)] == [4, 1, 1, 4, 4]
    # Operands are before every tenth.
    monkeypatch.setattr("loka_jax.train.loop_options.LOOK_EVERY", 10)
    assert [of(step, probe=None) for step in (0, 8, 9, 10, 12)] == [4, 1, 1, 4, 4]
    assert of(700 - 4, eval_every=None) == 4
    assert of(700 - 2, eval_every=None) == 1  # the epoch ends
    assert [of(step, end=14) for step in (8, 12)] == [4, 1]
    assert of(8, steps_per_call=1) == 1


def test_observed_and_traced_steps_are_taken_one_by_one():
    assert [of(step, probe=16) for step in (32, 36, 44, 48)] == [1, 4, 4, 1]
    assert [of(step, profile="5:2") for step in (0, 4, 8)] == [4, 1, 4]
