"""Worker processes: those that end do not end what others measure."""

import json
import sys

import jax
import pytest

from loka_jax.choice import Choice
from loka_jax.dispatch.candidates import SiteKey
from loka_jax.probe.site import ProbeConfig, no_stats
from loka_jax.tuning.pool import Worker
from loka_jax.tuning.site import Job
from loka_jax.tuning.worker import from_line, save_stats, to_line

SITE = SiteKey(64, 32, 16)
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise")
JOB = Job(
    SITE, tuple(map(Choice.parse, NAMES)), None, "model", pairs=2, rows=16, seed=0
)
# Speaks as a worker does, without measuring: 1 us for every choice, in turn.
_FAKE = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    times = {}
    for name in job["choices"]:
        if ACTS_UP: ACT
        print(json.dumps({"begin": name}), flush=True)
        if name == BAD: ACT
        times[name] = 1.0
    site = dict(job["site"])
    entry = {"site": site, "times": {"training": times}, "errors": {}, "failures": {}}
    header = dict.fromkeys(("device_kind", "jax", "jaxlib", "kernels"), "")
    table = {"schema": 1, "header": header, "sites": [entry]}
    print(json.dumps({"result": table}), flush=True)
"""


def _fake(*, bad="", act="os._exit(11)", acts_up="False") -> tuple[str, ...]:
    text = _FAKE.replace("BAD", repr(bad)).replace("ACTS_UP", acts_up)
    return (sys.executable, "-c", text.replace("ACT", act))


def _measure(tmp_path, command, timeout_s=20.0):
    lock, said = tmp_path / "lock", []
    lock.touch()
    with Worker(said.append, lock, command=command, timeout_s=timeout_s) as worker:
        return worker.measure(JOB), said


def test_a_worker_answers(tmp_path):
    entry, said = _measure(tmp_path, _fake())
    assert set(entry.times["training"]) == set(NAMES) and said == []


@pytest.mark.parametrize(
    "act", ["os._exit(11)", "os.kill(os.getpid(), 9)", "__import__('time').sleep(60)"]
)
def test_who_ends_the_process_is_left_out(tmp_path, act):
    entry, said = _measure(tmp_path, _fake(bad=NAMES[1], act=act), timeout_s=3.0)
    assert set(entry.times["training"]) == {NAMES[0], NAMES[2]}
    assert "ended the process" in entry.failures[NAMES[1]]
    assert len(said) == 1 and NAMES[1] in said[0]


def test_whom_compilation_ends_is_found_one_by_one(tmp_path):
    # Dies without a word unless it is asked for one after another.
    command = _fake(acts_up="not job['is_serial']")
    entry, _ = _measure(tmp_path, command)
    assert set(entry.times["training"]) == set(NAMES)


def test_a_worker_that_never_works_is_given_up(tmp_path):
    entry, said = _measure(tmp_path, _fake(acts_up="True"))
    assert entry.times == {} and set(entry.failures) == set(NAMES)
    assert len(said) == 1


def test_a_job_is_a_line(tmp_path):
    empty = no_stats(32, 16, ProbeConfig())
    leaves, tree = jax.tree.flatten(empty)
    stats = tree.unflatten([leaf + i for i, leaf in enumerate(leaves)])
    path = tmp_path / "stats.npz"
    save_stats(path, stats)
    line = to_line(JOB._replace(stats=stats), path, tmp_path)
    assert json.loads(line) and line.endswith("\n")
    job, lock = from_line(line)
    assert lock == tmp_path and job._replace(stats=None) == JOB
    for old, new in zip(
        jax.tree.leaves(stats), jax.tree.leaves(job.stats), strict=True
    ):
        assert (old == new).all()
