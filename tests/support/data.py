"""Small files that tests make themselves, and how they are opened."""

import functools
import pathlib

from loka_jax.data import DataConfig, Position, open_data
from loka_jax.data.files import reader_of

HEADER = "click,price,age,user,item\n"


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


def read_in_small_parts(monkeypatch, block_bytes=500) -> None:
    """Makes blocks so small that the files of tests have several."""

    def in_small_parts(config, path):
        return functools.partial(reader_of(config, path), block_bytes=block_bytes)

    monkeypatch.setattr("loka_jax.data.split.reader_of", in_small_parts)
    monkeypatch.setattr("loka_jax.data.convert.PENDING_BYTES", 1200)
