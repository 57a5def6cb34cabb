"""Damages files at random: their bytes, or the fields of their JSON."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

TOKENS = [b'"', b",", b"\n", b"\r", b"\t", b"\0", b"\xff", b'""', b"\r\n", b"9" * 400]
TOKENS += [b"nan", b"-inf", b"1e999", b"\xef\xbb\xbf", b'"\n"', b" ", b"PAR1"]


def flip_bits(data: bytes, draw: Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def insert(data: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    token = draw.choice([*TOKENS, draw.randbytes(draw.randrange(1, 50))])
    return data[:at] + token + data[at:]


def overwrite(data: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(data))
    token = draw.choice([*TOKENS, bytes(draw.randrange(1, 9)), b"\xff" * 8])
    return data[:at] + token + data[at + len(token) :]


def repeat(data: bytes, draw: Random, times: int) -> bytes:
    start = draw.randrange(len(data))
    stop = start + draw.randrange(1, 500)
    return data[:start] + times * data[start:stop] + data[stop:]


def move(data: bytes, draw: Random) -> bytes:
    start = draw.randrange(len(data))
    stop = start + draw.randrange(1, 500)
    rest = data[:start] + data[stop:]
    at = draw.randrange(len(rest) + 1)
    return rest[:at] + data[start:stop] + rest[at:]


def swap_lines(data: bytes, draw: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


MUTATIONS = [
    flip_bits,
    lambda data, draw: data[: draw.randrange(len(data))],
    insert,
    overwrite,
    lambda data, draw: repeat(data, draw, 2),
    lambda data, draw: repeat(data, draw, 0),
    move,
    swap_lines,
]


def mutated(data: bytes, draw: Random) -> bytes:
    for _ in range(draw.choice([1, 1, 1, 3])):
        data = draw.choice(MUTATIONS)(data, draw) or b"\n"
    return data


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
    *("../x", [], [[]], [None], {}, {"": None}, {"a": {"b": []}}, *_WRITTEN),
]


def changed_json(content: bytes, draw: Random) -> bytes:
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
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield value, name
            yield from _places(value[name])
