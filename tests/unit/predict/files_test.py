"""Files of rows to files of scores: columns, order, refusals, and no halves."""

import pytest
from pyarrow import csv, parquet

from loka_jax.predict import score_file
from tests.support.predict import predictor_of, sigmoid, write

LINES = ["1,-2,u1,3\n", "0,1.5,new,7\n", "0,0,u1,9\n", "1,4,é,7\n", "0,3,u1,3\n"]
PRICES = [-2, 1.5, 0, 4, 3]


@pytest.fixture
def source(tmp_path):
    """A file of five rows."""
    return write(tmp_path / "new.csv", LINES)


def test_scores_stand_beside_their_keys_in_their_order(tmp_path, source):
    write(source, [LINES[0], "1,2\n", *LINES[1:]])  # one row is bad
    model, _ = predictor_of(tmp_path, max_bad_rows=1)
    out, rows = tmp_path / "scores.parquet", []
    keys = ("label", "item")  # one that the model does not read, and another
    scored = score_file(model, source, out, keys=keys, progress=rows.append)
    table = parquet.read_table(out)
    assert table.column_names == ["label", "item", "score"]
    assert table["item"].to_pylist() == ["3", "7", "9", "7", "3"]
    assert table["label"].to_pylist() == ["1", "0", "0", "1", "0"]
    assert table["score"].to_pylist() == sigmoid(PRICES).tolist()
    assert (scored.rows, scored.bad_rows, rows[-1]) == (5, 1, 5)
    assert 0 < scored.seconds < 60
    expected = {"price": {"negative": 1}, "user": {"oov": 1}, "item": {"oov": 1}}
    assert scored.counts["columns"] == expected


def test_each_label_has_a_column_named_after_it(tmp_path, source):
    model, _ = predictor_of(tmp_path, label="click", labels=("click", "buy"))
    score_file(model, source, tmp_path / "s.csv")
    table = csv.read_csv(tmp_path / "s.csv")
    assert table.column_names == ["score_click", "score_buy"]
    others = [-x - 1 for x in PRICES]
    for name, logits in (("score_click", PRICES), ("score_buy", others)):
        found = table[name].to_numpy().astype("f4")
        assert found.tolist() == sigmoid(logits).tolist()


def test_every_row_has_a_score_or_is_named(tmp_path, source):
    model, _ = predictor_of(tmp_path)
    write(source, ['1,2,"u1,3\n', *LINES, '0,1,"u1,7\n'])
    with pytest.raises(ValueError, match="new.csv row 1 has a quote out of place"):
        score_file(model, source, tmp_path / "s.csv")
    write(source, [f"1,2,u{i},{100 + i}\n" for i in range(5)])
    scored = score_file(model, source, tmp_path / "s.csv")
    (warning,) = scored.warnings
    assert scored.rows == 5 and "no value of column 'item'" in warning


def test_wrong_names_are_refused_before_anything_is_read(tmp_path, source):
    model, _ = predictor_of(tmp_path)
    model.scored = lambda *_: pytest.fail("read the rows")
    out = tmp_path / "s.csv"
    (tmp_path / "there.csv").write_text("mine")
    for path, to, keys, said in (
        (tmp_path / "gone.csv", out, (), "gone.csv does not exist"),
        (source, tmp_path / "s.json", (), "must end in .parquet or .csv"),
        (source, tmp_path / "there.csv", (), "exists already: remove it"),
        (source, out, ("user", "user"), "user user: name each column once"),
        (source, out, ("score",), "score is the name of the new column"),
    ):
        with pytest.raises(ValueError, match=said):
            score_file(model, path, to, keys=keys)
    assert (tmp_path / "there.csv").read_text() == "mine" and not out.exists()


def test_rows_that_cannot_be_scored_leave_nothing(tmp_path):
    model, _ = predictor_of(tmp_path)
    for text, keys, said in (
        ("price,user\n1,u1\n", (), "no column 'item', only price, user"),
        ("price,user,item\n2,u1,3\n", ("age",), "no column 'age'"),
        ("price,user,item\n2,u,3\nx,u,3\n", (), "row 2 column 'price' holds 'x'"),
        ("price,user,item\n", (), "no rows"),
    ):
        (tmp_path / "new.csv").write_text(text)
        with pytest.raises(ValueError, match=said):
            score_file(model, tmp_path / "new.csv", tmp_path / "s.csv", keys=keys)
        assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_a_failure_after_rows_were_written_leaves_nothing(tmp_path, source):
    model, _ = predictor_of(tmp_path)
    out = tmp_path / "s.parquet"

    def fail(rows):
        assert not out.exists() and len(list(tmp_path.iterdir())) == 2
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        score_file(model, source, out, progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


def test_several_files_are_scored_and_of_them_some_rows(tmp_path):
    model, _ = predictor_of(tmp_path)
    for day in (1, 2):
        folder = tmp_path / "logs" / f"dt=2026-11-0{day}"
        folder.mkdir(parents=True)
        write(folder / "part.csv", LINES[:day])
    out, keys = tmp_path / "s.parquet", ("dt", "price")

    def scored(path, **options):
        out.unlink(missing_ok=True)
        score_file(model, path, out, keys=keys, **options)
        table = parquet.read_table(out)
        assert (
            table["score"].to_pylist()
            == sigmoid([float(x) for x in table["price"].to_pylist()]).tolist()
        )
        return [int(day[-1]) for day in table["dt"].to_pylist()]

    logs = tmp_path / "logs"
    assert scored(logs) == scored(f"{logs}/*/part.csv") == [1, 2, 2]
    assert scored([str(logs / f"dt=2026-11-0{day}") for day in (2, 1)]) == [2, 2, 1]
    assert scored(logs, where="dt>2026-11-01 and price<0") == [2]
    with pytest.raises(ValueError, match="holds such rows: correct --data.where"):
        scored(logs, where="dt=2026-12-01")
