"""The options that decide what shards hold, as the shards' manifest keeps them."""

from typing import NamedTuple

from loka_jax.data.config import DataConfig
from loka_jax.data.table import CRITEO_CATEGORICAL, CRITEO_DENSE, CRITEO_LABEL

# They decide how a row is encoded, whatever the other rows are.
ENCODING_SETTINGS = (
    "label",
    "labels",
    "dense",
    "categorical",
    "multi",
    "multi_weights",
    "separator",
    "encoding",
    "hash_buckets",
    "hash_sizes",
    "hashed",
    "share",
    "missing",
    "nan",
    "negative",
    "huge",
    "huge_limit",
    "transform",
)
SETTINGS = (
    *ENCODING_SETTINGS,
    "max_values",
    "min_count",
    "reserve_rows",
    "unknown",
    "weight",
    "keep_negatives",
    "valid_fraction",
    "time",
    "max_bad_rows",
)
# Beside them: how the values of each table were written as text. Folders of earlier
# versions lack it.
FORMS = "forms"


class Columns(NamedTuple):
    """The names of the columns by role."""

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    multi: tuple[str, ...] = ()
    further_labels: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, each a task."""
        return (self.label, *self.further_labels)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields, in the order of their tables."""
        return (*self.categorical, *self.multi)


def columns_of(config: DataConfig) -> Columns:
    """Returns the columns that `config` names; those of Criteo's files are fixed."""
    if config.kind == "criteo":
        return Columns(CRITEO_LABEL, CRITEO_DENSE, CRITEO_CATEGORICAL)
    label, *further = config.labels or (config.label,)
    return Columns(
        label, config.dense, config.categorical, config.multi, tuple(further)
    )


def features_of(config: DataConfig) -> tuple[str, ...]:
    """Returns the columns that a model's inputs are made of."""
    columns = columns_of(config)
    weights = config.weights_of_multi.values()
    return tuple(dict.fromkeys((*columns.dense, *columns.fields, *weights)))


def settings_of(config: DataConfig) -> dict:
    """Returns the options that determine the shards' contents, as JSON values."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= columns_of(config)._asdict()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
