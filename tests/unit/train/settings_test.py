"""Settings by the rows, labels and values of a table."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from experiments.configs import get_config
from loka_jax.data import DataConfig
from loka_jax.train import settings
from loka_jax.train.settings import settings_for


def config(path, name="table", **options):
    data = DataConfig(kind="table", path=str(path), **options)
    return dataclasses.replace(get_config(name), data=data)


@pytest.fixture
def file(tmp_path):
    draw = np.random.default_rng(0)
    columns = {name: draw.integers(0, 2, 4000) for name in ("click", "buy")}
    columns |= {"user": draw.integers(0, 50, 4000), "x": draw.normal(0, 1, 4000)}
    parquet.write_table(pa.table(columns), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def chosen(file, name="table", **options):
    options = {"label": "click", "cache": str(file.parent / "cache"), **options}
    return settings_for(config(file, name, **options), lambda _: None)


def test_few_rows_have_small_batches_and_more_validation_rows(file):
    found, said = chosen(file), []
    assert found.data.categorical == ("user",) and found.data.dense == ("x",)
    assert found.data.valid_fraction == 0.2
    rows = 4000 * 0.8
    assert found.loop.batch_size == 64 and found.loop.epochs == 20
    assert found.loop.eval_every == pytest.approx(rows / 64 / 4, abs=2)
    assert found.optim.rows == "adam"
    assert found.optim.rows_l2 == pytest.approx(20 / rows, rel=0.05)
    assert found.optim.plateau_patience and found.optim.best_by == "ne"
    settings_for(config(file, label="click"), said.append)
    assert any("categorical: user (50 values)" in line for line in said)


def test_many_rows_and_huge_tables_have_others(file, monkeypatch):
    monkeypatch.setattr(settings, "_FEW_ROWS", 100)
    monkeypatch.setattr(settings, "_MANY_ROWS", 1000)
    monkeypatch.setattr(settings, "_STEPS", 4)
    monkeypatch.setattr(settings, "_HUGE_TABLES", 10)
    found = chosen(file)
    assert found.data.valid_fraction == 0.1
    assert (found.loop.batch_size, found.loop.epochs) == (512, 4)
    assert (found.optim.rows, found.optim.rows_l2) == ("rowwise_adagrad", 0.0)


def test_a_task_for_each_label(file):
    found = chosen(file, "table_mmoe", label="label", labels=("click", "buy"))
    assert found.model.num_tasks == 2 and found.data.dense == ("x",)


def test_what_is_chosen_is_chosen_again(file):
    found = chosen(file)
    assert settings_for(found, lambda _: None) == found


def test_parts_of_columns_are_made_where_they_help(tmp_path):
    draw, n = np.random.default_rng(0), 8000
    x, noise, other = draw.normal(0, 1, (3, n))
    at = np.datetime64("2026-11-01", "s") + draw.permutation(n * 360)[:n]
    hour = (at - at.astype("M8[D]")).astype(int) // 3600
    logit = 3 * (abs(x) > 1) + 2 * (hour > 12) - 2.5
    columns = {"click": draw.random(n) < 1 / (1 + np.exp(-logit)), "at": at, "x": x}
    columns |= {"noise": noise, "other": pa.array(other, mask=noise > 1)}
    parquet.write_table(pa.table(columns), tmp_path / "log.parquet")
    found = chosen(tmp_path / "log.parquet").data.transform
    own = "x=log1p,buckets:16", "other=log1p,missing", "at=hour"
    assert found == ("log1p", *own)
    said = ("standardize", "x=clip:0:1", "at=none", "other=none,buckets:4")
    kept = chosen(tmp_path / "log.parquet", transform=said).data
    assert kept.transform == ("standardize", "x=clip:0:1", "other=none,buckets:4")
    assert kept.time == "at" and kept.inputs.parts.keys() == {"other:buckets"}
