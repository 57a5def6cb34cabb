"""A plan whose kernels are checked while a run trains."""

import threading

import pytest

from loka_jax.dispatch.hope import Hope
from loka_jax.dispatch.measuring import ALONE
from loka_jax.dispatch.pool import Over, gpu_turn


class _Timing:
    """A check that takes times alone, from when it is told to until it is told."""

    def __init__(self):
        self.asked, self.begin, self.end = threading.Event(), *_events(2)
        self.has, self.calls = threading.Event(), 0

    def __call__(self, turns):
        self.calls += 1
        self.asked.set()
        self.begin.wait(10)
        with gpu_turn(turns.folder, ALONE):
            self.has.set()
            self.end.wait(10)
        return "checked"


def _events(count):
    return [threading.Event() for _ in range(count)]


def test_the_first_call_checks_and_others_wait():
    timing = _Timing()
    hope, found = Hope(timing), []
    threads = [
        threading.Thread(target=lambda: found.append(hope.checked())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert timing.asked.wait(10) and not found
    timing.begin.set(), timing.end.set()
    for thread in threads:
        thread.join(10)
    assert found == ["checked"] * 3 and timing.calls == 1


def test_no_kernel_is_timed_in_a_turn_and_no_turn_begins_while_one_is():
    timing = _Timing()
    hope = Hope(timing)
    with hope.turn() as is_beside:
        assert not is_beside  # nothing is checked yet
    hope.begin()
    with hope.turn() as is_beside:  # from then on
        assert is_beside
        assert timing.asked.wait(10)
        timing.begin.set()
        assert not timing.has.wait(0.2)
    assert timing.has.wait(10)
    steps = []

    def step():
        with hope.turn() as is_beside:
            steps.append(is_beside)

    beside = threading.Thread(target=step)
    beside.start()
    beside.join(0.2)
    assert not steps
    timing.end.set()
    beside.join(10), hope.checked()
    assert steps == [True]
    with hope.turn() as is_beside:
        assert not is_beside


def test_a_check_ends_when_its_run_does():
    def check(turns):
        assert turns.are_over.wait(10)
        raise Over

    hope = Hope(check)
    threading.Timer(0.1, hope.end).start()
    with pytest.raises(Over):
        hope.checked()


def test_a_check_that_failed_is_tried_again_by_the_next_who_asks():
    answers = iter([RuntimeError("ended"), "checked"])

    def check(turns):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    hope = Hope(check)
    with pytest.raises(RuntimeError, match="ended"):
        hope.checked()
    assert hope.checked() == "checked"


def test_turns_cost_nothing_before_and_after_a_check():
    timing = _Timing()
    timing.begin.set(), timing.end.set()
    hope = Hope(timing)
    for _ in range(2):  # to begin once more changes nothing
        hope.begin()
        assert hope.checked() == "checked" and timing.calls == 1
        with hope.turn() as is_beside:
            assert not is_beside
