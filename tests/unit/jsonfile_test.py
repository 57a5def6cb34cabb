import json
import os
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import jsonfile


def test_numbers_of_every_kind_become_strict_json():
    value = {"a": jnp.float32(1.5), "b": np.int64(2), "c": (True, None), 3: "x"}
    text = jsonfile.dumps(value)
    assert json.loads(text) == {"a": 1.5, "b": 2, "c": [True, None], "3": "x"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), jnp.float32(-jnp.inf)])
def test_non_finite_numbers_become_null_or_are_refused(bad):
    assert jsonfile.dumps([bad]) == "[null]"
    with pytest.raises(ValueError, match="no form in JSON"):
        jsonfile.jsonable([bad], nan_as_null=False)


def test_what_json_cannot_say_is_refused():
    with pytest.raises(ValueError, match="a ndarray has no form in JSON"):
        jsonfile.dumps({"x": np.zeros(3)})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    jsonfile.write(path, 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        jsonfile.write(path, 2)
    assert jsonfile.read(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        jsonfile.read(path)


def test_an_integer_that_could_not_be_read_is_not_written():
    assert jsonfile.dumps([2**64 - 1, -(2**63)]) == "[18446744073709551615, " + (
        "-9223372036854775808]"
    )
    with pytest.raises(ValueError, match="64 bits"):
        jsonfile.dumps({"seed": 2**64})


REFUSED = {
    "empty": b"",
    "truncated": b'{"a": [1, 2',
    "deep": b"[" * 100 + b"]" * 100,
    "very deep": b'{"a":' * 200_000,
    "NaN": b"[NaN]",
    "infinity": b"[-Infinity]",
    "float beyond float64": b"[1e400]",
    "400 digits": b"[" + b"9" * 400 + b"]",
    "5,000 digits": b"[-" + b"9" * 5000 + b"]",
    "65 bits": b"[18446744073709551616]",
    "twice": b'{"a": 1, "b": {"c": 1, "c": 2}}',
    "UTF-16": "[1]".encode("utf-16"),
    "zeros": bytes(100),
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_what_is_not_strict_json_is_refused_with_its_name(content, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        jsonfile.read(path)
    assert str(refused.value).startswith(f"{path} is not JSON (")
    assert len(str(refused.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    "content, value",
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),  # a byte order mark
        (b'["\\ud800"]', ["\ud800"]),  # half a character, as in a path of other bytes
        (b"[18446744073709551615, -0.5e-400]", [2**64 - 1, 0.0]),
        (b"[" * 60 + b"]" * 60, None),
    ],
)
def test_unusual_json_is_read(content, value, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert jsonfile.read(path) == value or value is None


def test_a_path_that_is_not_utf_8_is_written(tmp_path):
    jsonfile.write(tmp_path / "a.json", {"workdir": "run\udcff"})
    assert jsonfile.read(tmp_path / "a.json") == {"workdir": "run\udcff"}
    jsonfile.write_text(tmp_path / "a.html", "run\udcff")
    assert (tmp_path / "a.html").read_text() == r"run\udcff"


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "plan.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    with pytest.raises(ValueError, match="plan.json is larger than 16 MiB"):
        jsonfile.read(path)
    path.write_bytes(b"[]" + b" " * (2 << 20))
    assert jsonfile.read(path) == []
    with pytest.raises(ValueError, match="larger than 2 MiB"):
        jsonfile.read(path, max_bytes=2 << 20)


@pytest.mark.parametrize("read", [jsonfile.read, jsonfile.read_lines])
def test_what_is_not_a_file_is_refused_at_once(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"{path} is not a regular file"):
            read(path)


def test_what_cannot_be_opened_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        jsonfile.read(tmp_path / "nowhere.json")


def _lines(path, *contents, **options):
    """Returns the steps of the lines that are read, and what is said."""
    path.write_bytes(b"".join(contents))
    said = []
    found = jsonfile.read_lines(path, said.append, **options)
    return [line["step"] for line in found], said


ONE, TWO = b'{"step": 1}\n', b'{"step": 2}\n'


@pytest.mark.parametrize(
    "damaged",
    [
        b"\n",
        b"[3]\n",
        b'{"step"\n',
        b'{"step": "\xff"}\n',
        b'{"step": ' + b"9" * 5000 + b"}\n",
        b'{"a":' * 100_000 + b"\n",
        b'{"step": NaN}\n',
    ],
    ids=["empty", "list", "torn", "no text", "digits", "deep", "NaN"],
)
def test_a_damaged_line_costs_no_other_and_is_counted(damaged, tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps, said = _lines(path, ONE, damaged, TWO)
    assert steps == [1, 2]
    assert said == [f"{path}: 1 damaged line is left out."]
    steps, said = _lines(path, damaged, ONE, damaged, TWO)
    assert steps == [1, 2] and "2 damaged lines are" in said[0]


@pytest.mark.parametrize("torn", [b'{"step": 3', b'{"step": 3}', b""])
def test_an_incomplete_last_line_is_not_worth_a_word(torn, tmp_path):
    assert _lines(tmp_path / "metrics.jsonl", ONE, TWO, torn) == ([1, 2], [])


def test_a_line_of_100_megabytes_is_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(ONE)
        file.seek(100 << 20)  # a hole
        file.write(b"\n" + TWO)
    said = []
    tracemalloc.start()
    lines = jsonfile.read_lines(path, said.append)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line["step"] for line in lines] == [1, 2]
    assert "1 damaged line is left out" in said[0] and most < 20 << 20


def test_lines_beyond_a_limit_are_left_out_and_that_is_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert _lines(path, ONE, TWO, max_bytes=len(ONE + TWO)) == ([1, 2], [])
    steps, said = _lines(path, ONE, TWO, ONE, max_bytes=len(ONE + TWO) + 3)
    assert steps == [1, 2] and "lines after 27 bytes left out" in said[0]


def test_damaged_lines_are_logged_as_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{\n" + ONE)
    jsonfile.read_lines(path)
    assert "1 damaged line is left out" in caplog.text


def test_no_file_has_no_lines(tmp_path):
    assert jsonfile.read_lines(tmp_path / "metrics.jsonl") == []


def test_a_mismatch_is_explained_field_by_field():
    saved = {"optim": {"lr": 0.1, "decay": 0}, "hidden": [8, 4], "old": 1}
    current = {"optim": {"lr": 0.3, "decay": 0}, "hidden": (8, 2), "new": "x"}
    assert jsonfile.explain_mismatch(saved, current) == [
        "hidden: saved [8, 4], now [8, 2]",
        "new: not saved, now 'x'",
        "old: saved 1, now absent",
        "optim.lr: saved 0.1, now 0.3",
    ]


def test_a_config_equals_itself_read_back():
    config = {"hidden": (8, 4), "optim": {}, "path": None}
    assert jsonfile.explain_mismatch(json.loads(jsonfile.dumps(config)), config) == []
