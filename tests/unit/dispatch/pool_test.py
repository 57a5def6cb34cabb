"""Workers that end do not end what others measure, and take their turns."""

import collections
import functools
import io
import json
import subprocess
import sys
import threading
import time

import chex
import jax
import numpy as np
import pytest

from loka_jax.dispatch import pool, worker
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import Worker, measure_all
from loka_jax.dispatch.table import Entry, Table, to_json
from loka_jax.dispatch.turns import Turns
from loka_jax.dispatch.worker import from_line, save_stats, to_line
from loka_jax.probe.site import ProbeConfig, empty_stats
from loka_jax.site import Choice, SiteSpec

SITE = SiteSpec(64, 32, 16)
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise")
JOB = Job(SITE, tuple(map(Choice.parse, NAMES)), None, "model", pairs=2, rows=16)


RESULT = to_json(Table(Header(*[""] * 5), {SITE: Entry({"training": {}})}))
# Speaks as a worker does, 1 us for every choice, and writes what it does into a file.
PROCESS = """
import json, sys, time

def note(*lines):
    with open({log!r}, "a") as file:
        file.writelines(line + "\\n" for line in lines)

def say(text, end="\\n"):
    print(text, end=end, flush=True)

def act(what, job):
    act = {act}
    if act == "hangs":
        time.sleep(1e6)
    if act == "says half":
        say('{{"result": {{"sche', end="")
    if act:
        sys.exit()

def turn(kind):
    say(json.dumps({{kind: True}}))
    if sys.stdin.readline() != "go\\n":
        sys.exit()

note("started")
while line := sys.stdin.readline():
    job = json.loads(line)
    turn("together")
    act("together", job)
    note("+compile")
    for name in job["choices"]:
        say(json.dumps({{"begin": name}}))
        act(name, job)
    note("-compile")
    turn("apart")
    turn("alone")
    act("alone", job)
    note("+time", "-time")
    turn("apart")
    result = {result}
    result["sites"][0]["times"]["training"] = dict.fromkeys(job["choices"], 1.0)
    say(json.dumps({{"result": result}}))
"""


@pytest.fixture
def process(monkeypatch, tmp_path):
    """Makes workers act as an expression says; returns how to read what they wrote."""
    log, popen = tmp_path / "log", subprocess.Popen

    def process(act):
        script = PROCESS.format(act=act, log=str(log), result=RESULT)
        command = [sys.executable, "-ISc", script]
        start = functools.partial(popen, command)
        monkeypatch.setattr(
            pool.subprocess, "Popen", lambda _, **options: start(**options)
        )
        return lambda: log.read_text().splitlines()

    return process


def _measure(timeout_s=300, turns=None):
    said = []
    with Worker(said.append, turns or Turns(), timeout_s=timeout_s) as one:
        return one.measure(JOB), said


@pytest.mark.parametrize(
    "act, timeout_s", [("ends", 300), ("hangs", 5), ("says half", 300)]
)
def test_who_ends_the_process_is_left_out(process, act, timeout_s):
    log = process(f"{act!r} if what == {NAMES[1]!r} else None")
    entry, said = _measure(timeout_s)
    assert set(entry.times["training"]) == {NAMES[0], NAMES[2]}
    assert entry.failures == {NAMES[1]: "ended the process that ran it"}
    assert said == [f"{SITE}: {NAMES[1]} ended the process that ran it"]
    assert log().count("started") == 2


def test_whom_compilation_ends_is_found_one_by_one(process):
    process("None if job['is_serial'] else 'ends'")
    entry, said = _measure()
    assert (set(entry.times["training"]), said) == (set(NAMES), [])


def test_who_ends_alone_gives_its_turn_back(process):
    process("'ends' if what == 'alone' else None")
    turns = Turns()
    assert _measure(turns=turns)[0].times == {}
    with turns.alone():
        pass


def test_the_budget_ends_what_is_under_way(process):
    process("'hangs'")
    assert list(measure_all([JOB] * 3, 2, lambda line: None, seconds=0.3)) == []


def test_one_takes_times_while_nobody_compiles(process):
    log, jobs = process("None"), [JOB._replace(seed=i) for i in range(6)]
    done = list(measure_all(jobs, 3, lambda line: None))
    assert sorted(job.seed for job, _ in done) == list(range(6))
    now = collections.Counter()
    for line in log():
        now[line[1:]] += {"+": 1, "-": -1}.get(line[0], 0)
        assert not now["time"] or not now["compile"]
        assert now["time"] <= 1
    assert log().count("started") == 3 and log().count("+time") == 6 and not +now


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


def test_a_job_is_a_line(tmp_path):
    shapes = jax.eval_shape(lambda: empty_stats(32, 16, ProbeConfig()))
    values = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    options = {"seed": 5, "is_serial": True, "passes": ("training",)}
    job = JOB._replace(**options, in_chain=False, is_judged=False)
    path = tmp_path / "stats.npz"
    save_stats(path, values)
    line = to_line(job._replace(stats=values), path)
    assert json.loads(line) and line.endswith("\n")
    found = from_line(line)
    assert found._replace(stats=None) == job == from_line(to_line(job, None))
    chex.assert_trees_all_equal(found.stats, values)


def test_a_worker_process_asks_for_its_turns_and_answers(monkeypatch):
    """What a process of `worker.main` says, its input being ready."""
    answers, redirected = io.StringIO(), []
    monkeypatch.setattr(worker.os, "dup", lambda fd: fd)
    monkeypatch.setattr(worker.os, "fdopen", lambda fd, *args, **kwargs: answers)
    monkeypatch.setattr(worker.os, "dup2", lambda *fds: redirected.append(fds))

    def measure_site(job, begin, gpu):
        with gpu.together():
            begin(NAMES[1])
        with gpu.alone():
            return Entry({"training": {NAMES[1]: 2.0}})

    lines = io.StringIO(to_line(JOB, None) + "go\n" * 4)
    monkeypatch.setattr(worker, "measure_site", measure_site)
    monkeypatch.setattr(worker.sys, "stdin", lines)
    worker.main()
    *said, last = map(json.loads, answers.getvalue().splitlines())
    assert [*map(list, said)] == [
        [x] for x in "together begin apart alone apart".split()
    ]
    assert said[1] == {"begin": NAMES[1]} and redirected == [(2, 1)]
    table = tables.from_json(last["result"])
    assert table.sites == {SITE: Entry({"training": {NAMES[1]: 2.0}})}


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
