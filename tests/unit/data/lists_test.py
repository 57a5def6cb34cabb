"""Multi-valued columns, from lists or separated text to padded batches."""

import gzip

import chex
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import DataConfig, Position, open_data
from tests.support.data import open_table, real, rows_of, write

TAGS = [["a", "b"], None, [], ["a", None, "c"], ["b"], ["a", "a", "b", "c"]] * 20
SCORES = [
    None if t is None else [i + j / 4 for j in range(len(t))]
    for i, t in enumerate(TAGS)
]
COLUMNS = {"dense": (), "categorical": (), "multi": ("tags",), "valid_fraction": 0.2}


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


def lists_of(bag):
    return [row[row >= 0].tolist() for row in bag.ids]


def test_lists_are_padded_to_the_longest_of_training(tmp_path):
    splits = opened(tmp_path)
    schema = splits.train.schema
    assert (schema.vocab_sizes, schema.slots) == ((4,), (4,))
    (bag,) = rows_of(splits).bags
    assert bag.ids.dtype == np.int32 and bag.weights is None
    ids = {"a": 1, "b": 2, "c": 3}  # by frequency
    want = [tuple(ids[v] for v in t or [] if v is not None) for t in TAGS]
    parts = [lists_of(rows_of(splits, split).bags[0]) for split in ("train", "valid")]
    assert sorted(map(tuple, parts[0] + parts[1])) == sorted(want)
    missing = [splits.report["splits"][s]["totals"] for s in ("train", "valid")]
    assert sum(part["missing"] for part in missing) == 20  # null values in lists
    assert "first 4 values of a list are used, the most in" in splits.report["notes"][0]


@pytest.mark.parametrize("options", [{}, {"multi_weights": ("tags=scores",)}])
def test_lists_and_separated_text_give_the_same_batches(tmp_path, options):
    one = opened(tmp_path / "a", **options)
    path = as_csv(tmp_path / "b")
    other = open_table(path, separator="|", **(COLUMNS | options))
    for split in ("train", "valid"):
        chex.assert_trees_all_equal(rows_of(one, split), rows_of(other, split))
    assert one.identity["vocabulary"] == other.identity["vocabulary"]


@pytest.mark.parametrize(
    "kind",
    [pa.large_list(pa.string()), pa.list_(pa.dictionary(pa.int8(), pa.string()))],
    ids=str,
)
def test_every_type_of_list_gives_the_same_batches(tmp_path, kind):
    table = table_of(tags=pa.array(TAGS, pa.list_(pa.string())).cast(kind))
    chex.assert_trees_all_equal(
        rows_of(opened(tmp_path / "a")), rows_of(opened(tmp_path / "b", table))
    )


def test_lists_of_a_fixed_size_and_of_numbers_are_read(tmp_path):
    values = [[i % 3, 7] if i % 5 else None for i in range(120)]
    table = table_of(tags=pa.array(values, pa.list_(pa.int64(), 2)))
    splits = opened(tmp_path, table)
    assert splits.train.schema.slots == (2,)
    assert set(map(len, lists_of(rows_of(splits).bags[0]))) == {0, 2}


def test_weights_stay_with_their_values(tmp_path):
    splits = opened(tmp_path, multi_weights=("tags=scores",))
    (bag,) = rows_of(splits).bags
    assert splits.train.schema.weighted_multi == ("tags",)
    filled = bag.ids >= 0
    assert not bag.weights[~filled].any()
    steps = [
        np.unique(np.diff(w[f])).tolist()
        for w, f in zip(bag.weights, filled, strict=True)
    ]
    assert [0.25, 0.5] not in steps and [0.5] in steps  # a null was left out with its
    assert [0.25] in steps


def test_longer_lists_are_cut_and_counted(tmp_path):
    splits = opened(tmp_path, max_values=2)
    assert splits.train.schema.slots == (2,)
    assert splits.report["totals"]["cut lists"] == 20
    assert (
        "the first 2 values of a list are used, the limit" in splits.report["notes"][0]
    )
    whole = opened(tmp_path / "whole")
    for split in ("train", "valid"):
        want = rows_of(whole, split).bags[0].ids[:, :2]
        assert np.array_equal(rows_of(splits, split).bags[0].ids, want)


def test_hashed_lists_need_no_vocabulary(tmp_path):
    splits = opened(tmp_path, encoding="hash", hash_buckets=50)
    assert splits.train.schema.vocab_sizes == (50,)
    assert splits.train.schema.slots == (4,)
    assert rows_of(splits).bags[0].ids.max() < 50


def test_values_of_a_list_unknown_in_training_have_id_0(tmp_path):
    valid = as_csv(tmp_path / "v", [["a", "new"]], [[1, 1]])
    path = as_csv(tmp_path / "t")
    columns = COLUMNS | {"separator": "|", "valid": valid}
    splits = open_table(path, **columns)
    assert lists_of(rows_of(splits, "valid").bags[0]) == [[1, 0]]
    assert splits.report["splits"]["valid"]["totals"] == {"oov": 1}
    with pytest.raises(ValueError, match="row 1 column 'tags' holds 'new', which is"):
        open_table(path, unknown="error", **columns)


def test_a_padded_batch_has_fixed_shapes(tmp_path):
    train = opened(tmp_path).train
    last = train.num_batches(64) - 1
    for step in (0, last):
        batch = train.batch(Position(0, step, 0), 64, shuffle=True)
        assert batch.ids.shape == (64, 0) and batch.bags[0].ids.shape == (64, 4)


def test_text_without_a_separator_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'tags' holds string, no lists: .*separator"):
        open_table(as_csv(tmp_path), **COLUMNS)


def test_lists_as_single_values_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'tags' holds .* name it with --data.multi"):
        opened(tmp_path, multi=(), categorical=("tags",))


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ("1|-2", "has the weight -2 in column 'scores'"),
        ("1|nan", "has the weight nan in column 'scores'"),
        ("1|inf", "has the weight inf in column 'scores'"),
        ("1|", "has the weight nan in column 'scores', where .* none may be missing"),
        ("1", "has 2 values in column 'tags' and 1 weights in 'scores'"),
    ],
)
def test_weights_of_values_are_checked_by_row(tmp_path, weights, what):
    path = as_csv(tmp_path, [["a"], ["b"], ["a", "b"]], [[1], [1], [weights]])
    options = COLUMNS | {"separator": "|", "multi_weights": ("tags=scores",)}
    with pytest.raises(ValueError, match=f"clicks.csv row 3 {what}"):
        open_table(path, **options)


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1])
def test_a_stored_id_of_a_list_is_checked_again(tmp_path, bad):
    train = opened(tmp_path).train
    words = train._words[0].copy()
    words[5, -1] = bad
    train._words = [words]
    with pytest.raises(ValueError, match=f"column 'tags' holds id {bad}, outside"):
        train.batch(Position(0, 0, 0), train.num_examples, shuffle=False)


def test_shards_tell_their_lists(tmp_path):
    want = opened(tmp_path, multi_weights=("tags=scores",))
    (folder,) = (tmp_path / "cache").iterdir()
    splits = open_data(DataConfig(kind="table", path=str(folder)), seed=0)
    assert splits.train.schema == want.train.schema
    chex.assert_trees_all_equal(rows_of(splits), rows_of(want))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"multi_weights": ("item=w",)}, "must be COLUMN=VALUE; the columns are tags"),
        ({"multi_weights": ("tags=w", "tags=v")}, "names 'tags' twice"),
        ({"separator": ""}, "--data.separator is empty"),
        ({"max_values": 0}, "--data.max-values 0 must lie between"),
        ({"kind": "criteo"}, "--data.multi names a column of a table"),
    ],
)
def test_options_that_cannot_be_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        DataConfig(**({"kind": "table", "multi": ("tags",)} | options))


def movielens(folder):
    """Writes the ratings with the genres of the film, and returns the file's path."""
    source = real("movielens_100k")
    names = [line.split("|")[0] for line in gzip.open(source / "u.genre.gz", "rt")]
    genres = {}
    for line in gzip.open(source / "u.item.gz", "rt", encoding="latin-1"):
        parts = line.rstrip("\n").split("|")
        flags = zip(names, parts[5:], strict=False)
        genres[int(parts[0])] = "|".join(name for name, flag in flags if flag == "1")
    ratings = np.loadtxt(gzip.open(source / "u.data.gz", "rt"), np.int64)
    lines = (f"{int(r > 3)},{u},{i},{t},{genres[i]}\n" for u, i, r, t in ratings)
    return write(folder / "u.csv", "click,user,item,time,genres\n" + "".join(lines))


def test_movielens_genres_are_a_multi_valued_column(tmp_path):
    splits = open_table(
        movielens(tmp_path),
        dense=(),
        categorical=("user", "item"),
        multi=("genres",),
        separator="|",
        time="time",
    )
    schema = splits.train.schema
    assert schema.fields == ("user", "item", "genres")
    assert schema.vocab_sizes[2] == 19 + 1 and schema.slots == (6,)
    lengths = np.concatenate(
        [(rows_of(splits, s).bags[0].ids >= 0).sum(1) for s in ("train", "valid")]
    )
    assert len(lengths) == 100_000 and lengths.min() == 1
    assert 2.0 < lengths.mean() < 2.3
