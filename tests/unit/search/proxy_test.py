"""What trials teach, on spaces whose speeds are known."""

import dataclasses

import numpy as np
import pytest

from experiments.bench import replay_search
from loka_jax.search import proxy
from tests.support.search import space


def searched(points, seed=0, trials=10, earlier=()):
    rng = np.random.default_rng(seed)
    choose = replay_search.by_loka(points, earlier)
    done = replay_search.replay(points, choose, trials, rng)
    return done, replay_search.regrets(points, done, trials)


@pytest.mark.parametrize("memory", [0.3, 0.7], ids=["fits", "half does not fit"])
def test_ten_trials_find_a_fast_point(memory):
    points = space(memory=memory)
    done, regret = searched(points)
    assert regret[-1] < 0.01  # random search lacks 13 and 17 % then
    assert len(done) < len(points) / 10


def test_one_line_in_twenty_that_was_disturbed_misleads_no_search():
    rng = np.random.default_rng(1)
    points = [
        dataclasses.replace(
            point,
            rates=tuple(x * (0.5 if rng.random() < 0.05 else 1) for x in point.rates),
        )
        for point in space(seed=2)
    ]
    _, regret = searched(points, seed=3)
    assert regret[-1] < 0.01


def test_what_is_learned_ranks_the_rest_and_knows_its_error():
    points = space(seed=4)
    done = [points[i] for i in np.random.default_rng(0).permutation(len(points))[:20]]
    told = replay_search.calibration(points, done)
    assert told["rank_correlation"] > 0.9
    assert told["in_95_interval"] > 0.8


def test_predictions_that_are_wrong_as_a_whole_are_found_out():
    """Small batches are fast, and predicted to be slow."""
    points = [
        dataclasses.replace(
            point,
            rates=tuple(x * (2048 / point.batch_size) ** 2 for x in point.rates),
        )
        for point in space(seed=3)
    ]
    _, regret = searched(points, trials=12)
    assert regret[1] > 0.5 and regret[-1] < 0.15
    chosen, judged = proxy.suggest(points, points[:5])  # the sixth trial explores
    assert judged.spread[chosen] == judged.spread.max()


def test_trials_of_another_space_make_the_first_choice_better():
    points, other = space(memory=0.1), space(seed=7, memory=0.1)[::4]
    _, alone = searched(points, trials=1)
    _, taught = searched(points, trials=1, earlier=[other])
    assert taught[0] < 0.15 < alone[0]


def test_memory_is_learned_where_the_prediction_errs():
    points = space(memory=0.3)  # 0.075 to 0.6 of the memory
    assert proxy.fits(points, []).min() > 0.4
    tight = [x for x in points if x.memory_share > 0.5]
    failed = [dataclasses.replace(x, status="memory", rates=()) for x in tight[:3]]
    fit = proxy.fits(points, [*failed, points[0]])
    shares = np.array([point.memory_share for point in points])
    assert fit[shares > 0.5].max() < 0.5 < fit[shares < 0.2].min()


def test_a_choice_that_always_crashes_is_left():
    points = [
        dataclasses.replace(x, status="crash", rates=())
        if x.choices["recipe"] == "fp8_rowwise"
        else x
        for x in space()
    ]
    done, regret = searched(points, trials=20)
    assert regret[-1] < 0.02
    assert sum(trial.status == "crash" for trial in done) <= 7


def test_a_search_ends_when_all_was_tried():
    points = space()[:4]
    done, regret = searched(points, trials=10)
    assert 3 <= len(done) <= 4 and regret[-1] == 0
    assert proxy.suggest(points, points)[0] is None


def test_factors_are_those_of_the_axes():
    points = space(memory=0.1)
    found = proxy.factors(points, proxy.judge(points, points[::5]))
    assert found["recipe"]["fp8_rowwise"] == 1 == found["batch-size"]["16384"]
    assert 0.6 < found["recipe"]["bf16"] < found["recipe"]["fp8_tensorwise"] < 1
