"""The process in which candidates run, so that a crash costs one candidate only.

Reads jobs as lines of JSON from its input, and answers in lines on its output: which
candidate begins, then the measurements. Before it uses the GPU it asks for a turn, to
compile together with others or to run alone, and afterwards gives it back; each time it
waits for a line of input. All other output goes to the error output.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.measuring import GpuUse, Job, measure_site
from loka_jax.dispatch.table import Table
from loka_jax.probe.site import ProbeConfig, SiteStats, empty_stats
from loka_jax.site import Choice, SiteSpec

BEGIN, RESULT = "begin", "result"
ALONE, TOGETHER, APART = "alone", "together", "apart"
GO = "go\n"  # the answer to each


def to_line(job: Job, stats: pathlib.Path | None) -> str:
    """Returns a job as a line."""
    value = job._asdict() | {
        "spec": dataclasses.asdict(job.spec),
        "choices": [choice.name for choice in job.choices],
        "stats": None if stats is None else str(stats),
    }
    return json.dumps(value) + "\n"


def from_line(line: str) -> Job:
    """Returns the job that `to_line` wrote."""
    value: dict[str, Any] = json.loads(line)
    spec = SiteSpec(**value["spec"])
    stats = value["stats"]
    return Job(
        **value
        | {
            "spec": spec,
            "choices": tuple(map(Choice.parse, value["choices"])),
            "passes": tuple(value["passes"]),
            "stats": None if stats is None else load_stats(pathlib.Path(stats), spec),
        }
    )


def save_stats(path: pathlib.Path, stats: SiteStats):
    """Writes the statistics of a site."""
    leaves = jax.tree.leaves(jax.device_get(stats))
    np.savez(path, *leaves)


def load_stats(path: pathlib.Path, spec: SiteSpec) -> SiteStats:
    """Returns the statistics that `save_stats` wrote, of a site of these sizes."""
    like = jax.eval_shape(lambda: empty_stats(spec.k, spec.n, ProbeConfig()))
    with np.load(path) as file:
        leaves = [file[name] for name in file.files]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def main():
    """Measures jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output goes to the error output

    def say(kind: str, value: Any):
        answers.write(json.dumps({kind: value}) + "\n")

    def wait_for(turn: str):
        say(turn, True)
        if not sys.stdin.readline():
            sys.exit("the parent process ended")

    @contextlib.contextmanager
    def turn(kind: str) -> Iterator[None]:
        wait_for(kind)
        try:
            yield
        finally:
            wait_for(APART)

    gpu = GpuUse(*(functools.partial(turn, kind) for kind in (TOGETHER, ALONE)))
    while line := sys.stdin.readline():
        job = from_line(line)
        entry = measure_site(job, lambda name: say(BEGIN, name), gpu)
        table = Table(Header("", "", "", "", ""), {job.spec: entry})
        say(RESULT, tables.to_json(table))
