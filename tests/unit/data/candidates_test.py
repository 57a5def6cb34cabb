"""Candidates: each history once, strictly earlier, of any number of candidates."""

import numpy as np
import pytest

from loka_jax.data.events import batch_of
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.sequences import (
    MOST_CANDIDATES,
    Shape,
    are_candidates,
    candidate_batches,
    candidate_shape,
)
from tests.unit.data.events_test import ALL, BOTH, LAST, SCHEMA, sequences


def records_of(*rows):
    """Returns events (user, time, item, label); the reason is 1 + item % 3."""
    records = np.zeros(len(rows), record_dtype_of(SCHEMA))
    for record, (user, time, item, label) in zip(records, rows, strict=True):
        record["user"], record["time"], record["label"] = user, time, label
        record["ids"] = 1 + user % 2, item, 1 + item % 3
    return records


def batches_of(records, layout, batch_size=8, known=None):
    """Yields the batches of the records without a label, or of known ones."""
    is_new = are_candidates(records)
    past, new = records[~is_new], records[is_new] if known is None else known
    shapes = [Shape(2048, batch_size, MOST_CANDIDATES)]
    for arrays, _, numbers in candidate_batches(past, new, layout, shapes):
        yield batch_of(arrays), numbers


NEW = np.nan
RECORDS = records_of(
    (7, 5, 90, NEW),  # of user 7 after events 1 to 4, with 91
    (7, 1, 1, 1),
    (3, 9, 92, NEW),  # without a history
    (7, 3, 3, 1),
    (7, 5, 5, 0),  # of the candidates' time
    (7, 2, 2, 0),
    (7, 5, 91, NEW),
    (7, 4, 4, 0),
    (7, 9, 93, NEW),  # after 5, too
    (8, 1, 6, 1),
    (2, 1, 94, NEW),
)


def found(layout, records=RECORDS):
    """Returns the rows of each sequence, by its first candidate, and the numbers."""
    by_candidate, numbers = {}, []
    for batch, own in batches_of(records, layout):
        many = batch.events.candidates
        for rows, count in zip(sequences(batch), many, strict=True):
            if rows:
                by_candidate[rows[-count][1]] = [row[1:] for row in rows], count
        targets = batch.events.targets[: len(own)]
        items = batch.events.ids[targets, 0]
        new = records[are_candidates(records)]["ids"][:, 1]
        assert (new[own] == items).all()
        assert not batch.events.answers[targets].any()
        numbers += own.tolist()
    assert sorted(numbers) == list(range(np.isnan(records["label"]).sum()))
    return by_candidate


def test_candidates_of_a_user_and_time_share_one_history_of_labelled_events():
    rows = found(LAST)
    assert rows.keys() == {90, 93, 92, 94}
    context, candidate = (-1, -1, 0), lambda item: (item, 0, 0)
    past = [(1, 2, 2), (2, 3, 1), (3, 1, 2), (4, 2, 1)]
    assert rows[90] == ([context, *past, candidate(90), candidate(91)], 2)
    assert rows[93] == ([context, *past[1:], (5, 3, 1), candidate(93)], 1)
    assert rows[92] == ([context, candidate(92)], 1)


def test_interleaved_events_and_windows_are_as_in_training():
    both, windows = found(BOTH)[93][0], found(ALL)[93][0]
    assert both[1:3] == [(2, 0, 0), (2, 3, 1)] and len(both) == 1 + 2 * 4 + 1
    assert windows[1:3] == [(3, 0, 0), (3, 1, 2)] and len(windows) == 1 + 2 * 3 + 1


@pytest.mark.parametrize("layout", [LAST, BOTH, ALL])
def test_one_of_many_candidates_has_the_rows_that_it_has_alone(layout):
    (together, _), *_ = batches_of(RECORDS, layout)
    alone = RECORDS[~are_candidates(RECORDS) | (RECORDS["ids"][:, 1] == 91)]
    (single, _), *_ = batches_of(alone, layout)
    size = single.events.offsets[1]
    start = np.flatnonzero(together.events.ids[:, 0] == 91)[0] - size
    rows = np.append(np.arange(start, start + size - 1), start + size)  # without 90
    for name in ("ids", "answers", "positions", "ages"):
        x, y = (getattr(b.events, name) for b in (together, single))
        assert np.array_equal(x[rows], y[:size]), name


def test_more_candidates_than_a_batch_takes_are_of_several():
    rows = [(1, 1, 1, 1)] + [(1, 2, 2 + i, NEW) for i in range(MOST_CANDIDATES + 3)]
    records = records_of(*rows)
    batches = list(batches_of(records, LAST, 4))
    assert [len(own) for _, own in batches] == [MOST_CANDIDATES, 3]
    assert all(batch.events.ids[1, 0] == 1 for batch, _ in batches)
    sizes = {batch.weights.shape for batch, _ in batches}
    assert sizes == {(MOST_CANDIDATES,)}
    users = records_of(*[(i, 1, i, NEW) for i in range(9)])
    assert [len(own) for _, own in batches_of(users, LAST, 4)] == [*(3, 3, 3)]


def test_batches_of_candidates_have_histories_of_all_lengths():
    users = np.random.default_rng(0).integers(1, 200, 64)
    rows = [(u, t, t, 1) for u, count in enumerate(users) for t in range(count)]
    rows += [(u, 999, 999, NEW) for u in range(len(users))]
    layout, records = LAST._replace(history=200), records_of(*rows)
    is_new = are_candidates(records)
    shapes = [Shape(rows, 8, MOST_CANDIDATES) for rows in range(128, 2048, 128)]
    batches = candidate_batches(records[~is_new], records[is_new], layout, shapes)
    rows = [int(arrays.events[4][-1]) for arrays, *_ in batches]
    assert len(rows) == 8 and max(rows) < 1.2 * min(rows)


def test_each_candidate_has_a_history_of_its_own_if_it_changes_its_rows():
    rows = found(LAST._replace(one_candidate=True))
    assert rows.keys() == {90, 91, 93, 92, 94}
    (first, one), (second, other) = rows[90], rows[91]
    assert one == other == 1 and len(first) == 6 and first[:-1] == second[:-1]


def test_known_events_are_judged_on_those_before_them():
    known = RECORDS[~are_candidates(RECORDS)]
    ((batch, own),) = batches_of(known, LAST, known=known)
    past = {
        rows[-1][1]: [row[1] for row in rows[1:-1]] for rows in sequences(batch) if rows
    }
    assert past == {1: [], 2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [1, 2, 3, 4], 6: []}
    targets = batch.events.targets[: len(own)]
    assert (batch.events.ids[targets, 0] == known["ids"][own, 1]).all()
    assert not batch.events.answers[targets].any()


def test_a_batch_has_the_smallest_shape_that_holds_it_and_no_more_than_the_largest():
    sizes = [candidate_shape(rows) for rows in (8, 16, 24)]
    rows = [(user, 9, user, NEW) for user in range(12)]
    rows += [(1, time, 20 + time, 1) for time in range(6)]
    rows += [(1, 9, 40 + i, NEW) for i in range(30)]  # more than 19 beside a history
    records = records_of(*rows)
    is_new = are_candidates(records)
    past, new = records[~is_new], records[is_new]
    found, batches = [], []
    for batch, shape, numbers in candidate_batches(past, new, LAST, sizes):
        assert len(batch.events[0]) == shape.rows and len(batch.labels) >= len(numbers)
        assert batch.events[4][-1] <= shape.rows
        found += numbers.tolist()
        batches.append((shape.rows, len(numbers)))
    assert sorted(found) == list(range(42))
    # User 1 with four events fills one; again, beside four others; and the rest.
    assert batches == [(24, 19), (8, 4), (24, 15), (8, 4)]
