"""Damages every JSON file that the library reads, in hundreds of ways.

A file is read as a command reads it. That must succeed or raise an error that the
reader declares, of one sentence; in less than a minute, with less than 2 GB of memory.
A seed says what is damaged: `pytest -m '' tests/drills -k "plan-17"` repeats one case.
"""

import copy
import dataclasses
import functools
import hashlib
import io
import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments.configs import get_config
from loka_jax import jsonfile, nn, saved_format
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.recipe import ROLES
from loka_jax.report import RunFiles, charts, write_run_page
from loka_jax.site import BF16
from loka_jax.train.checkpoints import manifest
from loka_jax.train.folder.record import RunRecord, read_run
from loka_jax.train.logs.progress import print_plan
from loka_jax.train.planning import choose_plan
from tests.support import train as support
from tests.unit.report.run_page_test import RUN, SITES, SUMMARY

MAX_BYTES, MAX_SECONDS = 2 << 30, 60
ROW = "xla fp8_rowwise"

# Texts that stand for what json.dumps does not write: not JSON at all, or too much.
_WRITTEN = {
    "@digits@": "9" * 5000,
    "@deep@": "[" * 200 + "]" * 200,
    "@very deep@": "[" * 100_000 + "]" * 100_000,
    "@huge@": "1e400",
}
STRANGE = [
    *(None, True, False, 0, -1, 0.5, 10**400, 2**63, 1e308, 5e-324),
    *(float("nan"), float("-inf"), "", "text", "[/b] \x1b[2J", "\ud800", "x" * 20_000),
    *([], [[]], [None], {}, {"": None}, {"a": {"b": []}}, *_WRITTEN),
]


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        make: writes a valid file into an empty folder, and returns its path.
        read: reads it as a command does, and returns what it found.
        found: what it finds in the file as `make` wrote it.
        declared: the errors that it may raise.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    found: Any
    declared: tuple[type[Exception], ...] = (ValueError,)


@functools.cache
def sites() -> tuple[nn.Site, ...]:
    model = get_config("fp8_dlrm").model
    shapes = ((256, 13), (256, 26, 16))
    return nn.list_sites(model, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def make_table(folder: Path) -> Path:
    measures = {name: Interval(0.03, 0.02, 0.04) for name in MEASURES}
    errors = {role: {"fp8_rowwise": measures} for role in ROLES}
    entry = Entry(
        {"training": {BF16.name: 2.0, ROW: 1.0}, "inference": {BF16.name: 1.0}},
        {f"fp8_dlrm {site.path}": errors for site in sites()},
        {"pallas bf16": "does not run: [no Hopper GPU]"},
        {"fp8_dlrm top_mlp/dense_0": Interval(1e-4, -1e-5, 2e-4)},
        {BF16.name: "0123456789abcdef"},
        {"another site": "it raises the loss [by far]"},
    )
    known = {table_key(site.spec): entry for site in sites()}
    tables.write(folder / "table.json", Table(header_here(), known))
    return folder / "table.json"


def make_plan(folder: Path) -> Path:
    table = tables.read(make_table(folder))
    performance = PerformanceModel(table)
    plan = plans.make_plan(sites(), performance, config="fp8_dlrm")
    plans.save(folder / "plan.json", plan)
    return folder / "plan.json"


def follow(path: Path) -> list[str]:
    """Returns the names of the choices in the plan that a run follows."""
    config = dataclasses.replace(support.config(), name="fp8_dlrm", plan=str(path))
    chosen = choose_plan(config, sites(), 20)
    print_plan(Console(file=io.StringIO()), chosen.plan, chosen.notes)
    return [choice.name for _, choice in chosen.plan.choices]


SAVED_CONFIG = {saved_format.KEY: saved_format.RUN, **support.config().identity()}
CONTENT = {"step": 3, "leaves": {}, "meta": {"config": {"seed": 0}}}


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
    jsonfile.write(folder / "summary.json", SUMMARY)
    jsonfile.write(folder / "config.json", SAVED_CONFIG)
    jsonfile.write(folder / "sites.json", SITES)
    jsonfile.write(folder / "evaluation.json", RUN.evaluation)
    for file, lines in (
        ("metrics.jsonl", [*RUN.train, *RUN.evals]),
        ("scales.jsonl", RUN.scales),
    ):
        text = "".join(jsonfile.dumps(line) + "\n" for line in lines)
        (folder / file).write_text(text)
    return folder / name


def report(path: Path) -> RunFiles:
    """Writes the page of a run, and returns the run."""
    run = read_run(path.parent)
    write_run_page(path.parent / "report.html", run)
    return run


def resume(path: Path) -> Any:
    """Returns the config of a run that may be resumed."""
    RunRecord(path.parent, config=support.config().identity(), resume=True).close()
    return jsonfile.read(path)


def truncate(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run that is resumed at step 10."""
    identity = support.config().identity()
    with RunRecord(path.parent, config=identity, resume=True) as record:
        record.truncate(10)
    return jsonfile.read_lines(path)


def _run_file(name: str, read: Callable[[Path], Any], found: Any) -> Kind:
    return Kind(functools.partial(make_run, name=name), read, found)


KINDS = {
    "table": Kind(make_table, follow, [BF16.name, ROW, ROW, ROW]),
    "plan": Kind(make_plan, follow, [BF16.name, ROW, ROW, ROW]),
    "manifest": Kind(
        make_manifest,
        lambda path: manifest.verify(path.parent),
        CONTENT,
        (manifest.Damaged, ValueError),
    ),
    "forged": Kind(make_manifest, read_forged, CONTENT, (manifest.Damaged, ValueError)),
    "config": _run_file("config.json", resume, SAVED_CONFIG),
    "summary": _run_file("summary.json", report, RUN),
    "sites": _run_file("sites.json", report, RUN),
    "evaluation": _run_file("evaluation.json", report, RUN),
    "metrics": _run_file("metrics.jsonl", report, RUN),
    "scales": _run_file("scales.jsonl", report, RUN),
    "resumed lines": _run_file(
        "metrics.jsonl",
        truncate,
        [line for line in (*RUN.train, *RUN.evals) if line["step"] <= 10],
    ),
}


def damaged(path: Path, draw: random.Random) -> bytes:
    """Returns the content of a file with a few random changes."""
    content = path.read_bytes()
    if draw.random() < 0.3:
        return draw.choice([_flipped, _cut, _overwritten])(content, draw)
    if path.suffix == ".jsonl":
        lines = content.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        lines[at] = _changed(lines[at], draw) + b"\n"
        return b"".join(lines)
    return _changed(content, draw)


def _flipped(content: bytes, draw: random.Random) -> bytes:
    flipped = bytearray(content)
    for _ in range(draw.choice([1, 1, 8, 64])):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _overwritten(content: bytes, draw: random.Random) -> bytes:
    """Returns the content with zeros, noise, or a part of itself at a random place."""
    at, size = draw.randrange(len(content)), draw.randrange(1, 200)
    part = draw.choice([bytes(size), draw.randbytes(size), content[:size]])
    return content[:at] + part + content[at + draw.choice([0, size]) :]


def _changed(content: bytes, draw: random.Random) -> bytes:
    """Returns JSON in which up to three fields are others, lost, or there twice."""
    value = {"": json.loads(content)}
    for _ in range(draw.choice([1, 1, 2, 3])):
        at, name = draw.choice(list(_places(value)))
        way = draw.choice(["other", "other", "lost", "twice", "moved"])
        if way == "other":
            at[name] = copy.deepcopy(draw.choice(STRANGE))
        elif way == "moved":
            other, there = draw.choice(list(_places(value)))
            at[name] = copy.deepcopy(other[there])
        elif way == "twice" and isinstance(at, dict):
            at[f"@twice@{name}"] = copy.deepcopy(draw.choice(STRANGE))
        elif len(value) > 1 or at is not value:
            del at[name]
    text = json.dumps(value.get("")).replace("@twice@", "")
    for name, written in _WRITTEN.items():
        text = text.replace(json.dumps(name), written)
    return text.encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container in a value with each of its names or indices."""
    if not isinstance(value, dict | list):
        return
    for name in value if isinstance(value, dict) else range(len(value)):
        yield value, name
        yield from _places(value[name])


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def assert_ends_well(kind: Kind, path: Path) -> None:
    """Asserts that a file is read, or refused as declared, in time and memory."""
    began, peak = time.process_time(), max(_peak_bytes(), _resident_bytes() + MAX_BYTES)
    try:
        kind.read(path)
    except kind.declared as error:
        text = str(error)
        assert str(path.parent) in text and len(text) < 3000, text
        assert type(error) is not ValueError or text.endswith((".", "?")), text
    assert time.process_time() - began < MAX_SECONDS  # of the CPU, which may be shared
    assert _peak_bytes() <= peak


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Leaves curves out of the pages: drawing takes most of the time."""
    monkeypatch.setattr(charts, "can_draw", lambda: False)


def drills(*values):
    """Returns parameters that only the long drill runs."""
    return [pytest.param(value, marks=pytest.mark.drill) for value in values]


@pytest.mark.parametrize("kind", KINDS)
def test_an_intact_file_is_read(kind, tmp_path):
    path = KINDS[kind].make(tmp_path)
    assert KINDS[kind].read(path) == KINDS[kind].found


@pytest.mark.parametrize("seed", [*range(16), *drills(*range(16, 80))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(kind, seed, tmp_path):
    path = KINDS[kind].make(tmp_path)
    path.write_bytes(damaged(path, random.Random(f"{kind} {seed}")))
    assert_ends_well(KINDS[kind], path)


# Above the limit, below it, and far above it.
@pytest.mark.parametrize("mebibytes", [20, *drills(10, 200)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_brackets_takes_little_memory(kind, mebibytes, tmp_path):
    path = KINDS[kind].make(tmp_path)
    lists = b"[" + b"[]," * ((mebibytes << 20) // 3) + b"[]]"
    path.write_bytes(b'{"manifest": ' + lists + b"}\n")
    assert_ends_well(KINDS[kind], path)
