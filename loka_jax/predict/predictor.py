"""A trained run as a function from raw rows to scores.

It needs the run's folder and nothing else: configuration, encoding, plan and weights
are in there. Batches, padding and the compiled program are those of an evaluation, so
equal rows in equal order get equal scores, bit for bit.
"""

import collections
import itertools
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Array

from loka_jax import nn
from loka_jax.data import Position
from loka_jax.data.blocks import Block, find_columns
from loka_jax.data.capacities import ladder
from loka_jax.data.config import features_of
from loka_jax.data.crosses import CrossedDataset, crosses_of
from loka_jax.data.events import batch_of
from loka_jax.data.reader import ShardDataset
from loka_jax.data.records import Encoding
from loka_jax.data.saved_encoding import load_encoding
from loka_jax.data.sequences import (
    MOST_CANDIDATES,
    Layout,
    Shape,
    are_candidates,
    candidate_batches,
    rows_of_lists,
)
from loka_jax.data.values import Counts
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.predict.trained import read_trained
from loka_jax.terminal import one_line
from loka_jax.train import metrics
from loka_jax.train.calibration import Calibration
from loka_jax.train.config import Config
from loka_jax.train.folder.source_run import open_run
from loka_jax.train.model import candidate_layout
from loka_jax.train.plan_files import saved_plan
from loka_jax.train.state import TrainState
from loka_jax.train.step import compiled_eval_step, past_first_steps

_GROUP_BYTES = 1 << 28  # of raw rows that are encoded together
MEANT = "is meant by --data.where"  # a column of blocks of an event log
_REFUSAL = (
    "which is not in the run's vocabulary, and the run has --data.bad strict: correct "
    "it."
)


class Predictor:
    """A trained run that scores rows."""

    def __init__(
        self,
        config: Config,
        encoding: Encoding,
        step: int,
        state: TrainState,
        run_step: Any,
        calibration: Calibration | None = None,
    ):
        """Takes the parts of a run; `load` reads them from its folder."""
        self.calibration = calibration
        self.config, self.encoding, self.step = config, encoding, step
        self._state, self._run_step = state, run_step
        self._crosses = crosses_of(config.embedding.crosses, encoding.schema)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the labels that are predicted."""
        return self.encoding.schema.labels

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that a row must have.

        Of an event log these are also user, time and labels, some of which are empty.
        """
        config, schema = self.encoding.config, self.encoding.schema
        names = features_of(config)
        if config.time is not None and config.is_log:
            names = (*names, config.time)
        if config.user is not None:
            names = (*names, config.user, *schema.labels)
        return tuple(dict.fromkeys(names))

    def scores(self, rows: Any, counts: Counts | None = None) -> np.ndarray:
        """Returns the click probability of each row, float32, `1 / (1 + exp(-logit))`.

        The scores of T tasks are [N, T]. Of an event log only the rows without a label
        are scored, in their order, each on the earlier ones of its user with a label.

        Args:
            rows: a pandas data frame, a pyarrow table, or a dict of columns; the label
                is not needed, and columns that the run does not know are ignored.
            counts: counts missing and unknown values by column.

        Raises:
            ValueError: if a column is missing, or holds a value that is refused, or
                the rows are no table.

        Warns:
            UserWarning: if all values of a column are unknown.
        """
        table = _table(rows)
        places = find_columns("the table", self.columns, table.column_names)
        table = table.select(places).rename_columns(self.columns)
        numbers = np.arange(1, table.num_rows + 1, dtype=np.int64)
        block = Block(table, numbers, "the table")
        counts = counts or Counts()
        scored = self.scored([block], counts)
        parts = [self._no_scores(), *(scores for _, scores in scored)]
        for warning in counts.warnings("the rows"):
            warnings.warn(warning.removeprefix("Warning: "), stacklevel=2)
        return np.concatenate(parts)

    def scored(
        self, blocks: Iterable[Block], counts: Counts
    ) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yields the rows of the blocks with their `scores`, in their order.

        Memory is bounded, however many blocks there are, unless they are an event log.
        A score that is no number is a ValueError.
        """
        for table, logits in self.with_logits(blocks, counts):
            yield table, _probabilities(logits)

    def with_logits(
        self, blocks: Iterable[Block], counts: Counts, *, judged: bool = False
    ) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yields the rows of the blocks with their logits, likewise.

        Args:
            judged: of an event log, yields the rows with a label in place of those
                without.
        """
        if self.config.data.is_log:
            yield from self._candidates([*blocks], counts, judged)
            return
        waiting: collections.deque[pa.Table] = collections.deque()

        def records() -> Iterator[np.ndarray]:
            for group in _groups(blocks):
                waiting.append(pa.concat_tables([block.table for block in group]))
                yield self.encoding.records(
                    group, counts, labels="none", unknown_refusal=self._refusal
                )

        ready = self._no_scores()
        for logits in self._logits(records()):
            ready = np.concatenate([ready, logits])
            while waiting and len(ready) >= (size := waiting[0].num_rows):
                yield waiting.popleft(), ready[:size]
                ready = ready[size:]

    @property
    def _refusal(self) -> str | None:
        """What is wrong with an unknown value, if it is refused."""
        return _REFUSAL if self.encoding.config.bad == "strict" else None

    def _candidates(
        self, blocks: list[Block], counts: Counts, judged: bool
    ) -> Iterator[tuple[pa.Table, np.ndarray]]:
        """Yields the rows of an event log without a label, or those with one.

        Of a table with a column `MEANT` those that are meant, on the histories of all.
        """
        schema = self.encoding.schema
        records = self.encoding.records(
            blocks, counts, labels="some", unknown_refusal=self._refusal
        )
        if not len(records):
            return
        table = pa.concat_tables([block.table for block in blocks])
        if self.encoding.config.lists:
            is_new, records["user"] = rows_of_lists(records)
            past, new = records[~is_new], records[is_new]
            yield table, self._logits_of_candidates(past, new)
            return
        has_none = are_candidates(records)
        is_new = ~has_none if judged else has_none
        if MEANT in table.column_names:
            is_new = is_new & np.asarray(table.column(MEANT))
        if not is_new.any():
            what = "no row meant has" if judged else "all rows meant have"
            remedy = (
                "write labels" if judged else "leave it empty in those to be scored"
            )
            raise ValueError(
                f"{what} a value in column {schema.label!r}: {remedy}; earlier events "
                "with a label are histories."
            )
        past, new = records[~has_none], records[is_new]
        yield table.filter(pa.array(is_new)), self._logits_of_candidates(past, new)

    def _logits_of_candidates(self, past: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Returns the logits of new events on the histories of past ones."""
        schema, config = self.encoding.schema, self.config
        logits = np.zeros((len(new), len(schema.labels)), np.float32)
        layout = candidate_layout(config, schema)
        shapes = _shapes(layout, config.loop.batch_size)

        def launched() -> Iterator[tuple[Array, np.ndarray]]:
            for arrays, _, numbers in candidate_batches(past, new, layout, shapes):
                seen, batch = metrics.init(tasks=len(schema.labels)), batch_of(arrays)
                yield self._run_step(self._state, seen, batch)[1], numbers

        for found, numbers in _one_ahead(launched()):
            own = np.asarray(found)[: len(numbers)]
            logits[numbers] = own.reshape(len(numbers), -1)
        return self._calibrated(logits if len(schema.labels) > 1 else logits[:, 0])

    def _calibrated(self, logits: np.ndarray) -> np.ndarray:
        return logits if self.calibration is None else self.calibration.of(logits)

    def _no_scores(self) -> np.ndarray:
        num_tasks = len(self.tasks)
        return np.zeros(0 if num_tasks == 1 else (0, num_tasks), np.float32)

    def _logits(self, records: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the logits of all records, batch by batch."""

        def launched() -> Iterator[tuple[Array, int]]:
            size, num_tasks = self.config.loop.batch_size, len(self.tasks)
            for rows, count in _batches(records, size):
                stored = ShardDataset(self.encoding.schema, rows, "the rows")
                data = CrossedDataset(stored, self._crosses)
                batch = data.batch(Position(0, 0, 0), size, shuffle=False)
                seen = metrics.init(tasks=num_tasks)
                yield self._run_step(self._state, seen, batch)[1], count

        for logits, count in _one_ahead(launched()):
            yield self._calibrated(np.asarray(logits)[:count])


def load(
    run: str | os.PathLike,
    *,
    plan: Literal["saved", "off"] = "saved",
    shards: int = 1,
) -> Predictor:
    """Returns a trained run, ready to score rows.

    Its weights are those that its final evaluation judged: the best ones if it kept
    them (`plateau_patience`), else the newest.

    Args:
        run: the folder of the run, its `--workdir`.
        plan: "saved" runs each site as in training; "off" runs all by XLA in the
            model's recipe, on machines that lack the kernels of the saved plan.
        shards: devices over which the rows of the tables are spread, a power of two;
            for tables that one device does not hold. The run may have had others.

    Raises:
        ValueError: if the folder holds no run, none of its checkpoints is whole, it was
            trained on generated clicks, or there are too few devices.
    """
    source = open_run(pathlib.Path(run), best=True)
    config, saved = source.config, source.saved
    encoding = load_encoding(source.encoding())
    trained = read_trained(source, encoding.schema, shards)
    sites = trained.model.list_sites(DispatchPlan())
    if plan == "saved":
        choices = saved_plan(saved.meta["plan"], sites).choices
        model = nn.Planned(config.model, choices)
    else:
        # Without a choice kernels would run where this machine has them.
        model = nn.Planned(config.model.clone(implementation="xla"), ())
    model = past_first_steps(model, trained.state)
    run_step = compiled_eval_step(model, trained.placement)
    own = saved.step, trained.state, run_step, source.calibration()
    return Predictor(config, encoding, *own)


def _shapes(layout: Layout, batch_size: int) -> list[Shape]:
    """Returns the shapes of batches of candidates, in rising order."""
    most = batch_size if layout.one_candidate else MOST_CANDIDATES
    rows = ladder(batch_size * layout.longest + most)
    return [Shape(count, batch_size, most) for count in reversed(rows)]


def _one_ahead[T](launched: Iterable[T]) -> Iterator[T]:
    """Yields results, each when the next has begun.

    The device computes a batch while the host makes the next one.
    """
    ahead: Any = itertools.pairwise(itertools.chain(launched, [None]))
    return (one for one, _ in ahead)


def _groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yields the blocks in groups that are encoded in one call."""
    group: list[Block] = []
    for block in blocks:
        group.append(block)
        if sum(one.nbytes for one in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def _batches(
    records: Iterable[np.ndarray], size: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the records `size` by `size`, with the number of those that count.

    The last batch is padded with the first records, as an evaluation pads it.
    """
    first = waiting = None
    for part in records:
        first = part[:0] if first is None else first
        if len(first) < size:
            first = np.concatenate([first, part[: size - len(first)]])
        waiting = part if waiting is None else np.concatenate([waiting, part])
        full = len(waiting) // size * size
        for start in range(0, full, size):
            yield waiting[start : start + size], size
        waiting = waiting[full:]
    if waiting is not None and first is not None and len(waiting):
        padding = np.resize(first, size - len(waiting))
        yield np.concatenate([waiting, padding]), len(waiting)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of logits that are numbers."""
    if lost := np.count_nonzero(np.isnan(logits)):
        raise ValueError(
            f"{lost:,} of {logits.size:,} scores are no numbers: the run's weights are "
            "not all finite, or too large. Train it again with a lower --optim.lr."
        )
    return metrics.probabilities(logits)


def _table(rows: Any) -> pa.Table:
    """Returns a user's rows as a table."""
    if isinstance(rows, Mapping):
        rows = {name: _column(name, values) for name, values in rows.items()}
        if len({len(column) for column in rows.values()}) > 1:
            lengths = ", ".join(f"{name} {len(x)}" for name, x in rows.items())
            raise ValueError(f"the columns differ in length ({lengths}): align them.")
    try:
        return pa.table(rows)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"the rows are no table ({one_line(error)}): give a data frame, a pyarrow "
            "table, or a dict of columns."
        ) from None


def _column(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        return pa.array(values)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"column {name!r} is no list of values of one type ({one_line(error)}): "
            "convert it."
        ) from None
