"""How rows become a model's inputs, in the form that an exported folder keeps."""

from typing import Any

import numpy as np
import pyarrow as pa

from loka_jax.data import Schema
from loka_jax.data.encoding import HashEncoder, VocabularyEncoder
from loka_jax.data.records import Encoding
from loka_jax.data.values import MAX_DENSE

type Spec = tuple[dict[str, Any], dict[str, np.ndarray]]
_STRICT = dict.fromkeys(("missing", "nan", "huge"), "error") | {"negative": "keep"}
_CLEAN = _STRICT | {"missing": "zero", "nan": "zero", "huge": "clip"}
# Of inputs that nothing encodes: what the model reads is given.
_AS_GIVEN = _STRICT | {"huge_limit": 1e30, "transform": "none"}


def inputs_of(encoding: Encoding) -> Spec:
    """Returns the JSON form of an encoding, and the arrays of its vocabularies."""
    config, columns = encoding.config, encoding.columns
    fields, arrays = [], {}
    for column, encoder in zip(columns.fields, encoding.encoders, strict=True):
        of, kind = config.owners.get(column, column), "modulo"
        if isinstance(encoder, VocabularyEncoder):
            kind = "vocabulary"
            arrays |= _as_arrays(of, encoder.values)
        elif isinstance(encoder, HashEncoder):
            kind = "hash"
        fields.append({"column": column, "kind": kind, "of": of, "rows": encoder.rows})
    weights = config.weights_of_multi
    multi = [
        {"weights": weights.get(name), "slots": slots, "separator": config.separator}
        for name, slots in zip(columns.multi, encoding.slots, strict=True)
    ]
    is_strict = config.bad == "strict"
    dense = _STRICT if is_strict else _CLEAN
    dense = dense | {"huge_limit": MAX_DENSE, "transform": config.transform}
    if encoding.standardizer is not None:
        dense |= {k: list(v) for k, v in encoding.standardizer._asdict().items()}
    dense["columns"] = list(columns.dense)
    unknown = "error" if is_strict else "oov"
    spec = {"dense": dense, "fields": fields, "multi": multi, "unknown": unknown}
    return spec, arrays


def inputs_as_given(schema: Schema) -> Spec:
    """Returns the form of inputs that are given as the model reads them.

    Those of generated clicks: numbers, and ids.
    """
    sizes = zip(schema.categorical, schema.vocab_sizes, strict=True)
    fields = [{"column": c, "kind": "ids", "of": c, "rows": n} for c, n in sizes]
    dense = _AS_GIVEN | {"columns": list(schema.dense)}
    return {"dense": dense, "fields": fields, "multi": [], "unknown": "oov"}, {}


def _as_arrays(name: str, values: pa.Array) -> dict[str, np.ndarray]:
    """Returns the values of a vocabulary one after another, and where each ends."""
    texts = [text.encode() for text in values.to_pylist()]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    content = np.frombuffer(b"".join(texts), np.uint8)
    return {f"{name}/ends": ends, f"{name}/bytes": content}
