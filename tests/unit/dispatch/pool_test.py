"""Workers that end do not end what others measure, and take their turns."""

import collections
import contextlib
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection

import jax
import pytest

from loka_jax.dispatch import pool, worker
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import Turns, Worker, measure_all
from loka_jax.dispatch.table import Entry
from loka_jax.site import Choice, SiteSpec

SITE = SiteSpec(64, 32, 16)
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise")
JOB = Job(SITE, tuple(map(Choice.parse, NAMES)), None, "model", pairs=2, rows=16)


class Process(threading.Thread):
    """A thread in place of a worker process, that takes 1 us for every choice.

    It notes what it does, and acts as it is told: ends, hangs, or says half.
    """

    def __init__(self, act, log, handle):
        super().__init__(daemon=True)
        self._act, self._log, self._killed = act, log, threading.Event()
        self._socket = socket.socket(fileno=os.dup(handle))
        self._parent = Connection(os.dup(handle))
        self.start()

    def poll(self):
        return None if self.is_alive() else 1

    def kill(self):
        self._killed.set()
        self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self):
        self.join()
        self._socket.close()

    def run(self):
        self._log.append("started")
        with self._parent, contextlib.suppress(EOFError, OSError):
            while True:
                self._measure(self._parent.recv())

    def _do(self, what, job):
        act = self._act(what, job)
        if act == "hangs":
            self._killed.wait()
        if act == "says half":
            self._socket.send(b"\0\0\1\0half")  # of a message of 256 bytes
        if act:
            self._socket.shutdown(socket.SHUT_RDWR)
            raise EOFError

    def _turn(self, kind):
        self._parent.send((kind, None))
        self._parent.recv()

    def _measure(self, job):
        self._turn("together")
        self._do("together", job)
        self._log.append("+compile")
        for choice in job.choices:
            self._parent.send(("begin", choice.name))
            self._do(choice.name, job)
        self._log.append("-compile")
        self._turn("apart")
        self._turn("alone")
        self._do("alone", job)
        self._log += ["+time", "-time"]
        self._turn("apart")
        times = {choice.name: 1.0 for choice in job.choices}
        self._parent.send(("result", Entry({"training": times})))


@pytest.fixture
def process(monkeypatch):
    """Makes workers act as a function says; returns the list of what they did."""

    def process(act):
        log = []

        def start(command, *, pass_fds, **options):
            assert command[-1] == str(pass_fds[0])
            return Process(act, log, *pass_fds)

        monkeypatch.setattr(pool.subprocess, "Popen", start)
        return log

    return process


def _measure(timeout_s=300, turns=None):
    said = []
    with Worker(said.append, turns or Turns(), timeout_s=timeout_s) as one:
        return one.measure(JOB), said


@pytest.mark.parametrize(
    "act, timeout_s", [("ends", 300), ("hangs", 0.5), ("says half", 300)]
)
def test_who_ends_the_process_is_left_out(process, act, timeout_s):
    log = process(lambda what, job: act if what == NAMES[1] else None)
    entry, said = _measure(timeout_s)
    assert set(entry.times["training"]) == {NAMES[0], NAMES[2]}
    assert entry.failures == {NAMES[1]: "ended the process that ran it"}
    assert said == [f"{SITE}: {NAMES[1]} ended the process that ran it"]
    assert log.count("started") == 2


def test_whom_compilation_ends_is_found_one_by_one(process):
    process(lambda what, job: None if job.is_serial else "ends")
    entry, said = _measure()
    assert (set(entry.times["training"]), said) == (set(NAMES), [])


def test_who_ends_alone_gives_its_turn_back(process):
    process(lambda what, job: "ends" if what == "alone" else None)
    turns = Turns()
    assert _measure(turns=turns)[0].times == {}
    with turns.alone():
        pass


def test_the_budget_ends_what_is_under_way(process):
    process(lambda what, job: "hangs")
    assert list(measure_all([JOB] * 3, 2, lambda line: None, seconds=0.3)) == []


def test_one_takes_times_while_nobody_compiles(process):
    log, jobs = (
        process(lambda what, job: None),
        [JOB._replace(seed=i) for i in range(6)],
    )
    done = list(measure_all(jobs, 3, lambda line: None))
    assert sorted(job.seed for job, _ in done) == list(range(6))
    now = collections.Counter()
    for line in log:
        now[line[1:]] += {"+": 1, "-": -1}.get(line[0], 0)
        assert not now["time"] or not now["compile"]
        assert now["time"] <= 1
    assert log.count("started") == 3 and log.count("+time") == 6 and not +now


@pytest.mark.parametrize(
    "limit, held, fraction, expected",
    [(None, 0, None, 22), (75, None, None, 3), (75, 10, "0.5", 20), (1, 1, None, 1)],
)
def test_as_many_processes_run_as_the_memory_holds(
    monkeypatch, limit, held, fraction, expected
):
    class Gpu:
        def memory_stats(self):
            sizes = {"bytes_limit": limit, "pool_bytes": held}
            return limit and {k: x * 1e9 for k, x in sizes.items() if x is not None}

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    if fraction is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
    wide = JOB._replace(spec=SiteSpec(8192, 4096, 4096))
    assert pool.fitting(22, [JOB, wide]) == expected
    assert pool.fitting(22, []) == 22


def test_a_worker_asks_for_its_turns_answers_and_ends_with_its_parent(monkeypatch):
    def measure_site(job, begin, gpu):
        with gpu.together():
            begin(NAMES[1])
        with gpu.alone():
            return Entry({"training": {NAMES[1]: 2.0}})

    monkeypatch.setattr(worker, "measure_site", measure_site)
    ours, its = multiprocessing.Pipe()
    for answer in (JOB, *["go"] * 4):
        ours.send(answer)

    def serve():
        with pytest.raises(SystemExit):
            worker.serve(its)

    thread = threading.Thread(target=serve)
    thread.start()
    said = [ours.recv() for _ in range(6)]
    assert [
        kind for kind, _ in said
    ] == "together begin apart alone apart result".split()
    assert said[1] == ("begin", NAMES[1])
    assert said[-1] == ("result", Entry({"training": {NAMES[1]: 2.0}}))
    ours.close()
    thread.join(300)
    assert not thread.is_alive()


_SOON_S = 0.1  # in which a thread that need not wait would have its turn
_LIMIT_S = 300  # for a turn that comes at once where the machine is not busy


class _Thread(threading.Thread):
    """Takes a turn in a thread of its own, until it is told to end it."""

    def __init__(self, turn):
        super().__init__(target=self._take, args=(turn,), daemon=True)
        self._has, self._ends = threading.Event(), threading.Event()
        self.start()

    def _take(self, turn):
        with turn:
            self._has.set()
            self._ends.wait()

    def has(self, limit_s=_LIMIT_S):
        return self._has.wait(limit_s)

    def waits(self):
        return not self.has(_SOON_S)

    def end(self):
        self._ends.set()
        self.join()


def test_who_waits_to_be_alone_goes_before_who_begins_together():
    turns = Turns()
    first, second = (_Thread(turns.together()) for _ in range(2))
    assert first.has() and second.has()
    ready = [_Thread(turns.alone()) for _ in range(2)]
    assert all(one.waits() for one in ready)
    late = _Thread(turns.together())
    first.end()
    assert all(one.waits() for one in (*ready, late))
    second.end()
    for _ in range(2):
        until = time.monotonic() + _LIMIT_S
        while not any(one.has(0) for one in ready):
            assert time.monotonic() < until
            time.sleep(0.001)
        (one,) = (one for one in ready if one.has(0))
        ready.remove(one)
        assert all(other.waits() for other in (*ready, late))
        one.end()
    assert late.has()
    late.end()


def test_an_exception_ends_a_turn():
    turns = Turns()
    for turn in (turns.alone, turns.together):
        with pytest.raises(KeyError), turn():
            raise KeyError
        for other in (turns.together, turns.alone):
            with other():
                pass
