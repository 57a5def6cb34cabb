import dataclasses
import json
import os
import tracemalloc
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import jsonfile


def test_numbers_of_every_kind_become_strict_json():
    value = {"a": jnp.float32(1.5), "b": np.int64(2), "c": (True, None), 3: "x"}
    value["d"] = [2**64 - 1, -(2**63), Path("x/y"), float("nan"), jnp.float32(-jnp.inf)]
    want = {"a": 1.5, "b": 2, "c": [True, None], "3": "x"}
    want["d"] = [2**64 - 1, -(2**63), "x/y", None, None]
    assert json.loads(jsonfile.dumps(value)) == want


@pytest.mark.parametrize(
    "value", [np.zeros(3), 2**64, -(2**63) - 1, float("nan"), jnp.float32(-jnp.inf)]
)
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(ValueError, match="no form in JSON|64 bits"):
        jsonfile.jsonable({"x": [value]}, nan_as_null=False)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, done, calls = tmp_path / "summary.json", [], {"fsync": os.fsync}

    def fail(*_):
        raise OSError(28, "No space left on device")

    def record(name, *arguments):
        if not done:  # nothing of it waits in this process
            assert os.fstat(arguments[0]).st_size
        done.append(name)
        calls[name](*arguments)

    calls["replace"] = os.replace
    for name in calls:
        monkeypatch.setattr(os, name, lambda *x, name=name: record(name, *x))
    jsonfile.write(path, 1)
    assert done == ["fsync", "replace", "fsync"]  # the last one of the folder
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        jsonfile.write(path, 2)
    assert jsonfile.read(path) == 1 and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(os, "fsync", fail)  # as some systems do for a folder
    jsonfile.sync_directory(tmp_path)


REFUSED = {
    "empty": b"",
    "truncated": b'{"a": [1, 2',
    "no text": b"\xff{",
    "deep": b"[" * 65 + b"]" * 65,
    "very deep": b'{"a":' * 200_000,
    "NaN": b"[NaN]",
    "infinity": b"[-Infinity]",
    "float beyond float64": b"[1e400]",
    "5,000 digits": b"[-" + b"9" * 5000 + b"]",
    "65 bits": b"[18446744073709551616]",
    "twice": b'{"a": 1, "b": {"c": 1, "c": 2}}',
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_is_not_strict_json_is_refused_with_its_name(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        jsonfile.read(path)
    assert str(refused.value).startswith(f"{path} is not JSON (")
    assert len(str(refused.value)) < len(str(path)) + 200


def test_unusual_json_is_read_and_written(tmp_path):
    path = tmp_path / "plan.json"
    contents = {
        b'\xef\xbb\xbf{"a": 1}': {"a": 1},  # a byte order mark
        b"[18446744073709551615, -9223372036854775808]": [2**64 - 1, -(2**63)],
        b"[" * 64 + b"]" * 64: json.loads("[" * 64 + "]" * 64),
    }
    for content, value in contents.items():
        path.write_bytes(content)
        assert jsonfile.read(path) == value
    jsonfile.write(path, {"workdir": "run\udcff"})  # a path that is not UTF-8
    assert jsonfile.read(path) == {"workdir": "run\udcff"}
    jsonfile.write_text(path, "run\udcff")
    assert path.read_text() == r"run\udcff"


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "plan.json"
    path.touch()
    os.truncate(path, 1 << 40)  # a hole: it takes no space
    with pytest.raises(ValueError, match="plan.json is larger than 16 MiB"):
        jsonfile.read(path)
    path.write_bytes(b"[]" + b" " * ((2 << 20) - 2))
    assert jsonfile.read(path, max_bytes=2 << 20) == []
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        jsonfile.read(path, max_bytes=(2 << 20) - 1)


@pytest.mark.parametrize("read", [jsonfile.read, jsonfile.read_lines])
def test_what_is_not_a_file_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            read(path)


def _lines(path, *contents, **options):
    """Returns the steps of the lines that are read, and what is said."""
    path.write_bytes(b"".join(contents))
    said = []
    found = jsonfile.read_lines(path, said.append, **options)
    return [line["step"] for line in found], said


ONE, TWO = b'{"step": 1}\n', b'{"step": 2}\n'


@pytest.mark.parametrize(
    "damaged",
    [b"\n", b"[3]\n", b'{"step"\n', b'{"step": "\xff"}\n', b'{"a":' * 100_000 + b"\n"],
    ids=["empty", "list", "torn", "no text", "deep"],
)
@pytest.mark.parametrize("torn", [b'{"step": 3', b'{"step": 3}', b""])
def test_a_damaged_line_costs_no_other_and_is_counted(damaged, torn, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    assert jsonfile.read_lines(path) == []  # as it does not exist yet
    # An incomplete last line is not worth a word.
    assert _lines(path, ONE, TWO, torn) == ([1, 2], [])
    one = [f"{path}: 1 damaged line is left out."]
    assert _lines(path, ONE, damaged, TWO, torn) == ([1, 2], one)
    two = f"{path}: 2 damaged lines are left out."
    assert _lines(path, damaged, ONE, damaged, TWO, torn) == ([1, 2], [two])
    jsonfile.read_lines(path)
    assert two in caplog.text
    limit = [f"{path}: lines after 27 bytes left out."]
    said: list[str] = []
    options = {"max_bytes": 27, "say_cut": said.append}
    assert _lines(path, ONE, TWO, ONE, **options) == ([1, 2], [])
    assert said == limit
    assert _lines(path, ONE, TWO, max_bytes=24) == ([1, 2], [])


def test_a_line_of_100_megabytes_is_a_damaged_line(tmp_path):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_bytes(ONE)
    os.truncate(path, 100 << 20)  # a hole
    with open(path, "ab") as file:
        file.write(b"\n" + TWO)
    tracemalloc.start()
    lines = jsonfile.read_lines(path, said.append)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line["step"] for line in lines] == [1, 2]
    assert "1 damaged line is left out" in said[0] and most < 20 << 20


@dataclasses.dataclass
class Part:
    size: int
    share: float = 0.5
    kind: Literal["a", "b"] | None = None
    path: Path | None = None

    def __post_init__(self):
        if self.size > 9:
            raise ValueError("--size must be at most 9.")


def test_a_value_is_of_its_type_or_refused_by_place():
    value = {"x": [{"size": 1, "share": 1, "path": "y"}]}
    (part,) = jsonfile.typed(value, dict[str, list[Part]])["x"]
    assert part == Part(1, 1.0, path=Path("y")) and type(part.share) is float
    wrong = {
        r"size is wrong \(Expected int, got bool\): correct it\.": {"size": True},
        r"it is wrong \(Object missing required field size\)": {},
        r"kind is wrong .*: use one of a, b\.": {"size": 1, "kind": "c"},
        r"sice is no .* mean 'size'\?\): rename or": {"size": 1, "sice": 2},
        "--size must be at most 9": {"size": 10},
        r"path is wrong \(Expected str, got int\)": {"size": 1, "path": 3},
        r"share is wrong \(Number out of range": {"size": 1, "share": 10**400},
    }
    for sentence, change in wrong.items():
        with pytest.raises(ValueError, match=f"^{sentence}"):
            jsonfile.typed(change, Part)


def test_a_mismatch_is_explained_field_by_field():
    saved = {"optim": {"lr": 0.1, "decay": 0}, "hidden": [8, 4], "old": 1, "a": None}
    current = {
        "optim": {"lr": 0.3, "decay": 0},
        "hidden": (8, 2),
        "new": "x",
        "a": None,
    }
    assert jsonfile.explain_mismatch(saved, current) == [
        "hidden: saved [8, 4], now [8, 2]",
        "new: not saved, now 'x'",
        "old: saved 1, now absent",
        "optim.lr: saved 0.1, now 0.3",
    ]
    assert jsonfile.explain_mismatch({"a": [8], "b": {}}, {"a": (8,), "b": {}}) == []
