"""Criteo's 40 columns without a header."""

import gzip

import numpy as np
import pytest

from loka_jax.data import DataConfig, open_data
from tests.support.data import criteo_line, rows_of, write


def open_criteo(path, **options):
    cache = str(path.parent / "cache")
    config = DataConfig(kind="criteo", path=str(path), cache=cache, **options)
    return open_data(config, seed=0)


def many(count=60):
    return "".join(criteo_line(str(i % 2), {1: str(i)}) for i in range(count))


def test_columns_are_those_of_criteo(tmp_path):
    write(tmp_path / "day_0", many())
    schema = open_criteo(tmp_path / "day_0").train.schema
    assert schema.dense[0] == "I1" and schema.dense[-1] == "I13"
    assert schema.categorical[0] == "C1" and schema.categorical[-1] == "C26"


def test_gzip_gives_the_same(tmp_path):
    write(tmp_path / "a.tsv", many())
    (tmp_path / "b.gz").write_bytes(gzip.compress(many().encode()))
    plain, packed = (
        rows_of(open_criteo(tmp_path / name)) for name in ("a.tsv", "b.gz")
    )
    assert np.array_equal(plain.dense, packed.dense)
    assert np.array_equal(plain.ids, packed.ids)


def test_negative_empty_and_large_integers_stay_finite(tmp_path):
    special = criteo_line("0", {1: "-1", 2: "-3", 3: "", 4: "2147483647"}, {5: ""})
    write(tmp_path / "train.tsv", special * 3)
    valid = write(tmp_path / "valid.tsv", special)
    splits = open_criteo(tmp_path / "train.tsv", valid=valid)
    batch = rows_of(splits, "valid")
    want = [-np.log(2), -np.log(4), 0.0, np.log1p(2147483647)]
    np.testing.assert_allclose(batch.dense[0, :4], want, rtol=1e-6)
    assert batch.ids[0, 4] == 0
    assert splits.report["totals"]["negative"] == 8
    assert splits.report["totals"]["missing"] == 8


def test_quotes_mean_nothing(tmp_path):
    line = criteo_line("1", {}, {1: '"abc'})
    write(tmp_path / "train.tsv", line + many())
    report = open_criteo(tmp_path / "train.tsv").report
    assert sum(report["examples"].values()) == 61


def test_a_table_with_other_columns_is_refused(tmp_path):
    write(tmp_path / "clicks.csv", "label,a,b\n1,2,3\n")
    with pytest.raises(ValueError, match="1 columns in row 1, expected 40 .* by tabs"):
        open_criteo(tmp_path / "clicks.csv")


def test_short_row_is_named(tmp_path):
    write(tmp_path / "a.tsv", many(5) + "1\t2\n")
    with pytest.raises(ValueError, match="a.tsv row 6 has 2 columns, expected 40"):
        open_criteo(tmp_path / "a.tsv")


def test_text_among_the_integers_is_named(tmp_path):
    write(tmp_path / "a.tsv", many(5) + criteo_line("1", {3: "x"}))
    with pytest.raises(ValueError, match="a.tsv row 6 column 'I3' holds 'x'"):
        open_criteo(tmp_path / "a.tsv")
