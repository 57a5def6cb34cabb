import dataclasses
import math

import pytest

from loka_jax.optim import OptimConfig, Plateau

CONFIG = OptimConfig(best_by="auc", plateau_factor=0.1, plateau_patience=2)


def follow(values, config=CONFIG):
    plateau = Plateau()
    for value in values:
        plateau = plateau.after(value, config)
    return plateau


def test_a_better_auc_resets_the_stalls_but_not_the_rates():
    after = follow([0.7, 0.6, 0.8])
    assert after == Plateau(best=0.8, stalls=0, lr_scale=0.1)
    assert not follow([0.7, 0.6, 0.8, 0.7]).stop
    # A gain of a millionth is a stall.
    assert [follow([0.7, 0.7 + gain]).stalls for gain in (5e-7, 2e-6)] == [1, 0]
    after = follow([0.7, 0.6, 0.5, 0.4], OptimConfig(best_by="auc"))
    assert after == Plateau(best=0.7)  # all, without patience


@pytest.mark.parametrize("measure", ["ne", "logloss"])
def test_a_lower_loss_is_better(measure):
    config = dataclasses.replace(CONFIG, best_by=measure)
    assert follow([0.9, 0.8, 0.7], config) == Plateau(best=0.7)
    assert follow([0.9, 0.8, 0.85, 0.8 - 5e-7], config).stop
    assert follow([7.0], config).best == 7.0  # worse than predicting the mean, so far


@pytest.mark.parametrize("auc", [None, math.nan])
def test_an_undefined_auc_is_a_stall_and_never_the_best(auc):
    assert follow([0.7, auc]) == Plateau(best=0.7, stalls=1, lr_scale=0.1)
    assert follow([auc]).best is None


def test_the_patience_is_counted_in_stalls_in_a_row():
    patient = dataclasses.replace(CONFIG, plateau_patience=3)
    assert not follow([0.7, 0.6, 0.6], patient).stop
    after = follow([0.7, 0.6, 0.6, 0.8, 0.6, 0.6], patient)
    assert (after.stop, after.stalls, after.best) == (False, 2, 0.8)
    assert after.lr_scale == pytest.approx(1e-4)
    assert follow([0.7, 0.6, 0.6, 0.6], patient).stop
