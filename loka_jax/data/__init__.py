"""Click logs as fixed-shape batches: generated, from text or Parquet, from shards."""

from loka_jax.data.batch import WHOLE, Batch, Dataset, Events, Part, Position, Schema
from loka_jax.data.config import DataConfig
from loka_jax.data.open import Splits, open_data

__all__ = [
    "WHOLE",
    "Batch",
    "DataConfig",
    "Dataset",
    "Events",
    "Part",
    "Position",
    "Schema",
    "Splits",
    "open_data",
]
