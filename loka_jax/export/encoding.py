"""How rows become a model's inputs, in the form that an exported folder keeps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from loka_jax.data import Schema
from loka_jax.data.encoding import HashEncoder, VocabularyEncoder
from loka_jax.data.records import Encoding
from loka_jax.data.sequences import Layout
from loka_jax.data.transform_options import Input
from loka_jax.data.values import MAX_DENSE

type Spec = tuple[dict[str, Any], dict[str, np.ndarray]]


def inputs_of(encoding: Encoding, layout: Layout | None = None) -> Spec:
    """Returns the JSON form of an encoding, and the arrays of its vocabularies.

    Args:
        layout: of the sequences of an event log.
    """
    config, columns = encoding.config, encoding.columns
    fields, arrays = [], {}
    for column, encoder in zip(columns.fields, encoding.encoders, strict=True):
        if isinstance(encoder, Input):
            part = {"column": encoder.source, "kind": "part", "of": column}
            fields.append(part | {"step": encoder.steps[0], "rows": encoder.rows})
            continue
        of, kind = config.owners.get(column, column), "modulo"
        if isinstance(encoder, VocabularyEncoder):
            kind = "vocabulary"
            arrays |= _as_arrays(of, encoder.values)
        elif isinstance(encoder, HashEncoder):
            kind = "hash"
        fields.append({"column": column, "kind": kind, "of": of, "rows": encoder.rows})
    lists = fields[len(fields) - len(columns.multi) :]
    for field, slots in zip(lists, encoding.slots, strict=True):
        weights = config.weights_of_multi.get(field["column"])
        field |= {"slots": slots, "weights": weights, "separator": config.separator}
    inputs = config.inputs.bound(encoding.constants).dense
    dense = _dense([*inputs.values()], MAX_DENSE)
    spec = {"bad": config.bad, "dense": dense, "fields": fields}
    return spec | _log(encoding.schema, config.time, layout), arrays


def inputs_as_given(schema: Schema, layout: Layout | None = None) -> Spec:
    """Returns the form of inputs that are given as the model reads them.

    Those of generated clicks: numbers, and ids.
    """
    sizes = zip(schema.categorical, schema.vocab_sizes, strict=True)
    fields = [{"column": c, "kind": "ids", "of": c, "rows": n} for c, n in sizes]
    dense = _dense([Input(name, ()) for name in schema.dense], 1e30)
    spec = {"bad": "strict", "dense": dense, "fields": fields}
    return spec | _log(schema, "time", layout), {}


def _dense(inputs: Sequence[Input], huge_limit: float) -> dict[str, Any]:
    """Returns what is read of numbers, and what is made of them."""
    return {
        "columns": [source for source, _ in inputs],
        "steps": [steps for _, steps in inputs],
        "huge_limit": huge_limit,
    }


def _log(schema: Schema, time: str | None, layout: Layout | None) -> dict[str, Any]:
    """Returns what is read of events, beside their fields."""
    if layout is None:
        return {}
    names = {"user": schema.user, "time": time, "labels": list(schema.labels)}
    return {"log": names | {"layout": layout._asdict()}}


def _as_arrays(name: str, values: pa.Array) -> dict[str, np.ndarray]:
    """Returns the values of a vocabulary one after another, and where each ends."""
    texts = [text.encode() for text in values.to_pylist()]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    content = np.frombuffer(b"".join(texts), np.uint8)
    return {f"{name}/ends": ends, f"{name}/bytes": content}
