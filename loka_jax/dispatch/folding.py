"""Identical layers as one row of a table: those whose paths differ by numbers alone.

fmb_{0..7}/dense_0 (8)
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence

_MOST_NUMBERS = 4  # of layers, named one by one
_NUMBER = re.compile(r"(\d+)")


def folded[Key: Hashable, Value](
    rows: Iterable[tuple[str, Key, Value]],
) -> Iterator[tuple[str, Key, list[Value]]]:
    """Yields one row for all whose paths differ by numbers alone, with equal keys.

    Its path names them all, its values are theirs.

    Args:
        rows: of path, key and value.
    """
    alike: dict[Hashable, list[tuple[str, Key, Value]]] = {}
    for row in rows:
        alike.setdefault((_NUMBER.sub("#", row[0]), row[1]), []).append(row)
    for group in alike.values():
        paths, keys, values = zip(*group, strict=True)
        yield _name(paths), keys[0], list(values)


def _name(paths: Sequence[str]) -> str:
    """Returns a name of some paths that differ by numbers alone."""
    if len(paths) == 1:
        return paths[0]
    parts = zip(*map(_NUMBER.split, paths), strict=True)
    return f"{''.join(map(_numbers, parts))} ({len(paths)})"


def _numbers(values: Sequence[str]) -> str:
    several = list(dict.fromkeys(values))
    if len(several) == 1:
        return several[0]
    is_range = several == [str(int(several[0]) + i) for i in range(len(several))]
    if is_range or len(several) > _MOST_NUMBERS:
        return f"{{{several[0]}..{several[-1]}}}"
    return f"{{{','.join(several)}}}"
