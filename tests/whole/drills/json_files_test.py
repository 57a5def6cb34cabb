"""Damages every JSON file that the library reads, in hundreds of ways.

A file is read as a command reads it. That must succeed or raise an error that the
reader declares, of one sentence; in less than a minute, with less than 2 GB of memory.
A seed says what is damaged.
"""

import dataclasses
import functools
import hashlib
import io
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loka_jax import jsonfile, nn, saved_format
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.printing import print_plan
from loka_jax.measure.intervals import Interval
from loka_jax.report import charts
from loka_jax.report.run_files import RunFiles
from loka_jax.report.run_page import write_run_page
from loka_jax.site import BF16
from loka_jax.train import build as build_lib
from loka_jax.train.checkpoints import manifest
from loka_jax.train.folder.record import RunRecord, read_run
from loka_jax.train.planning import choose_plan
from tests.drills.damage import changed_json, mutated
from tests.support import drills
from tests.support import train as support
from tests.support.report import RUN, SITES, SUMMARY

MAX_BYTES, MAX_SECONDS = 2 << 30, 60


@functools.cache
def run() -> build_lib.Run:
    return build_lib.build(support.config())


def sites() -> tuple[nn.Site, ...]:
    return run().sites


def make_table(folder: Path) -> Path:
    """Writes a table in which every field of an entry has a value."""
    path = support.write_table(folder / "table.json")
    more = {
        "failures": {"pallas bf16": "does not run: [no Hopper GPU]"},
        "effects": {"small top_mlp/dense_0": Interval(1e-4, -1e-5, 2e-4)},
        "refused": {"another site": "it raises the loss [by far]"},
    }
    table = tables.read(path)
    for spec, entry in table.sites.items():
        times = entry.times | {"inference": {BF16.name: 1.0}}
        table.sites[spec] = dataclasses.replace(entry, times=times, **more)
    tables.write(path, table)
    return path


def make_plan(folder: Path) -> Path:
    performance = PerformanceModel.of(tables.read(make_table(folder)))
    plan = plans.make_plan(sites(), performance, config=run().source)
    plans.save(folder / "plan.json", plan)
    return folder / "plan.json"


def follow(path: Path) -> list[str]:
    """Returns the names of the choices in the plan that a run follows."""
    config = dataclasses.replace(support.config(), plan=str(path))
    chosen = choose_plan(config, sites(), 20, source=run().source)
    print_plan(Console(file=io.StringIO()), chosen.plan, chosen.notes, ())
    return [choice.name for _, choice in chosen.plan.choices]


SAVED_CONFIG = {saved_format.KEY: saved_format.RUN, **support.config().identity()}
CONTENT = manifest.Saved(3, {"config": {"seed": 0}}, {})


def make_manifest(folder: Path) -> Path:
    (folder / "arrays").mkdir()
    (folder / "arrays" / "a").write_bytes(b"0123")
    manifest.write(folder, CONTENT)
    return folder / manifest.NAME


def read_forged(path: Path) -> Any:
    """Gives a manifest the digest of its content, as a forger would."""
    try:
        forged = jsonfile.as_dict(jsonfile.read(path)).get("manifest")
    except ValueError:
        return None
    digest = hashlib.sha256(jsonfile.dumps(forged).encode()).hexdigest()
    path.write_text(json.dumps({"manifest": forged, "sha256": digest}))
    return manifest.verify(path.parent)


def make_run(folder: Path, name: str) -> Path:
    files = {"summary": SUMMARY, "config": SAVED_CONFIG, "sites": SITES}
    files |= {"evaluation": RUN.evaluation, "importance": RUN.importance}
    for file, content in files.items():
        jsonfile.write(folder / f"{file}.json", content)
    logs = {"metrics": [*RUN.train, *RUN.evals], "scales": RUN.scales}
    for log, lines in logs.items():
        text = "".join(jsonfile.dumps(line) + "\n" for line in lines)
        (folder / f"{log}.jsonl").write_text(text)
    return folder / name


def report(path: Path) -> RunFiles:
    """Writes the page of a run, and returns the run."""
    run = read_run(path.parent)
    write_run_page(path.parent / "report.html", run)
    return run


def resume(path: Path, step: int | None = None) -> Any:
    """Returns the config, or the lines, of a run that is resumed at a step."""
    identity = support.config().identity()
    with RunRecord(path.parent, config=identity, resume=True) as record:
        if step is None:
            return jsonfile.read(path)
        record.truncate(step)
    return jsonfile.read_lines(path)


def of_a_run(name: str, read: Callable, found: Any) -> tuple:
    return functools.partial(make_run, name=name), read, found


CHOSEN = [BF16.name, support.ROW, support.ROW]
UNTIL_10 = [line for line in (*RUN.train, *RUN.evals) if line["step"] <= 10]
REPORTED = "summary.json", "sites.json", "evaluation.json", "metrics.jsonl"
OPTIONAL = "scales.jsonl", "importance.json"
# How a kind is made in an empty folder, read as by a command, and what is found then.
KINDS = {
    "table": (make_table, follow, CHOSEN),
    "plan": (make_plan, follow, CHOSEN),
    "manifest": (make_manifest, lambda path: manifest.verify(path.parent), CONTENT),
    "forged": (make_manifest, read_forged, CONTENT),
    "config": of_a_run("config.json", resume, SAVED_CONFIG),
    "resumed lines": of_a_run("metrics.jsonl", lambda path: resume(path, 10), UNTIL_10),
    **{x: of_a_run(x, report, RUN) for x in (*REPORTED, *OPTIONAL)},
}


def damaged(path: Path, draw: random.Random) -> bytes:
    """Returns the content of a file with a few random changes."""
    content = path.read_bytes()
    if draw.random() < 0.3:
        return mutated(content, draw)
    if path.suffix != ".jsonl":
        return changed_json(content, draw)
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    lines[at] = changed_json(lines[at], draw) + b"\n"
    return b"".join(lines)


def assert_ends_well(read: Callable, path: Path) -> None:
    """Asserts that a file is read, or refused as declared, in time and memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = max(usage.ru_maxrss << 10, pages * resource.getpagesize() + MAX_BYTES)
    began = time.process_time()  # of the CPU, which may be shared
    try:
        read(path)
    except (manifest.Damaged, ValueError) as error:
        text = str(error)
        assert str(path.parent) in text and len(text) < 3000, text
        assert type(error) is not ValueError or text.endswith((".", "?")), text
    assert time.process_time() - began < MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 <= peak


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Leaves curves out of the pages: drawing takes most of the time."""
    monkeypatch.setattr(charts, "can_draw", lambda: False)


@pytest.mark.parametrize(("make", "read", "found"), KINDS.values(), ids=KINDS)
def test_an_intact_file_is_read(make, read, found, tmp_path):
    assert read(make(tmp_path)) == found


@pytest.mark.parametrize("seed", [*range(16), *drills(range(16, 80))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(kind, seed, tmp_path):
    make, read, _ = KINDS[kind]
    path = make(tmp_path)
    path.write_bytes(damaged(path, random.Random(f"{kind} {seed}")))
    assert_ends_well(read, path)


# Above the limit, below it, and far above it.
@pytest.mark.parametrize("mebibytes", [20, *drills([10, 200])])
@pytest.mark.parametrize(("make", "read", "_"), KINDS.values(), ids=KINDS)
def test_a_file_of_brackets_takes_little_memory(make, read, _, mebibytes, tmp_path):
    path = make(tmp_path)
    lists = b"[" + b"[]," * ((mebibytes << 20) // 3) + b"[]]"
    path.write_bytes(b'{"manifest": ' + lists + b"}\n")
    assert_ends_well(read, path)
