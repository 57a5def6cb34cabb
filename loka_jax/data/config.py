"""The options of all data sources in one dataclass.

It is flat so that command lines read well: `--data.path clicks.csv --data.label click`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from loka_jax.data.batch import MAX_SLOTS, Columns
from loka_jax.data.event_options import HISTORY, check_events
from loka_jax.data.transform_options import Inputs, inputs_of, parse_transforms
from loka_jax.options import pairs, require

# Criteo's display advertising logs (Kaggle 2014, and the terabyte's day files) have no
# header: the label, 13 integers, which may be empty or negative, and 26 categories of 8
# hexadecimal digits, which may be empty.
CRITEO_LABEL = "label"
CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
# Rows of the generated tables: a few are huge, most are small, as in Criteo's logs.
GENERATED_ROWS = (
    *(100_000, 60_000, 40_000, 30_000, 20_000, 10_000, 8_000, 5_000, 3_000),
    *(2_000, 2_000, 1_000, 1_000, 600, 500, 300, 200, 150, 100, 100),
    *(60, 50, 30, 25, 20, 12),
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where examples come from and how they are preprocessed.

    Attributes:
        kind: `generated` click logs (nothing else to set up), `events`, a generated
            event log (likewise), `criteo` (40 tab separated columns, no header) or
            `table` (CSV or TSV with a header, or Parquet; `.gz` too).
        path: training files: paths, globs, or addresses of s3:// and gs://; or folders,
            whose files may have train, valid (or val) and test in their names; or a
            folder of shards made by experiments/convert.py.
        train: which rows of these train, as in "dt<2026-11-13"; None for all.
        valid: validation files, or which rows of `path` they are, as in
            "dt=2026-11-13"; if None, those in the folder, or else rows split off the
            training files.
        test: test files, or rows, likewise; if None, those in the folder, if any.
        label: the label column (`table`).
        labels: several label columns, each a task of the model, in place of `label`;
            a row may lack some of them (`table`).
        dense: the dense columns (`table`).
        categorical: the categorical columns (`table`).
        multi: the multi-valued columns: lists in Parquet, or text with a `separator`
            (`table`).
        multi_weights: "COLUMN=WEIGHTS" names, for a multi-valued column, the column
            with a list of as many weights, which are not negative.
        separator: what stands between the values of a multi-valued column of text.
        max_values: values of a list that are used, its first ones; further ones are
            left out and counted.
        encoding: how values become ids. `vocabulary` numbers the training values;
            `hash` is a 64-bit hash of column name and value, modulo buckets.
        min_count: values seen fewer times in training share id 0 (`vocabulary`).
        reserve_rows: rows of each table for values that the training rows do not hold,
            which a later day may bring; see `--init-from` (`vocabulary`).
        hash_buckets: rows of each table, including id 0 for missing values (`hash`).
        hash_sizes: "COLUMN=ROWS" hashes a column into so many rows, whatever `encoding`
            and `hash_buckets` say.
        hashed: columns of integers that are hashes already: their 64 bits are taken
            modulo the rows of their table, those of `hash_sizes` or `hash_buckets`.
        share: "COLUMN=OWNER" lets a column use the vocabulary and the table of another
            one, which is learned from both.
        bad: `clean` makes missing and NaN dense values 0 (before the transform), clips
            those beyond +-1e12 and gives values outside the vocabulary id 0; `strict`
            refuses them all. Empty categorical values have id 0.
        transform: what is made of dense values after that, and of times. `log1p` is
            `sign(x) log(1 + |x|)`, finite for negative values too; `standardize` is
            `(x - mean) / std` with the statistics of the training rows; or `none`. By
            column, as in "price=log1p,clip:0:100,missing" "age=buckets:16"
            "at=hour,weekday", see `loka_jax.data.transform_options`.
        weight: column of the examples' weights, 0 or more, in loss and metrics; all
            are 1 if None (`table`).
        keep_negatives: share of the training rows without a click that are kept, by
            hashed row number, each with its weight divided by this share.
        valid_fraction: share of the training rows used for validation when there is no
            validation file: rows whose hashed row number, in [0, 1), falls below it, or
            the last rows by `time`.
        time: column of numbers or dates; if given, validation rows are the last ones
            unless a file has them (`table`).
        user: column of users: rows are events, and an example is one of them with the
            earlier events of its user by `time`, those of the other splits included
            (`table`).
        lists: "COLUMN=LIST" names, for each column of events and for `time`, the column
            with the list of its values in the events before, which are a row's history
            in place of those of a `user`. Labels and actions may have one (`table`).
        context: fields of a sample, as of its user, beside `categorical`, which are
            those of events (`user`).
        actions: fields of events that are known once they have happened, as the labels
            are; a candidate has id 0 (`user`).
        history: the most events before an example (`user`, `events`).
        targets: `last` makes a sequence of each example, the events before it in time
            and the example. `all` makes one of `history` events in a row, each to be
            predicted by those before it; half of them are seen twice, so that each has
            half of `history` before it, or all there are. Rows of events are then
            interleaved (`user`, `events`).
        interleave: an event is two rows, without and with its actions and answers, in
            place of one with both (`last`).
        row_capacity: rows of all sequences of a batch, beyond which the oldest events
            of the longest histories are left out and counted; None for no limit
            (`last`).
        stream: train in the order of time, and evaluate on the examples of the next
            `--loop.eval-every` steps (`last`).
        max_bad_rows: number of rows with too few or too many columns that are skipped;
            one more fails the conversion.
        cache: folder for converted shards; if None, the user's private cache.
        examples: training examples in an epoch (`generated`), or events (`events`).
        eval_examples: those in each of the valid and test splits.
        rows: rows of each table, including id 0 (`generated`); of contexts and of items
            (`events`).
        signal: standard deviation of the true logit (`generated`).
        click_rate: mean of the true probabilities (`generated`).
    """

    kind: Literal["generated", "events", "criteo", "table"] = "generated"

    path: str | tuple[str, ...] | None = None
    train: str | None = None
    valid: str | tuple[str, ...] | None = None
    test: str | tuple[str, ...] | None = None
    label: str = "label"
    labels: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    multi: tuple[str, ...] = ()
    multi_weights: tuple[str, ...] = ()
    separator: str | None = None
    max_values: int = 32
    encoding: Literal["vocabulary", "hash"] = "vocabulary"
    min_count: int = 1
    reserve_rows: int = 0
    hash_buckets: int = 100_000
    hash_sizes: tuple[str, ...] = ()
    hashed: tuple[str, ...] = ()
    share: tuple[str, ...] = ()
    bad: Literal["clean", "strict"] = "clean"
    transform: tuple[str, ...] = ("log1p",)
    weight: str | None = None
    keep_negatives: float = 1.0
    valid_fraction: float = 0.1
    time: str | None = None
    user: str | None = None
    lists: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    history: int = 256
    targets: Literal["last", "all"] = "last"
    interleave: bool = False
    row_capacity: int | None = None
    stream: bool = False
    max_bad_rows: int = 0
    cache: str | None = None

    examples: int = 8_388_608
    eval_examples: int = 262_144
    rows: tuple[int, ...] = GENERATED_ROWS
    signal: float = 1.4
    click_rate: float = 0.25

    def __post_init__(self):
        """Checks ranges, written so that NaN fails."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(
                    f"--data.{name.replace('_', '-')} {value} must lie between "
                    f"{low} and {high}."
                )
        if not self.rows or not all(2 <= r <= MAX_ROWS for r in self.rows):
            raise ValueError(
                f"--data.rows {self.rows} must name at least one table, each of 2 to "
                f"{MAX_ROWS} rows."
            )
        require(
            "://" not in str(self.cache or ""),
            "--data.cache",
            self.cache,
            "a local folder",
        )
        for name in ("train", "valid", "test"):
            if getattr(self, name) is not None and self.path is None:
                raise ValueError(f"--data.{name} needs --data.path, the training file.")
        self._check_kind()
        if self.separator == "":
            raise ValueError("--data.separator is empty: name a character, as in '|'.")
        _ = self.weights_of_multi, parse_transforms(self.transform)
        if self.kind == "table":
            self._check_tables()
        if self.labels and self.label not in ("label", self.labels[0]):
            raise ValueError(
                f"--data.label {self.label} and --data.labels {' '.join(self.labels)} "
                "name labels twice: leave out --data.label."
            )
        if self.weight is not None and self.weight in (self.labels or (self.label,)):
            raise ValueError(
                f"Column {self.weight!r} is both label and weight, so that only clicks "
                "would count: correct --data.label or --data.weight."
            )

    def _check_kind(self):
        """Raises ValueError for an option that does not fit the kind of the data."""
        if self.is_generated and self.path is not None:
            raise ValueError(
                "--data.path is not used by generated data: add --data.kind table or "
                "--data.kind criteo."
            )
        check_events(self)
        if self.is_generated and self.keep_negatives < 1:
            raise ValueError(
                "Generated data keep all rows: leave out --data.keep-negatives, or "
                "lower --data.examples."
            )
        names = ("dense", "categorical") if self.kind == "criteo" else ()
        for name in (*names, *_TABLE_ONLY):
            if self.kind != "table" and getattr(self, name):
                raise ValueError(
                    f"--data.{name.replace('_', '-')} names a column of a table, and "
                    f"data of kind {self.kind} have fixed columns: leave it out, or "
                    "use --data.kind table."
                )

    @property
    def is_generated(self) -> bool:
        """Whether nothing is read from files."""
        return self.kind in ("generated", "events")

    @property
    def is_log(self) -> bool:
        """Whether rows are events with a history."""
        return self.kind == "events" or self.user is not None or bool(self.lists)

    @property
    def lists_of(self) -> dict[str, str]:
        """The columns with lists of the events before, by the columns of events."""
        if not self.lists:
            return {}
        columns = columns_of(self)
        names = (*self.categorical, *self.actions, *columns.labels, self.time or "")
        return pairs("--data.lists", self.lists, names)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the data."""
        return as_paths(self.path)

    @property
    def weights_of_multi(self) -> dict[str, str]:
        """The columns with the weights of multi-valued columns, by these."""
        return pairs("--data.multi-weights", self.multi_weights, self.multi)

    @property
    def owners(self) -> dict[str, str]:
        """The columns whose table another one uses, by that one."""
        return pairs("--data.share", self.share, _with_values(self))

    @property
    def inputs(self) -> Inputs:
        """The inputs that are made of dense columns, and of times."""
        dense = CRITEO_DENSE if self.kind == "criteo" else self.dense
        return inputs_of(self.transform, dense)

    def hash_rows(self, column: str) -> int | None:
        """Returns the rows of a hashed column's table; None if it has a vocabulary."""
        names = _with_values(self)
        own = pairs("--data.hash-sizes", self.hash_sizes, names).get(column)
        if own is not None:
            return int(own)
        is_hashed = self.encoding == "hash" or column in self.hashed
        return self.hash_buckets if is_hashed else None

    def _check_tables(self):
        """Checks `hash_sizes`, `hashed` and `share` against the columns."""
        names, owners = _with_values(self), self.owners
        sizes = pairs("--data.hash-sizes", self.hash_sizes, names)
        for column, rows in sizes.items():
            if not rows.isdecimal() or not 2 <= int(rows) <= MAX_ROWS:
                raise ValueError(
                    f"--data.hash-sizes {column}={rows} must give the column 2 to "
                    f"{MAX_ROWS} rows."
                )
        for column in self.hashed:
            if column not in names:
                raise ValueError(
                    f"--data.hashed {column!r} is not among --data.categorical and "
                    "--data.multi: name it there, too."
                )
        for column, owner in owners.items():
            if owner not in names or owner in owners:
                raise ValueError(
                    f"--data.share {column}={owner} must name a column of "
                    "--data.categorical or --data.multi with a table of its own."
                )
            if column in sizes or column in self.hashed:
                raise ValueError(
                    f"Column {column!r} uses the table of {owner!r}: leave it out of "
                    "--data.hash-sizes and --data.hashed, and name the other there."
                )

    @property
    def is_weighted(self) -> bool:
        """Whether examples have weights other than 1."""
        return self.weight is not None or self.keep_negatives < 1


# Options that name columns, beside `dense` and `categorical`.
_TABLE_ONLY = (
    *("time", "weight", "multi", "labels", "hash_sizes", "hashed", "share", "user"),
    *("context", "actions", "lists"),
)
MAX_ROWS = 2**31 - 1  # ids are int32
MAX_EXAMPLES = 2**31 - 1
_RANGES = (
    ("min_count", 1, 2**62),
    ("reserve_rows", 0, MAX_ROWS),
    ("hash_buckets", 2, MAX_ROWS),
    ("max_values", 1, MAX_SLOTS),
    ("keep_negatives", 1e-6, 1.0),
    ("valid_fraction", 0.0, 0.9),
    ("history", 1, 2**20),
    ("max_bad_rows", 0, 2**62),
    ("examples", 1, MAX_EXAMPLES),
    ("eval_examples", 1, MAX_EXAMPLES),
    ("signal", 0.0, 10.0),
    ("click_rate", 0.001, 0.999),
)


# They decide how a row is encoded, whatever the other rows are.
ENCODING_SETTINGS = tuple(
    "label labels dense categorical multi multi_weights separator encoding "
    "hash_buckets hash_sizes hashed share bad transform user lists context "
    "actions".split()
)
SETTINGS = ENCODING_SETTINGS + tuple(
    "max_values min_count reserve_rows weight keep_negatives valid_fraction time "
    "max_bad_rows".split()
)
# They decide how histories are made of the rows of an event log.
SEQUENCE_SETTINGS = ("history", "targets", "interleave", "row_capacity", "stream")


def as_paths(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns none, one or several paths."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def columns_of(config: DataConfig) -> Columns:
    """Returns the columns that `config` names; those of Criteo's files are fixed."""
    dense, parts = config.inputs
    if config.kind == "criteo":
        return Columns(
            label=CRITEO_LABEL,
            dense=(*dense,),
            categorical=(*CRITEO_CATEGORICAL, *parts),
        )
    label, *further = config.labels or (config.label,)
    return Columns(
        label=label,
        dense=(*dense,),
        categorical=(*config.context, *config.categorical, *config.actions, *parts),
        multi=config.multi,
        further_labels=tuple(further),
        user=HISTORY if config.lists else config.user,
        context=config.context,
        actions=config.actions,
    )


def features_of(config: DataConfig) -> tuple[str, ...]:
    """Returns the columns that a model's inputs are made of."""
    inputs, weights = config.inputs, config.weights_of_multi.values()
    times = (part.source for part in inputs.parts.values())
    names = (*inputs.numbers, *_with_values(config), *times, *weights)
    return tuple(dict.fromkeys((*names, *config.lists_of.values())))


def _with_values(config: DataConfig) -> tuple[str, ...]:
    """Returns the fields that are columns of their own, in order."""
    parts = config.inputs.parts
    return tuple(name for name in columns_of(config).fields if name not in parts)


def without_files(config: DataConfig) -> DataConfig:
    """Returns the options that determine the contents of shards, beside the files."""
    files = dict.fromkeys(("path", "train", "valid", "test", "cache"))
    default = DataConfig()
    read = {name: getattr(default, name) for name in SEQUENCE_SETTINGS}
    label = columns_of(config).label
    return dataclasses.replace(config, **files, **read, label=label)
