"""Mistakes of a tired engineer, a module for each part of the package."""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A change of one place in the package that tests must notice.

    Attributes:
        what: what goes wrong, in a few words.
        path: the file.
        before: text that stands once in the file.
        after: what stands in its place.
        tests: where to look first, below tests/; by default the mirrored folder of
            tests/unit.
    """

    what: str
    path: str
    before: str
    after: str
    tests: str = ""
