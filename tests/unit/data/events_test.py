"""Event logs: histories are strictly earlier events, in jagged rows, read anywhere."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from loka_jax.data import DataConfig, Position, Schema, open_data
from loka_jax.data.batch import Part, alike, ids_of_labels
from loka_jax.data.capacities import capacities, ladder, most_rows
from loka_jax.data.events import EventDataset, dealt
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.sequences import Layout, make_log
from tests.support.data import write

LAST = Layout(4, 1, False, False, None, actions=1)
BOTH = LAST._replace(is_interleaved=True)
ALL = LAST._replace(is_all=True)
SCHEMA = Schema(
    label="click",
    dense=(),
    categorical=("segment", "item", "reason"),
    vocab_sizes=(3, 1000, 4),
    user="user",
    context=("segment",),
    actions=("reason",),
)


def log_of(users=(7, 3, 0, 1), ties=False, shuffled=True):
    """Events of users 0, 1, ... with so many each; item i is the i-th of all.

    Item i has time i, label i % 2 and reason 1 + i % 3. With ties, two have a time.
    """
    count = sum(users)
    records = np.zeros(count, record_dtype_of(SCHEMA))
    records["user"] = np.repeat(np.arange(len(users)), users)
    item = np.arange(count)
    records["time"] = item // 2 if ties else item
    records["label"] = item % 2
    records["ids"] = np.stack([1 + records["user"] % 2, item, 1 + item % 3], axis=1)
    if shuffled:
        records = records[np.random.default_rng(0).permutation(count)]
    return make_log([records[: count // 2], records[count // 2 :]])


def dataset(layout, split=0, *, stream=False, **options):
    return EventDataset(SCHEMA, log_of(**options), split, layout, stream=stream)


def whole(data):
    return data.batch(Position(0, 0, 0), data.num_examples, shuffle=False)


def sequences(batch):
    """Yields the events of each sequence: (row, item, reason, answer)."""
    events = batch.events
    for start, stop in zip(events.offsets[:-1], events.offsets[1:], strict=True):
        rows = range(start, stop)
        columns = (*events.ids[start:stop].T, events.answers[start:stop, 0])
        yield list(zip(rows, *(x.tolist() for x in columns), strict=True))


def check_no_future(data, log=None):
    """Fails if a row that a target sees is of an event that is not strictly earlier."""
    log = log or data._log
    batch = whole(data)
    events, item_at = batch.events, {int(x): i for i, x in enumerate(log.ids[:, 1])}
    for rows in sequences(batch):
        of_row = {row: item_at[item] for row, item, *_ in rows if item >= 0}
        mine = [row for row in events.targets[batch.weights > 0] if row in of_row]
        for target in mine:
            anchor = of_row[target]
            for row, _, reason, answer in rows:
                if row not in of_row or row > target:
                    continue
                event, known = of_row[row], answer > 0 or reason > 0
                assert log.first[event] == log.first[anchor]  # of one user
                is_earlier = log.times[event] < log.times[anchor]
                assert is_earlier if known else is_earlier or event == anchor


@pytest.mark.parametrize("layout", [LAST, BOTH, ALL])
@pytest.mark.parametrize("split", [0, 1])
def test_a_history_holds_strictly_earlier_events_alone(layout, split):
    check_no_future(dataset(layout, split))


def test_events_of_one_time_are_in_no_history_of_each_other():
    check_no_future(dataset(LAST, ties=True))


@pytest.mark.parametrize("layout", [LAST, BOTH, ALL])
def test_a_planted_event_of_the_future_is_found(layout):
    data = dataset(layout, users=(9, 8))
    leaking = data._log._replace(before=data._log.before + 1)  # the event itself
    if layout.is_all:  # its answers in place of the candidate's

        def leak(*args, **options):
            batch = plain(*args, **options)
            batch.events.answers[batch.events.targets] = 1
            return batch

        plain, data.batch = data.batch, leak
    else:
        data._log = leaking
    with pytest.raises(AssertionError):
        check_no_future(data, log_of(users=(9, 8)))


def test_rows_are_the_newest_events_then_the_candidate_without_answers():
    data = dataset(LAST, users=(7,), shuffled=False, split=1)
    batch = whole(data)  # of events 3 to 6
    items = [[item for _, item, *_ in rows] for rows in sequences(batch)]
    assert items == [[-1, 0, 1, 2, 3], [-1, *range(5)], [-1, *range(1, 6)]] + [
        [-1, *range(2, 7)]
    ]
    last = next(iter(sequences(batch)))
    assert [row[2:] for row in last] == [(-1, 0), (1, 1), (2, 2), (3, 1), (0, 0)]
    events = batch.events
    assert events.positions[:5].tolist() == [4, 3, 2, 1, 0]
    assert events.ages[:5].tolist() == [0, 3, 2, 1, 0]
    assert batch.labels.tolist() == [1, 0, 1, 0] and batch.weights.all()
    assert batch.ids.tolist() == [[1]] * 4 and events.candidates.tolist() == [1] * 4
    assert events.contextual.tolist() == [1] * 4
    assert ids_of_labels(batch).tolist() == [[1, item, 0] for item in range(3, 7)]


def test_interleaved_events_are_two_rows_without_and_with_answers():
    rows = list(sequences(whole(dataset(BOTH, users=(4,), shuffled=False, split=1))))[0]
    assert [row[1:] for row in rows] == [
        *[(-1, -1, 0), (0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 2, 2), (2, 0, 0)]
    ]


def test_of_windows_each_event_of_the_split_is_a_target_once_with_a_past():
    data = dataset(ALL, users=(23, 9), shuffled=False)
    other = EventDataset(SCHEMA, data._log, 1, ALL)
    found = []
    for part in (data, other):
        batch = whole(part)
        assert batch.events.contextual is None  # they would see what comes later
        real = batch.weights > 0
        targets = batch.events.targets[real]
        items = batch.events.ids[targets, 0]
        found += items.tolist()
        assert (batch.labels[real] == items % 2).all()
        assert (batch.events.ids[targets, 1] == 0).all()  # its reason
        for rows in sequences(batch):
            own = [row for row, *_ in rows if row in targets.tolist()]
            if own and rows[1][1] not in (0, 23):  # not the first of its user
                assert own[0] - rows[1][0] >= ALL.history  # half of them, two rows each
    assert sorted(found) == list(range(32))


def test_of_windows_ages_and_positions_tell_nothing_of_later_events():
    short, long = (
        whole(dataset(ALL, users=(n,), shuffled=False)).events for n in (2, 8)
    )
    for name in ("ages", "positions"):
        assert np.array_equal(getattr(short, name)[:5], getattr(long, name)[:5])


def test_events_of_one_time_are_refused_where_their_order_counts():
    with pytest.raises(ValueError, match="--data.targets last"):
        dataset(ALL, ties=True)


def test_an_empty_history_is_the_candidate_alone():
    batch = whole(dataset(LAST, users=(1, 1)))
    assert batch.events.offsets.tolist() == [0, 2]  # after the sample's field
    assert batch.events.targets.tolist() == [1] and batch.weights.tolist() == [1]


def test_a_batch_is_padded_by_sequences_without_rows_and_rows_without_events():
    data = dataset(LAST)
    batch = data.batch(Position(0, 0, 0), 8, shuffle=False)
    lengths = np.diff(batch.events.offsets)
    assert (lengths[5:] == 0).all() and (lengths[:5] > 0).all()
    assert batch.weights.tolist() == [1] * 5 + [0] * 3
    rest = slice(int(batch.events.offsets[-1]), None)
    assert (batch.events.ids[rest] == -1).all()


def test_capacities_are_few_and_hold_what_they_must():
    sizes = ladder(most_rows(LAST, 1000))
    assert sizes[0] >= 1000 * LAST.longest and len(sizes) < 25
    assert sizes[-1] == 128 and all(size % 128 == 0 for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)
    assert most_rows(LAST._replace(limit=300), 1000) == 384


@pytest.mark.parametrize("usual", [1, 9_000, 16_000, 21_000, 22_000])
def test_no_other_capacity_is_near_the_usual_one(usual):
    most = most_rows(LAST._replace(history=20), 1000)
    sizes = capacities(most, usual)
    assert sizes == sorted(set(sizes), reverse=True) and sizes[0] == most
    assert usual <= sizes[-1] < max(usual * 1.125 + 128, 129)
    assert all(size > 1.125 * usual for size in sizes[:-1])


@pytest.mark.parametrize("layout", [LAST, ALL])
@pytest.mark.parametrize("devices", [1, 4])
def test_batches_of_a_log_have_one_shape(layout, devices):
    users = tuple(np.random.default_rng(0).integers(1, 45, 40).tolist())
    data = dataset(layout._replace(history=30), users=users, split=1).over(devices)
    size = 8
    steps = data.num_batches(size)
    assert steps > 3
    places = [Position(*divmod(i, steps), 0) for i in range(4 * steps)]
    batches = [data.batch(x, size, shuffle=True).events for x in places]
    assert len({len(x.ages) for x in batches}) == 1
    in_order = [data.batch(x, size, shuffle=False).events for x in places[:steps]]
    assert len({len(x.ages) for x in in_order}) == 1


def test_a_batch_has_an_example_of_each_range_of_lengths():
    users = tuple(np.random.default_rng(0).integers(1, 45, 40).tolist())
    data = dataset(LAST._replace(history=99), users=users, split=1)
    size, count = 8, data.num_examples
    events = [data.batch(Position(2, i, 5), size, shuffle=True) for i in range(6)]
    lengths = np.stack([np.sort(np.diff(x.events.offsets)) for x in events])
    whole_log = np.sort(np.diff(whole(data).events.offsets))
    bounds = np.arange(size + 1) * count // size
    assert (lengths >= whole_log[bounds[:-1]]).all()
    assert (lengths <= whole_log[bounds[1:] - 1]).all()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [4, 7, 64])
def test_each_example_is_in_an_epoch_once(batch_size, shuffle):
    data = dataset(LAST, users=(30, 20, 1), split=1)
    items = []
    for step in range(data.num_batches(batch_size)):
        batch = data.batch(Position(1, step, 3), batch_size, shuffle=shuffle)
        real = batch.weights > 0
        assert real.all() or step == data.num_batches(batch_size) - 1
        items += ids_of_labels(batch)[real, 1].tolist()
    assert sorted(items) == sorted(ids_of_labels(whole(data))[:, 1].tolist())


def test_batches_of_other_shapes_are_no_call():
    small, large = whole(dataset(LAST)), whole(dataset(LAST, users=(99, 99)))
    pairs = [(Position(0, i, 0), small) for i in range(3)]
    assert alike(pairs) == [pairs]
    mixed = [*pairs, (Position(0, 3, 0), large)]
    assert alike(mixed) == [[pair] for pair in mixed]


def test_the_last_batch_of_an_epoch_has_the_rows_of_a_full_one():
    layout = LAST._replace(history=50)
    data = dataset(layout, users=(200,), shuffled=False, split=1)
    batches = [data.batch(Position(0, i, 0), 64, shuffle=False) for i in range(2)]
    assert [int((x.weights > 0).sum()) for x in batches] == [64, 36]
    assert len({len(x.events.ages) for x in batches}) == 1


def test_what_does_not_fit_is_cut_from_the_oldest_events_of_the_longest_and_counted():
    layout = LAST._replace(history=200, limit=384)
    data = dataset(layout, users=(150,), shuffled=False, split=1)
    batch = data.batch(Position(0, 0, 0), 8, shuffle=False)
    kept = np.diff(batch.events.offsets)
    full = dataset(layout._replace(limit=None), users=(150,), shuffled=False, split=1)
    lengths = np.diff(full.batch(Position(0, 0, 0), 8, shuffle=False).events.offsets)
    assert kept.sum() <= 384 and len(set(kept)) == 1
    newest = [(rows[-2][1], rows[-1][1]) for rows in sequences(batch)]
    assert all(item == candidate - 1 for item, candidate in newest)
    assert data.left_out == (lengths - kept).sum() and full.left_out == 0
    check_no_future(data)


@pytest.mark.parametrize("layout", [LAST, ALL])
def test_a_batch_is_a_pure_function_of_its_position(layout):
    data, place = dataset(layout, users=(30, 20)), Position(3, 1, 9)
    first = data.batch(place, 2, shuffle=True)
    data.batch(Position(0, 0, 0), 2, shuffle=True)
    chex.assert_trees_all_equal(first, data.batch(place, 2, shuffle=True))
    other = data.batch(Position(4, 1, 9), 2, shuffle=True)
    assert not np.array_equal(first.events.ids, other.events.ids)


def parts_of(batch, devices):
    return [
        jax.tree.map(lambda x, i=i: np.split(x, devices)[i], batch)
        for i in range(devices)
    ]


@pytest.mark.parametrize("layout", [LAST, ALL])
def test_devices_have_the_sequences_of_a_batch_and_equally_many(layout):
    users = np.random.default_rng(1).integers(1, 40, 45)
    data = dataset(layout._replace(history=64), users=users.tolist())
    size = 32
    position, how = Position(0, 1, 3), {"shuffle": True}
    batch, divided = data.batch(position, size, **how), data.over(4)
    parts = parts_of(divided.batch(position, size, **how), 4)
    rows = [int(part.events.offsets[-1]) for part in parts]
    assert sum(rows) == batch.events.offsets[-1] and max(rows) < 1.3 * min(rows)

    def told(batch):
        return sorted(tuple(row[1:] for row in rows) for rows in sequences(batch))

    assert sorted(sum(map(told, parts), [])) == told(batch)
    ids = ids_of_labels(divided.batch(position, size, **how))
    real = np.concatenate([part.weights > 0 for part in parts])
    whole_ids = ids_of_labels(batch)[batch.weights > 0]
    assert sorted(map(tuple, ids[real])) == sorted(map(tuple, whole_ids))
    # Of two processes with two devices each, each reads the parts of its own.
    for i in range(2):
        own = divided.batch(position, size, part=Part(i, 2), **how)
        chex.assert_trees_all_equal(tuple(parts_of(own, 2)), tuple(parts[2 * i :][:2]))


def test_each_device_has_its_share_of_the_most_rows():
    layout = LAST._replace(history=100, limit=4 * 128)
    data = dataset(layout, users=[120] * 8, split=1).over(4)
    batch = data.batch(Position(0, 0, 0), 16, shuffle=True)
    for part in parts_of(batch, 4):
        assert part.events.offsets[-1] <= len(part.events.ids) == 128
    assert data.left_out > 0


def test_sequences_are_dealt_by_their_work():
    events = np.array([900, 10, 10, 10, 500, 400, 10, 10])
    first, second = dealt(events, 2)
    assert len(first) == len(second) == 4
    assert sorted([*first, *second]) == [*range(8)]
    assert {0, 4, 5} & {*first} == {0}  # against the two next
    assert dealt(events, 1).tolist() == [[*range(8)]]


def test_a_stream_comes_in_the_order_of_time_and_its_windows_follow_each_other():
    data = dataset(LAST, users=(12, 9), stream=True)
    times = data._log.times[data._anchors]
    assert (np.diff(times) >= 0).all()
    one = data.batch(Position(0, 0, 0), 4, shuffle=True)
    chex.assert_trees_all_equal(one, data.batch(Position(5, 0, 3), 4, shuffle=True))
    window = data.window(4, 4)
    ahead = window.batch(Position(0, 0, 0), 4, shuffle=False)
    chex.assert_trees_all_equal(ahead, data.batch(Position(0, 1, 0), 4, shuffle=True))


TABLE = "user,when,item,why,click\n"
CONFIG = DataConfig(
    kind="table", label="click", categorical=("item",), user="user", time="when"
)


def table(tmp_path, text, **options):
    path = write(tmp_path / "log.csv", TABLE + text)
    options = {"path": path, "cache": str(tmp_path / "cache"), **options}
    return open_data(dataclasses.replace(CONFIG, **options), seed=0)


def test_a_table_of_events_becomes_histories_across_its_splits(tmp_path):
    lines = [
        f"u{i % 3},2024-01-01 00:{i:02}:00,i{i},w{i % 2},{i % 2}\n" for i in range(20)
    ]
    splits = table(tmp_path, "".join(lines[::-1]), actions=("why",), history=3)
    assert splits.train.num_examples == 18 and splits.valid.num_examples == 2
    batch = whole(splits.valid)
    assert np.diff(batch.events.offsets).tolist() == [4, 4]  # with training events
    assert batch.events.ages[:4].tolist() == [540, 360, 180, 0]  # in seconds
    assert splits.identity["sequences"]["history"] == 3
    config = dataclasses.replace(
        CONFIG, path=str(tmp_path / "log.csv"), cache=str(tmp_path / "cache"), history=5
    )
    longer = open_data(dataclasses.replace(config, actions=("why",)), seed=0)
    assert longer.folder.path == splits.folder.path  # converted once
    assert longer.identity != splits.identity


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"time": None}, "--data.time"),
        ({"dense": ("when",)}, "--data.dense"),
        ({"user": None, "stream": True}, "--data.user"),
        ({"targets": "all", "row_capacity": 99}, "--data.targets last"),
    ],
)
def test_options_that_do_not_fit_an_event_log_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(CONFIG, **options)


def test_an_event_without_a_user_is_refused(tmp_path):
    with pytest.raises(ValueError, match="row 2 has no user"):
        table(tmp_path, "u,1,a,w,0\n,2,b,w,1\n", valid_fraction=0.5)


def test_of_generated_events_the_order_says_more_than_a_bag_than_nothing():
    config = DataConfig(kind="events", rows=(9, 101), examples=4000, eval_examples=4000)
    splits = open_data(config, seed=1)
    for ne in splits.report["best_ne"].values():
        assert ne["the order"] < ne["a bag"] - 0.02 < ne["no history"] - 0.03
    users = [
        set(part._log.first[part._anchors]) for part in (splits.train, splits.test)
    ]
    assert not users[0] & users[1]
    assert abs(whole(splits.test).labels.mean() - config.click_rate) < 0.03
