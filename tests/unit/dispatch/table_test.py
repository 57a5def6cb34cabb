"""The dispatch table: what is written is read, and nothing else is believed."""

import copy
import dataclasses
import json
import multiprocessing
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import Header, header_here
from loka_jax.dispatch.table import (
    BadTable,
    Entry,
    Table,
    from_json,
    read,
    to_json,
    write,
)
from loka_jax.measure.intervals import Interval
from loka_jax.site import SiteSpec
from tests.support import slow_except

HEADER = Header("NVIDIA H200", "0.11.2", "0.11.2", "0.3.1 3.9.0", "abc")
ERRORS = {name: Interval(0.03, 0.02, 0.04) for name in tables.MEASURES}
KEY = SiteSpec(4096, 256, 128, "layer", "swish", True)


def _table(key=KEY, name="xla bf16", time=10.0) -> Table:
    errors = {"fwd": {"fp8_rowwise": ERRORS}, "dlhs": {}, "drhs": {}}
    entry = Entry(
        {"training": {"xla bf16": 20.0, name: time}},
        {"fp8_dlrm top": errors},
        {"pallas fp8_rowwise": "does not run"},
        {"fp8_dlrm top": Interval(1e-4, -1e-5, 2e-4)},
        {"xla bf16": "0123456789abcdef"},
    )
    return Table(HEADER, {key: entry})


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "table.json"
    write(path, _table())
    assert read(path) == _table()


@pytest.mark.parametrize("field", ["device_kind", "jax", "jaxlib", "triton", "kernels"])
def test_a_table_of_elsewhere_says_so(field):
    other = dataclasses.replace(HEADER, **{field: "other"})
    assert HEADER.why_not(HEADER) is None
    assert HEADER.why_not(other)
    with pytest.raises(ValueError, match="cannot be merged"):
        _table().merged(Table(other))


def test_times_hold_where_triton_is_missing():
    missing = dataclasses.replace(HEADER, triton="")
    assert HEADER.why_not(missing) is missing.why_not(HEADER) is None
    assert Table(missing).merged(_table()).header == HEADER


def test_an_entry_knows_the_passes_of_its_candidates():
    entry = Entry({"training": {"xla bf16": 2.0}, "inference": {"xla bf16": 1.0}})
    assert entry.passes() == {"xla bf16": ["training", "inference"]}


def test_the_header_says_where_it_is():
    assert header_here().device_kind == "cpu"


def test_a_later_measurement_replaces_and_adds():
    other = SiteSpec(64, 64, 64)
    later = _table(time=12.0, name="pallas fp8_rowwise")
    both = _table().merged(later).merged(_table(key=other))
    assert set(both.sites) == {KEY, other}
    times = both.sites[KEY].times["training"]
    assert times == {"xla bf16": 20.0, "pallas fp8_rowwise": 12.0}


def test_what_runs_now_no_longer_fails():
    now = Table(HEADER, {KEY: Entry({"training": {"pallas fp8_rowwise": 3.0}})})
    assert _table().merged(now).sites[KEY].failures == {}


def _broken(change) -> dict:
    value = json.loads(json.dumps(to_json(_table())))
    change(value)
    return value


def _set(*path_and_value):
    *path, last, new = path_and_value

    def change(value):
        for name in path:
            value = value[name]
        value[last] = new

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("schema", 1),
        _set("header", "jax", 3),
        _set("sites", {}),
        _set("sites", 0, "site", "m", -1),
        _set("sites", 0, "site", "m", True),
        _set("sites", 0, "site", "norm", "batch"),
        _set("sites", 0, "site", "activation", "__import__('os')"),
        _set("sites", 0, "times", "training", "xla bf16", -3.0),
        _set("sites", 0, "times", "training", "xla bf16", "fast"),
        _set("sites", 0, "times", "training", "xla bf16", 10**400),
        _set("sites", 0, "times", "training", "xla bf16", True),
        _set("sites", 0, "times", "training", "xla bf16", None),
        _set("sites", 0, "times", "training", "xla bf16", 0),
        _set("sites", 0, "times", "training", None),
        _set("sites", 0, "site", "m", 10**400),
        _set("sites", 0, "site", "k", 2.0),
        _set("sites", 0, "site", "n", "64"),
        _set("sites", 0, "site", "norm", ["layer"]),
        _set("sites", 0, "site", "use_bias", 1),
        _set("sites", 0, "site", None),
        _set("sites", 0, "effects", "fp8_dlrm top", [1e-4, 2e-4, -1e-5]),  # inverted
        _set("sites", 0, "effects", "fp8_dlrm top", [3e-4, -1e-5, 2e-4]),  # outside
        _set("sites", 0, "effects", "fp8_dlrm top", [1e-4, 1e-4]),
        _set("sites", 0, "effects", "fp8_dlrm top", [None, None, None]),
        _set("sites", 0, "failures", "pallas fp8_rowwise", None),
        _set("sites", 0, "failures", "pallas fp8_rowwise", "x" * 10_001),
        _set("sites", 0, "programs", "xla bf16", None),
        _set("sites", 0, None),
        _set("header", None),
        _set("schema", "[/b]"),
        _set("sites", 0, "times", "training", "os.system bf16", 1.0),
        _set("sites", 0, "times", "training", "xla fp9", 1.0),
        _set("sites", 0, "times", "someday", {}),
        _set("sites", 0, "errors", "fp8_dlrm top", {"fwd": {}}),
        _set("sites", 0, "failures", []),
        _set("sites", 0, "programs", "xla bf16", "0123456789abcdeg"),
        _set("sites", 0, "programs", "xla fp9", "0123456789abcdef"),
        lambda value: value["sites"][0].pop("programs"),
        _set("more", 1),
        lambda value: value["sites"].append(copy.deepcopy(value["sites"][0])),
        lambda value: value.pop("header"),
    ],
)
def test_what_is_no_table_is_refused(change):
    with pytest.raises(ValueError) as refused:
        from_json(_broken(change))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"schema": NaN}',
        '{"schema": 2, "schema": 2}',
        "\x00",
        '{"schema": ' + "9" * 400 + "}",
        '{"schema": ' + "9" * 5000 + "}",
        '{"schema": 1e999}',
        json.dumps(to_json(_table()))[:-20],
    ],
    ids=["empty", "brace", "deep", "nan", "twice", "zero", "400 digits"]
    + ["5,000 digits", "infinity", "truncated"],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(BadTable, match="table.json"):
        read(path)


def test_a_missing_or_huge_file_is_refused(tmp_path):
    with pytest.raises(BadTable, match="cannot be read"):
        read(tmp_path / "nowhere.json")
    path = tmp_path / "huge.json"
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(BadTable, match="larger than"):
        read(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.data())
def test_no_change_of_a_table_does_more_than_be_refused(data):
    value = json.loads(json.dumps(to_json(_table())))
    at, place = value, None
    for _ in range(data.draw(st.integers(1, 6))):
        if isinstance(at, dict) and at:
            place = (at, data.draw(st.sampled_from(sorted(at))))
        elif isinstance(at, list) and at:
            place = (at, data.draw(st.integers(0, len(at) - 1)))
        else:
            break
        at = place[0][place[1]]
    assert place is not None
    place[0][place[1]] = data.draw(_JSON)
    try:
        found = from_json(value)
    except ValueError:
        return
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def test_a_table_that_could_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "table.json"
    write(path, _table())
    failures = {f"xla {name}": "x" * 999 for name in ("bf16", "fp8_rowwise")}
    many = {SiteSpec(64, 64, n): Entry(failures=failures) for n in range(1, 3000)}
    with pytest.raises(ValueError, match="would be larger than 4 MiB"):
        write(path, Table(HEADER, many))
    times = {"training": {"xla bf16": float("nan")}}
    with pytest.raises(ValueError):
        write(path, Table(HEADER, {KEY: Entry(times)}))
    assert read(path) == _table()


def _add_often(path, start, first):
    """Adds the measurements of 10 sites one by one, at the same time as others."""
    start.wait()
    for n in range(first, first + 10):
        tables.add(path, _table(key=SiteSpec(64, 64, n)))


def _threads():
    return threading, threading.Thread


def _processes():
    context = multiprocessing.get_context("spawn")
    return context, context.Process


@pytest.mark.parametrize("kind", slow_except([_threads, _processes], _threads))
def test_tuners_that_add_at_once_lose_nothing(kind, tmp_path):
    path = tmp_path / "table.json"
    module, worker = kind()
    start = module.Barrier(3)
    workers = [worker(target=_add_often, args=(path, start, n)) for n in (1, 101, 201)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    sizes = [n for first in (1, 101, 201) for n in range(first, first + 10)]
    assert sorted(key.n for key in read(path).sites) == sizes


def test_a_table_that_cannot_be_locked_is_refused(tmp_path):
    with pytest.raises(ValueError, match="table.json cannot be written, as .*lock"):
        tables.add(tmp_path / "nowhere" / "table.json", _table())


def test_a_table_of_elsewhere_is_not_added_to(tmp_path):
    path = tmp_path / "table.json"
    other = Table(dataclasses.replace(HEADER, jax="0.1"))
    write(path, other)
    with pytest.raises(ValueError, match="cannot be merged"):
        tables.add(path, _table())
    assert read(path) == other


def _write_until(path, name, is_over):
    while not is_over.is_set():
        write(path, _table(name=name))


@pytest.mark.slow
def test_two_writers_leave_one_whole_table(tmp_path):
    path = tmp_path / "table.json"
    names = ["pallas bf16", "xla fp8_rowwise"]
    tables_by_name = [_table(name=name) for name in names]
    context = multiprocessing.get_context("spawn")
    is_over = context.Event()
    writers = [
        context.Process(target=_write_until, args=(path, name, is_over))
        for name in names
    ]
    for writer in writers:
        writer.start()
    seen = []
    while not all(table in seen for table in tables_by_name):
        assert all(writer.is_alive() for writer in writers)
        if path.exists():
            seen.append(read(path))
        time.sleep(0.01)
    is_over.set()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert all(table in tables_by_name for table in (*seen, read(path)))
