"""Columns of dates: Arrow's types of dates and times, or text as in ISO 8601."""

import pyarrow as pa


def as_dates(array: pa.Array) -> pa.Array | None:
    """Returns the column as timestamps, or None if it does not hold dates."""
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        return array
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        for zone in (None, "UTC"):
            try:
                return array.cast(pa.timestamp("us", zone))
            except pa.ArrowInvalid:
                continue
    return None
