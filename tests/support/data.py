"""Small files that tests make themselves, and where the real samples lie."""

import pathlib

import pytest

from loka_jax.data import DataConfig, Position, open_data

REAL_DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"


def real(name: str) -> pathlib.Path:
    """Returns a folder of real data, or skips the test."""
    if not (REAL_DATA / name).is_dir():
        pytest.skip(f"needs the data set {name} in shared/data beside this checkout")
    return REAL_DATA / name


def criteo_line(label="1", dense=None, categories=None) -> str:
    dense = {} if dense is None else dense
    categories = {} if categories is None else categories
    fields = [dense.get(i, "3") for i in range(1, 14)]
    fields += [categories.get(i, "68fd1e64") for i in range(1, 27)]
    return "\t".join([label, *fields]) + "\n"


def write(path: pathlib.Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def table_config(path, **options) -> DataConfig:
    """Columns click, price, age, user, item; shards beside the file."""
    columns = {"label": "click", "dense": ("price", "age")}
    columns["categorical"] = ("user", "item")
    cache = str(pathlib.Path(path).parent / "cache")
    return DataConfig(
        **({"kind": "table", "path": str(path), "cache": cache} | columns | options)
    )


HEADER = "click,price,age,user,item\n"


def rows_text(count: int) -> str:
    """Rows whose price is their number, so that a test can tell them apart."""
    lines = (f"{i % 2},{i},{i % 50},u{i % 7},i{i % 11}\n" for i in range(1, count + 1))
    return "".join(lines)


def open_table(path, **options):
    return open_data(table_config(path, **options), seed=0)


def rows_of(splits, split="train"):
    """Returns a split as one batch, in the order of the files."""
    data = getattr(splits, split)
    return data.batch(Position(0, 0, 0), data.num_examples, shuffle=False)
