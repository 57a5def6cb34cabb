"""Checked values from JSON of others: each is of the expected type, or refused."""

import math
from collections.abc import Collection
from reprlib import repr as short
from typing import Any

_MAX_TEXT = 10_000


def fields(
    value: Any, names: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Returns an object that has these fields, and at most the optional ones.

    Raises:
        ValueError: if it is not an object, or other fields are in it.
    """
    value = mapping(value)
    if not set(names) <= set(value) <= {*names, *optional}:
        known = sorted({*names, *optional})
        raise ValueError(f"the fields {short(sorted(value))} are not {known}.")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """Returns an object.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{short(value)} is not an object.")
    return value


def items(value: Any) -> list[Any]:
    """Returns a list.

    Raises:
        ValueError: if it is not.
    """
    if not isinstance(value, list):
        raise ValueError(f"{short(value)} is not a list.")
    return value


def text(value: Any) -> str:
    """Returns a text.

    Raises:
        ValueError: if it is not text, or has more than 10,000 characters.
    """
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"{short(value)} is not a text.")
    return value


def number(value: Any) -> float:
    """Returns a finite number.

    Raises:
        ValueError: if it is not.
    """
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{short(value)} is not a finite number.")
    return number


def positive(value: Any) -> float:
    """Returns a positive, finite number.

    Raises:
        ValueError: if it is not.
    """
    if not number(value) > 0:
        raise ValueError(f"{short(value)} is not positive.")
    return number(value)
