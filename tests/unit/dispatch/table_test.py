"""The dispatch table: what is written is read, and nothing else is believed."""

import copy
import dataclasses
import functools
import json
import operator
import threading

import pytest

from loka_jax.dispatch import header as headers
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.table import Entry, Table, from_json, to_json
from loka_jax.measure.intervals import Interval
from loka_jax.site import SiteSpec
from tests.support.dispatch import H200, errors

HEADER = Header("NVIDIA H200", "0.11.2", "0.11.2", "0.3.1 3.9.0", "abc")
KEY = SiteSpec(4096, 256, 128, "layer", "swish", True)


def _table(key=KEY, name="xla bf16", time=10.0) -> Table:
    entry = Entry(
        {"training": {"xla bf16": 20.0, name: time}},
        {"fp8_dlrm top": errors(("fwd", "drhs"), rowwise=0.03)},
        {"pallas fp8_rowwise": "does not run"},
        {"fp8_dlrm top": Interval(1e-4, -1e-5, 2e-4)},
        {"fp8_dlrm head": "it was too harmful"},
    )
    return Table(HEADER, {key: entry}, H200)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "table.json"
    tables.write(path, _table())
    assert tables.read(path) == _table()


@pytest.mark.parametrize("field", ["device_kind", "jax", "jaxlib", "triton", "kernels"])
def test_a_table_of_elsewhere_says_so_and_is_not_added_to(field, tmp_path):
    path, other = (
        tmp_path / "table.json",
        dataclasses.replace(HEADER, **{field: "0.12"}),
    )
    assert HEADER.why_not(HEADER) is None and HEADER.why_not(other) is not None
    tables.write(path, Table(other))
    with pytest.raises(ValueError, match="cannot be merged"):
        tables.add(path, _table())
    assert tables.read(path) == Table(other)
    # Of JAX, patch versions do not count.
    patch = dataclasses.replace(HEADER, **{field: "0.11.9"})
    assert (HEADER.why_not(patch) is None) == field.startswith("jax")


@pytest.mark.parametrize(
    ("field", "measured", "patch", "other"),
    [
        ("cuda", "13.0", "13.0", "13.1"),
        ("cublas", "13.1.0.3", "13.1.2.0", "13.2.0.3"),
        ("driver", "580.159.03", "580.159.04", "590.10.01"),
    ],
)
def test_a_version_that_was_kept_counts_up_to_patches(field, measured, patch, other):
    header = dataclasses.replace(HEADER, **{field: measured})
    of = {x: dataclasses.replace(HEADER, **{field: x}) for x in (patch, other)}
    sentence = f"it was measured with {field} {measured}, but here it is {other}"
    assert header.why_not(of[other]) == sentence and header.why_not(of[patch]) is None
    assert HEADER.why_not(of[other]) is None and of[other].why_not(HEADER) is None
    assert Table(HEADER).merged(Table(header)).header == header


def test_versions_are_read_as_the_system_says_them(tmp_path):
    assert headers.cuda_version("cuda 12090") == "12.9"
    assert headers.cuda_version("cpu") == "" == headers.driver_version(tmp_path / "no")
    file = tmp_path / "version"
    for module in ("x86_64 Kernel Module", "Open Kernel Module for x86_64"):
        file.write_text(f"NVRM version: NVIDIA UNIX {module}  580.159.04  Release\n")
        assert headers.driver_version(file) == "580.159.04"


def test_a_later_measurement_replaces_and_adds():
    old, other = _table(name="pallas bf16"), SiteSpec(64, 64, 64)
    new = Entry(
        {"training": {"xla bf16": 12.0}, "inference": {"xla bf16": 3.0}},
        {"there": errors(rowwise=0.02)},
        {"xla bf16": "y is off"},
        refused={"fp8_dcnv2 head": "no"},
    )
    slow, before = dataclasses.replace(H200, launch_us=9.0), old.sites[KEY]
    merged = old.merged(Table(HEADER, {KEY: new, other: Entry()}, slow))
    both = Entry(
        new.times | {"training": {"xla bf16": 12.0, "pallas bf16": 10.0}},
        before.errors | new.errors,
        before.failures | new.failures,
        before.effects,
        before.refused | new.refused,
    )
    assert merged == Table(HEADER, {KEY: both, other: Entry()}, slow)
    assert old == _table(name="pallas bf16") and merged.merged(Table(HEADER)) == merged


def test_what_is_measured_again_no_longer_fails_nor_is_refused():
    now = Entry({"training": {"pallas fp8_rowwise": 3.0}})
    now.effects["fp8_dlrm head"] = Interval(0.0, 0.0, 0.0)
    entry = _table().merged(Table(HEADER, {KEY: now})).sites[KEY]
    assert entry.failures == entry.refused == {}
    assert entry.effects.keys() == {"fp8_dlrm top", "fp8_dlrm head"}


def _set(*path_and_value):
    *path, last, new = path_and_value

    def change(value):
        functools.reduce(operator.getitem, path, value)[last] = new

    return change


_in_entry = functools.partial(_set, "sites", 0)


_TIMES = "times", "training"
_EFFECT = "effects", "fp8_dlrm top"
_ERROR = "errors", "fp8_dlrm top", "fwd", "fp8_rowwise"


@pytest.mark.parametrize(
    "change",
    [
        _set("schema", 1),
        _set("header", "jax", 3),
        *(_set("roofline", "sms", x) for x in (0, "132")),
        *(_in_entry("site", "m", x) for x in (0, True, 1 << 31)),
        _in_entry("site", "norm", "batch"),
        _in_entry("site", "use_bias", 1),
        *(_in_entry(*_TIMES, "xla bf16", x) for x in (0, "fast", 10**400, True)),
        _in_entry(*_TIMES, "xla fp9", 1.0),
        _in_entry("times", "training back", {}),
        # Inverted, outside, too few.
        *(_in_entry(*_EFFECT, x) for x in ([1e-4, 2e-4, -1e-5], [3e-4, -1e-5, 2e-4])),
        _in_entry(*_EFFECT, [1e-4, 1e-4]),
        _in_entry("failures", "xla bf16", "x" * 10_001),
        _in_entry("refused", "fp8_dlrm top", 3),
        _in_entry("errors", "fp8_dlrm top", {"fwd": {}}),
        _in_entry(*_ERROR, "median", [1.0, 1.0, 1.0]),
        lambda value: value["sites"][0].pop("site"),
        _set("more", 1),
        lambda value: value["sites"].append(copy.deepcopy(value["sites"][0])),
        lambda value: value.pop("header"),
    ],
)
def test_what_is_no_table_is_refused(change):
    value = json.loads(json.dumps(to_json(_table())))
    change(value)
    with pytest.raises(ValueError):
        from_json(value)


@pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 100_000])
def test_a_file_that_is_no_table_is_refused_and_left(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text := text or json.dumps(to_json(_table()))[:-20])
    said = "table.json is not (JSON|a dispatch table) .*: .*name another file"
    for use in (tables.read, lambda path: tables.add(path, _table())):
        with pytest.raises(ValueError, match=said):
            use(path)
    assert path.read_text() == text


def test_tuners_that_add_at_once_lose_nothing(tmp_path):
    path, other = tmp_path / "table.json", _table(key=SiteSpec(64, 64, 64))
    with tables.locked(path):
        tuner = threading.Thread(target=tables.add, args=(path, _table()))
        tuner.start()
        tuner.join(0.2)
        assert tuner.is_alive() and not path.exists()
        tables.write(path, other)
    tuner.join()
    assert tables.read(path) == other.merged(_table())
