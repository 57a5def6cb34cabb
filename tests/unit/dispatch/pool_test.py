"""Worker processes: those that end do not end what others measure."""

import functools
import json
import sys
import threading
import time

import jax
import pytest

from loka_jax.dispatch import pool
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import Worker, measure_all, measure_on_demand
from loka_jax.dispatch.turns import Turns
from loka_jax.dispatch.worker import from_line, save_stats, to_line
from loka_jax.probe.site import ProbeConfig, empty_stats
from loka_jax.site import Choice, SiteSpec

SITE = SiteSpec(64, 32, 16)
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise")
JOB = Job(
    SITE, tuple(map(Choice.parse, NAMES)), None, "model", pairs=2, rows=16, seed=0
)
# Speaks as a worker does, without measuring: 1 us for every choice, in turn. Notes when
# it compiles and when it times.
_FAKE = """
import json, os, sys, time
log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(what):
    os.write(log, (what + "\\n").encode())
def turn(name):
    print(json.dumps({name: True}), flush=True)
    assert sys.stdin.readline() == "go\\n"
while line := sys.stdin.readline():
    job = json.loads(line)
    times = {}
    turn("together")
    note("begins to compile")
    for name in job["choices"]:
        if ACTS_UP: ACT
        print(json.dumps({"begin": name}), flush=True)
        if name == BAD: ACT
        times[name] = 1.0
    for _ in range(2):
        note("ends to compile")
        turn("apart")
        turn("alone")
        note("begins to time")
        if ALONE_ACTS_UP: ACT
        note("ends to time")
        turn("apart")
        turn("together")
        note("begins to compile")
    note("ends to compile")
    turn("apart")
    del job["spec"]["fp8_in"], job["spec"]["out"]
    site = job["spec"]
    entry = dict.fromkeys(("errors", "failures", "effects", "programs"), {})
    entry |= {"site": site, "times": {"training": times}}
    names = ("device_kind", "jax", "jaxlib", "triton", "kernels")
    header = dict.fromkeys(names, "")
    table = {"schema": 3, "header": header, "roofline": None, "sites": [entry]}
    print(json.dumps({"result": table}), flush=True)
"""


def _fake(
    *,
    bad="",
    act="os._exit(11)",
    acts_up="False",
    alone_acts_up="False",
    log="/dev/null",
) -> tuple[str, ...]:
    text = _FAKE.replace("BAD", repr(bad)).replace("ALONE_ACTS_UP", alone_acts_up)
    text = text.replace("ACTS_UP", acts_up).replace("LOG", repr(str(log)))
    return (sys.executable, "-c", text.replace("ACT", act))


def _measure(command, timeout_s=300.0, turns=None):
    said, turns = [], turns or Turns()
    with Worker(said.append, turns, command=command, timeout_s=timeout_s) as worker:
        return worker.measure(JOB), said


def test_a_worker_answers():
    entry, said = _measure(_fake())
    assert set(entry.times["training"]) == set(NAMES) and said == []


@pytest.mark.parametrize(
    "act, timeout_s",
    [
        ("os._exit(11)", 300.0),
        ("os.kill(os.getpid(), 9)", 300.0),
        ("time.sleep(3600)", 5.0),  # of which others need some for their start
        ("""(os.write(1, b'{"result": {"sche'), os._exit(9))""", 300.0),  # half said
    ],
)
def test_who_ends_the_process_is_left_out(act, timeout_s):
    entry, said = _measure(_fake(bad=NAMES[1], act=act), timeout_s)
    assert set(entry.times["training"]) == {NAMES[0], NAMES[2]}
    assert "ended the process" in entry.failures[NAMES[1]]
    assert len(said) == 1 and NAMES[1] in said[0]


def test_whom_compilation_ends_is_found_one_by_one():
    # Dies without a word unless it is asked for one after another.
    command = _fake(acts_up="not job['is_serial']")
    entry, _ = _measure(command)
    assert set(entry.times["training"]) == set(NAMES)


def test_a_worker_that_never_works_is_given_up():
    entry, said = _measure(_fake(acts_up="True"))
    assert entry.times == {} and set(entry.failures) == set(NAMES)
    assert len(said) == 1


def test_one_takes_times_while_nobody_compiles(tmp_path, monkeypatch):
    log = tmp_path / "log"
    command = _fake(log=log)
    monkeypatch.setattr(pool, "Worker", functools.partial(Worker, command=command))
    jobs = [JOB._replace(seed=i) for i in range(6)]
    done = list(measure_all(jobs, 3, lambda line: None))
    assert sorted(job.seed for job, _ in done) == list(range(6))
    now = {"compile": 0, "time": 0}
    for line in log.read_text().splitlines():
        verb, _, what = line.split()
        now[what] += 1 if verb == "begins" else -1
        assert now["time"] == 0 or now == {"compile": 0, "time": 1}
    assert now == {"compile": 0, "time": 0} and line == "ends to compile"


def test_what_is_measured_next_may_depend_on_what_was_before(monkeypatch):
    monkeypatch.setattr(pool, "Worker", functools.partial(Worker, command=_fake()))
    first, last = [JOB._replace(seed=i) for i in range(3)], [JOB._replace(seed=3)]
    done = []

    def next_job():
        if first:
            return first.pop()
        return last.pop() if last and len(done) == 3 else None

    for job, entry in measure_on_demand(next_job, 2, lambda line: None):
        assert set(entry.times["training"]) == set(NAMES)
        done.append(job.seed)
    assert sorted(done[:3]) == [0, 1, 2] and done[3:] == [3]


def test_the_budget_ends_what_is_under_way(monkeypatch):
    command = _fake(acts_up="True", act="time.sleep(3600)")
    monkeypatch.setattr(pool, "Worker", functools.partial(Worker, command=command))
    began = time.monotonic()
    assert list(measure_all([JOB] * 3, 2, lambda line: None, seconds=2.0)) == []
    assert time.monotonic() - began < 300


@pytest.mark.slow
@pytest.mark.parametrize("act", ["os._exit(11)", "time.sleep(3600)"])
def test_who_ends_alone_gives_its_turn_back(act):
    turns = Turns()
    command = _fake(alone_acts_up="True", act=act)
    entry, _ = _measure(command, timeout_s=1.0, turns=turns)
    assert entry.times == {}
    with turns.alone():
        pass
    with turns.together():
        pass


@pytest.mark.parametrize(
    "limit, held, expected",
    [
        (None, 0, 22),
        (75, None, 3),
        (75, 75, 3),
        (75, 10, 13),
        (750, 750, 22),
        (1, 1, 1),
    ],
)
def test_as_many_processes_run_as_the_memory_holds(monkeypatch, limit, held, expected):
    class Gpu:
        def memory_stats(self):
            sizes = {"bytes_limit": limit, "pool_bytes": held}
            return limit and {k: x * 1e9 for k, x in sizes.items() if x is not None}

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    wide = JOB._replace(spec=SiteSpec(8192, 4096, 4096))
    assert pool.fitting(22, [JOB, wide]) == expected


def test_waiting_for_a_turn_is_no_silence():
    turns, ended = Turns(), threading.Event()

    def times():
        with turns.alone():
            began.set()
            ended.wait()

    began, said = threading.Event(), []
    other = threading.Thread(target=times)
    with Worker(said.append, turns, command=_fake(), timeout_s=300.0) as worker:
        worker.measure(JOB)  # the process runs from here on, and answers at once
        worker._timeout_s = 3.0
        other.start()
        began.wait()
        threading.Timer(4.0, ended.set).start()
        entry = worker.measure(JOB)
    other.join()
    assert set(entry.times["training"]) == set(NAMES) and said == []


def test_an_end_from_outside_is_nobodys_fault(monkeypatch):
    said = []
    # The others may wait for their turn then.
    command = _fake(acts_up="job['seed'] > 1", act="time.sleep(3600)")
    monkeypatch.setattr(pool, "Worker", functools.partial(Worker, command=command))
    jobs = [JOB._replace(seed=i) for i in range(6)]
    measured = measure_all(jobs, 2, said.append)
    assert next(measured)[0].seed < 2
    began = time.monotonic()
    measured.close()  # as Ctrl-C does
    assert time.monotonic() - began < 300  # not when the workers are done
    assert not any("process" in line for line in said)


def test_a_job_is_a_line(tmp_path):
    empty = empty_stats(32, 16, ProbeConfig())
    leaves, tree = jax.tree.flatten(empty)
    stats = tree.unflatten([leaf + i for i, leaf in enumerate(leaves)])
    path = tmp_path / "stats.npz"
    save_stats(path, stats)
    line = to_line(JOB._replace(stats=stats), path)
    assert json.loads(line) and line.endswith("\n")
    job = from_line(line)
    assert job._replace(stats=None) == JOB
    for old, new in zip(
        jax.tree.leaves(stats), jax.tree.leaves(job.stats), strict=True
    ):
        assert (old == new).all()
