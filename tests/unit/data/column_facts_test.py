"""Columns that would train on values that mean nothing are named before training."""

import gzip
import itertools

import pytest

from tests.support.data import open_table, real, write

TAGS = "abcdefgh"


def columns(tmp_path, rows, **options):
    """Returns the facts on the columns tags and id of a file with these rows."""
    lines = (f"{i % 2},1,{tags},{one}\n" for i, (tags, one) in enumerate(rows))
    source = write(tmp_path / "a.csv", "click,price,tags,id\n" + "".join(lines))
    options = {"dense": ("price",), "categorical": ("tags", "id")} | options
    return open_table(source, valid=source, **options).report["categorical"]


def lists(separator, count=200):
    pairs = itertools.cycle(itertools.permutations(TAGS, 3))
    return [separator.join(next(pairs)) for _ in range(count)]


@pytest.mark.parametrize("separator", "|; ")
def test_a_list_in_a_text_is_named(tmp_path, separator):
    rows = [(tags, "x") for tags in lists(separator)]
    facts = columns(tmp_path, rows)
    assert facts["tags"]["values"] == 200
    assert facts["tags"]["warning"].startswith(
        f"tags looks multi-valued: 100% of its rows hold {separator!r}, and 200 values "
        "are made of 8 parts"
    )
    assert facts["id"]["warning"] is None


def test_a_row_number_is_named(tmp_path):
    facts = columns(tmp_path, [(i % 9, f"r{i}") for i in range(300)])
    assert facts["id"]["warning"].startswith("id has 300 values in 300 rows")
    assert facts["tags"]["warning"] is None


@pytest.mark.parametrize(
    "values",
    [
        [f"name {i}" for i in range(40)],  # as many parts as values
        ["New York", "Los Angeles", "Boston"],
        ["a|b", *"cdefghij"],  # in few values
        ["2014-01-01"] * 3,
    ],
    ids=["distinct", "cities", "few", "dates"],
)
def test_other_texts_are_not_named(tmp_path, values):
    rows = zip(itertools.cycle(values), range(400), strict=False)
    facts = columns(tmp_path, [(value, i % 7) for value, i in rows])
    assert facts["tags"]["warning"] is None


def test_facts_count_rows_and_values(tmp_path):
    rows = [("a", "x")] * 60 + [("b", "")] * 30 + [("rare", "y")]
    facts = columns(tmp_path, rows, min_count=2, reserve_rows=5)
    assert facts["tags"] == {
        "rows": 1 + 2 + 5,
        "values": 2,
        "reserved": 5,
        "counted_rows": 91,
        "most_frequent": [["a", 60], ["b", 30], ["rare", 1]],
        "warning": None,
    }
    assert facts["id"]["most_frequent"] == [["x", 60], ["y", 1]]


def test_hashed_columns_are_counted_in_their_first_block(tmp_path):
    rows = [(tags, "x") for tags in lists("|")]
    facts = columns(tmp_path, rows, encoding="hash", hash_buckets=50)
    assert (facts["tags"]["rows"], facts["tags"]["values"]) == (50, None)
    assert "looks multi-valued" in facts["tags"]["warning"]
    assert facts["id"]["most_frequent"] == [["x", 200]]


def test_the_genres_of_movielens_are_named(tmp_path):
    folder = real("movielens_100k")

    def lines(name):
        with gzip.open(folder / name, "rt", encoding="latin-1") as file:
            return file.read().splitlines()

    names = [line.split("|")[0] for line in lines("u.genre.gz") if line]
    genres = {}
    for line in lines("u.item.gz"):
        item, *_ = parts = line.split("|")
        flags = zip(names, parts[-len(names) :], strict=True)
        genres[item] = "|".join(name for name, flag in flags if flag == "1")
    ratings = (line.split("\t") for line in lines("u.data.gz"))
    facts = columns(tmp_path, [(genres[item], user) for user, item, *_ in ratings])
    assert (
        "70% of its rows hold '|', and 216 values are made of 18 parts"
        in (facts["tags"]["warning"])
    )
    assert facts["tags"]["values"] == len(set(genres.values()))
    assert facts["id"]["warning"] is None
