"""Ctrl-C and SIGTERM: at once outside `deferred`, polled inside it."""

import os
import signal

import pytest

from loka_jax.train.processes import signals
from loka_jax.train.processes.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_with_its_code_unless_deferred(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, stop_on_signals():
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
    with stop_on_signals() as stop, stop.deferred():
        assert (stop.is_set, stop.exit_code) == (False, 0)
        os.kill(os.getpid(), number)
        assert (stop.is_set, stop.exit_code) == (True, 128 + number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("processes", [1, 2])
def test_a_postponed_signal_ends_the_process_after_the_block(processes):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX takes it, of two
    try:
        with pytest.raises(SystemExit) as ended, stop_on_signals(processes) as stop:
            with stop.postponed():
                pass
            with stop.postponed():
                os.kill(os.getpid(), signal.SIGINT)
                went_on = True
            raise AssertionError
    finally:
        signal.signal(signal.SIGTERM, before)
    assert went_on and ended.value.code == 130


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_ends_the_process_at_once(monkeypatch, processes):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(os, "kill", lambda *_: None)  # as it is handed to JAX
    with stop_on_signals(processes) as stop, stop.deferred():
        stop(signal.SIGINT, None)
        assert codes == []
        monkeypatch.setattr(stop, "_is_agreed", True, raising=False)
        stop(signal.SIGTERM, None)
    assert codes[0] == 143


def test_a_signal_that_timeout_sends_twice_counts_once(monkeypatch):
    codes, now = [], [7.0]
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with stop_on_signals() as stop, stop.deferred():
        for _ in range(2):  # to the process, and to its group
            stop(signal.SIGTERM, None)
        assert stop.is_set and codes == []
        now[0] += 1.0
        stop(signal.SIGTERM, None)
    assert codes == [143]


def test_of_several_processes_ctrl_c_is_handed_to_jax_while_training():
    handed = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handed.append(number))
    try:
        with stop_on_signals(processes=2) as stop, stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert handed == [signal.SIGTERM]
            # Not before the others have agreed on a step.
            assert (stop.is_set, stop.exit_code) == (False, 0)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_several_processes_stop_when_all_have_agreed(monkeypatch):
    agreed = "reached_preemption_sync_point"
    # JAX names one number, and says so of no other.
    monkeypatch.setattr(signals, agreed, lambda number: number == 2)
    with stop_on_signals(processes=2) as stop, stop.deferred():
        assert not stop.reached() and not stop.is_set
        assert stop.reached() and stop.is_set and stop.exit_code == 143
        assert stop.reached()
