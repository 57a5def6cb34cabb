"""Workers that end do not end what others measure, and take their turns."""

import collections
import contextlib
import multiprocessing
import os
import re
import socket
import threading
import time
from multiprocessing.connection import Connection

import jax
import pytest

from loka_jax.dispatch import pool
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import Over, Turns, Worker, gpu_turn, measure_all
from loka_jax.dispatch.table import Entry
from loka_jax.site import Choice, SiteSpec

SITE = SiteSpec(64, 32, 16)
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise")
JOBS = [Job(SITE, Choice.parse(name)) for name in NAMES]


class Process(threading.Thread):
    """A thread in place of a worker process, in which a candidate takes 1 us.

    It notes what it does, and acts as it is told: ends, hangs, or says half.
    """

    def __init__(self, act, log, folder, handle):
        super().__init__(daemon=True)
        self._act, self._log, self._killed = act, log, threading.Event()
        self._folder = folder
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

    @contextlib.contextmanager
    def _turn(self, kind):
        self._parent.send("waits")
        with pool.gpu_turn(self._folder, kind):
            self._parent.send("has")
            yield

    def _measure(self, job):
        with self._turn("together"):
            self._log.append("+compile")
            self._do("together", job)
            self._log.append("-compile")
        with self._turn("alone"):
            self._do("alone", job)
            self._log += ["+time", "-time"]
        self._parent.send(Entry({"training": {job.choice.name: 1.0}}))


@pytest.fixture
def process(monkeypatch):
    """Makes workers act as a function says; returns the list of what they did."""

    def process(act):
        log = []

        def start(command, *, pass_fds, **options):
            handle, folder = re.fullmatch(
                r".*serve\((\d+), '(.+)'\)", command[-1]
            ).groups()
            assert pass_fds == [int(handle)]
            return Process(act, log, folder, *pass_fds)

        monkeypatch.setattr(pool.subprocess, "Popen", start)
        return log

    return process


def _measure(folder, timeout_s=300):
    said = []
    with Worker(said.append, str(folder), timeout_s=timeout_s) as one:
        return [one.measure(job) for job in JOBS], said


@pytest.mark.parametrize("what", ["together", "alone"])
@pytest.mark.parametrize(
    "act, timeout_s", [("ends", 300), ("hangs", 0.5), ("says half", 300)]
)
def test_who_ends_the_process_fails_and_gives_its_turn_back(
    process, tmp_path, what, act, timeout_s
):
    log = process(lambda now, job: act if (now, job) == (what, JOBS[1]) else None)
    (first, failed, last), said = _measure(tmp_path, timeout_s)
    assert first.times["training"].keys() == {NAMES[0]}
    assert last.times["training"].keys() == {NAMES[2]}
    assert failed == Entry(failures={NAMES[1]: "ended the process that ran it"})
    assert said == [f"{SITE}: {NAMES[1]} ended the process that ran it"]
    assert log.count("started") == 2
    with gpu_turn(tmp_path, "alone"):
        pass


def test_a_wait_for_a_turn_is_no_silence(process, tmp_path):
    process(lambda what, job: None)
    turn = _Thread(gpu_turn(tmp_path, "alone"))
    assert turn.has()
    threading.Timer(1.5, turn.end).start()
    entries, said = _measure(tmp_path, timeout_s=0.5)
    assert not said and all(entry.times for entry in entries)


def test_the_budget_ends_what_is_under_way(process):
    process(lambda what, job: "hangs")
    assert list(measure_all(JOBS, 2, lambda line: None, seconds=0.3)) == []


def test_turns_that_are_over_end_what_is_under_way(process):
    process(lambda what, job: "hangs")
    turns = Turns()
    threading.Timer(0.3, turns.are_over.set).start()
    with pytest.raises(Over):
        list(measure_all(JOBS, 2, lambda line: None, turns=turns))


def test_one_takes_times_while_nobody_compiles(process):
    log = process(lambda what, job: None)
    jobs = [JOBS[0]._replace(rows=i) for i in range(6)]
    done = list(measure_all(jobs, 3, lambda line: None))
    assert sorted(job.rows for job, _ in done) == list(range(6))
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
    wide = JOBS[0]._replace(spec=SiteSpec(8192, 4096, 4096))
    assert pool.fitting(22, [JOBS[0], wide]) == expected
    assert pool.fitting(22, []) == 22


def test_a_worker_says_when_it_waits_answers_and_ends_with_its_parent(
    monkeypatch, tmp_path
):
    entry = Entry({"training": {NAMES[1]: 2.0}})

    def measure_site(job, turn):
        with turn("together"):
            pass
        with turn("alone"):
            return entry

    monkeypatch.setattr(pool, "measure_site", measure_site)
    ours, its = multiprocessing.Pipe()
    ours.send(JOBS[0])
    how = os.dup(its.fileno()), str(tmp_path)
    thread = threading.Thread(target=pool.serve, args=how)
    its.close()
    thread.start()
    assert [ours.recv() for _ in range(5)] == [*["waits", "has"] * 2, entry]
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


def test_who_waits_to_be_alone_goes_before_who_begins_together(tmp_path):
    def take(kind):
        return _Thread(gpu_turn(tmp_path, kind))

    first, second = take("together"), take("together")
    assert first.has() and second.has()
    ready = [take("alone"), take("alone")]
    assert all(one.waits() for one in ready)
    late = take("together")
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


def test_an_exception_ends_a_turn(tmp_path):
    for kind in ("alone", "together"):
        with pytest.raises(KeyError), gpu_turn(tmp_path, kind):
            raise KeyError
        for other in ("together", "alone"):
            with gpu_turn(tmp_path, other):
                pass
