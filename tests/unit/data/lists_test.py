"""Multi-valued columns, from lists or separated text to padded batches."""

import chex
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import DataConfig, Position, open_data
from tests.support.data import open_table, rows_of, write

SOME = [["a", "b"], None, [], ["a", None, "c"], ["b"], ["a", "a", "b", "c"]] * 20
TAGS = [*SOME[:60], ["a", "c", "b", "a", "b"], *SOME[60:]]  # the longest in between
SCORES = [
    None if t is None else [i + j / 4 for j in range(len(t))]
    for i, t in enumerate(TAGS)
]
IDS = {"a": 1, "b": 2, "c": 3}  # by frequency
COLUMNS = {"dense": (), "categorical": (), "multi": ("tags",), "valid_fraction": 0.2}
WEIGHTED = {"multi_weights": ("tags=scores",)}


def table_of(**columns):
    base = {"click": [i % 2 for i in range(len(TAGS))], "tags": TAGS, "scores": SCORES}
    return pa.table({name: pa.array(v) for name, v in (base | columns).items()})


def opened(folder, table=None, **options):
    folder.mkdir(exist_ok=True)
    path = folder / "clicks.parquet"
    parquet.write_table(table_of() if table is None else table, path)
    return open_table(path, **(COLUMNS | options))


def as_csv(folder, tags=TAGS, scores=SCORES):
    def joined(values):
        return "|".join("" if v is None else str(v) for v in values or [])

    pairs = zip(tags, scores, strict=True)
    rows = (f"{i % 2},{joined(t)},{joined(s)}\n" for i, (t, s) in enumerate(pairs))
    folder.mkdir(exist_ok=True)
    return write(folder / "clicks.csv", "click,tags,scores\n" + "".join(rows))


def lists_of(splits):
    """Returns the ids of every list, with their weights, in the splits."""
    found = []
    for split in ("train", "valid"):
        (bag,) = rows_of(splits, split).bags
        weights = np.ones(bag.ids.shape) if bag.weights is None else bag.weights
        assert not weights[bag.ids < 0].any() or bag.weights is None
        for ids, row in zip(bag.ids, weights, strict=True):
            size = np.count_nonzero(ids >= 0)
            assert (ids[:size] >= 0).all()
            found.append((*zip(ids[:size].tolist(), row[:size].tolist(), strict=True),))
    return found


def test_lists_are_padded_to_the_longest_of_training(tmp_path):
    splits = opened(tmp_path)
    schema = splits.train.schema
    assert (schema.vocab_sizes, schema.slots) == ((4,), (5,))
    (bag,) = rows_of(splits).bags
    assert bag.ids.dtype == np.int32 and bag.weights is None
    want = [tuple((IDS[v], 1) for v in t or [] if v is not None) for t in TAGS]
    assert sorted(lists_of(splits)) == sorted(want)
    assert splits.report["totals"]["missing"] == 20  # null values in lists
    # A batch with padding rows has the shape of any other.
    for step in (0, splits.train.num_batches(64) - 1):
        batch = splits.train.batch(Position(0, step, 0), 64, shuffle=True)
        assert batch.ids.shape == (64, 0) and batch.bags[0].ids.shape == (64, 5)


def test_weights_stay_with_their_values(tmp_path):
    splits = opened(tmp_path, **WEIGHTED)
    assert splits.train.schema.weighted_multi == ("tags",)
    pairs = map(zip, [t or [] for t in TAGS], [s or [] for s in SCORES])
    want = [tuple((IDS[v], w) for v, w in x if v is not None) for x in pairs]
    assert sorted(lists_of(splits)) == sorted(want)
    (folder,) = (tmp_path / "cache").iterdir()
    again = open_data(DataConfig(kind="table", path=str(folder)), seed=0)
    assert again.train.schema == splits.train.schema
    chex.assert_trees_all_equal(rows_of(again), rows_of(splits))


@pytest.mark.parametrize("options", [{}, WEIGHTED])
def test_lists_of_every_type_and_separated_text_give_the_same_batches(
    tmp_path, options
):
    want = opened(tmp_path / "a", **options)
    kind = pa.list_(pa.dictionary(pa.int8(), pa.string()))
    table = table_of(tags=pa.array(TAGS, pa.list_(pa.string())).cast(kind))
    path = as_csv(tmp_path / "b")
    text = open_table(path, separator="|", **(COLUMNS | options))
    for other in (opened(tmp_path / "c", table, **options), text):
        for split in ("train", "valid"):
            chex.assert_trees_all_equal(rows_of(other, split), rows_of(want, split))
        assert want.identity["vocabulary"] == other.identity["vocabulary"]
    values = [[i % 3, 7] if i % 5 else None for i in range(len(TAGS))]
    fixed = table_of(tags=pa.array(values, pa.list_(pa.int64(), 2)))
    assert set(map(len, lists_of(opened(tmp_path / "d", fixed)))) == {0, 2}


def test_longer_lists_are_cut_and_counted(tmp_path):
    splits = opened(tmp_path, max_values=2)
    assert splits.train.schema.slots == (2,)
    assert splits.report["totals"]["cut lists"] == 21
    assert lists_of(splits) == [x[:2] for x in lists_of(opened(tmp_path / "whole"))]


def test_values_of_a_list_unknown_in_training_have_id_0(tmp_path):
    tags = [[], ["a", "b"], ["c"]] * 40 + [["new", "a"]]
    valid = as_csv(tmp_path / "v", tags, [[1]] * len(tags))
    columns = COLUMNS | {"separator": "|", "valid": valid}
    splits = open_table(as_csv(tmp_path / "t"), **columns)
    assert lists_of(splits)[-1] == ((0, 1), (1, 1))
    assert splits.report["splits"]["valid"]["totals"] == {"oov": 1}
    with pytest.raises(ValueError, match="row 121 column 'tags' holds 'new', which is"):
        open_table(tmp_path / "t" / "clicks.csv", bad="strict", **columns)


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ("1|-2", "has -2 in weight column 'scores'"),
        ("1|2e12", r"has 2e\+12 in weight column 'scores'"),
        ("1|", "has no value in weight column 'scores', where .* --data.multi-weights"),
        ("1", "has 2 values in column 'tags' and 1 weights in 'scores'"),
    ],
)
def test_weights_of_values_are_checked_by_row(tmp_path, weights, what):
    tags, scores = [["a"], ["b"]] * 50, [[1]] * 100
    path = as_csv(tmp_path, [*tags, ["a", "b"]], [*scores, [weights]])
    options = COLUMNS | WEIGHTED | {"separator": "|", "valid": path}
    with pytest.raises(ValueError, match=f"clicks.csv row 101 {what}"):
        open_table(path, **options)
