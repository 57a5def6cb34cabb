"""Tables with a label, as files: made ones with a known best NE, and public logs.

A log is read from the folder of its own name below a folder of the user's: Frappe,
MovieLens 100k, ASSISTments 2017, and samples of Criteo's.
"""

import gzip
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet
from scipy.special import expit


class Log(NamedTuple):
    """Rows to learn from, and rows to judge by.

    Attributes:
        best_ne: NE of the true probabilities on the labels of `test`, where known.
        valid: rows to choose settings by; None to set some of `train` aside.
        numbers: columns of integers that are no names of values.
    """

    label: str
    train: pa.Table
    test: pa.Table
    best_ne: float | None = None
    valid: pa.Table | None = None
    numbers: tuple[str, ...] = ()

    def write(self, folder: pathlib.Path) -> dict[str, str]:
        """Writes a Parquet file for each part, and returns `--data` options."""
        folder.mkdir(parents=True, exist_ok=True)
        options = {"label": self.label}
        parts = {"path": self.train, "test": self.test, "valid": self.valid}
        for name, table in parts.items():
            if table is not None:
                parquet.write_table(table, folder / f"{name}.parquet")
                options[name] = str(folder / f"{name}.parquet")
        return options


def _made(columns: dict, logit: np.ndarray, seed: int, tests: int) -> Log:
    """Draws labels; the last rows are those of the test."""
    p = expit(logit)
    label = (np.random.default_rng(seed).random(len(p)) < p).astype(int)
    table, rows = pa.table({**columns, "click": label}), len(p) - tests
    y, p = label[rows:], p[rows:]
    loss, rate = -np.where(y == 1, np.log(p), np.log1p(-p)).mean(), y.mean()
    base = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    best = float(loss / base)
    return Log("click", table.slice(0, rows), table.slice(rows), best)


def _zipf(draw: np.random.Generator, rows: int, values: int, power: float):
    p = 1 / np.arange(1, values + 1) ** power
    return draw.choice(values, rows, p=p / p.sum())


def _with_rate(logit: np.ndarray, rate: float) -> np.ndarray:
    """Returns logits whose mean probability is the rate."""
    shift = 0.0
    for _ in range(60):
        shift += np.log(rate / expit(logit + shift).mean())
    return logit + shift


def _named(prefix: str, ids: np.ndarray) -> list[str]:
    return [f"{prefix}{i}" for i in ids]


def small() -> Log:
    """Returns 2,000 rows of two columns of values, which interact, and two numbers."""
    draw, rows = np.random.default_rng(11), 22_000
    country, device = _zipf(draw, rows, 20, 0.5), _zipf(draw, rows, 15, 0.5)
    x, spend = draw.normal(0, 1, rows), draw.lognormal(1, 1, rows)
    pairs = draw.normal(0, 0.5, (20, 15))
    logit = draw.normal(0, 0.7, 20)[country] + draw.normal(0, 0.5, 15)[device]
    logit += pairs[country, device] + 0.6 * x - 0.4 * np.log(spend)
    columns = {
        "country": _named("c", country),
        "device": _named("d", device),
        "x": x.round(4),
        "spend": spend.round(3),
    }
    return _made(columns, _with_rate(logit, 0.25), 21, 20_000)


def rare_clicks() -> Log:
    """Returns 100,000 rows of which 0.5 % are clicks."""
    draw, rows = np.random.default_rng(12), 160_000
    user, ad = _zipf(draw, rows, 5000, 0.7), _zipf(draw, rows, 800, 0.9)
    hour = _zipf(draw, rows, 24, 0.3)
    users, ads = draw.normal(0, 0.8, (5000, 3)), draw.normal(0, 0.8, (800, 3))
    logit = draw.normal(0, 0.8, 5000)[user] + draw.normal(0, 0.8, 800)[ad]
    logit += 0.5 * (users[user] * ads[ad]).sum(1) + draw.normal(0, 0.3, 24)[hour]
    columns = {"user": _named("u", user), "ad": _named("a", ad), "hour": hour}
    return _made(columns, _with_rate(logit, 0.005), 22, 60_000)


def new_ids() -> Log:
    """Returns ten days whose items live for a day each."""
    draw, rows = np.random.default_rng(13), 100_000
    day = np.repeat(np.arange(10), rows // 10)
    user, item = _zipf(draw, rows, 4000, 0.6), day * 60 + _zipf(draw, rows, 60, 0.7)
    category, segment = draw.integers(0, 12, 2000)[item], user % 40
    quality, taste = draw.normal(0, 0.6, 2000), draw.normal(0, 0.8, (40, 12))
    logit = draw.normal(0, 0.5, 4000)[user] + quality[item] + taste[segment, category]
    columns = {
        "time": pa.array(np.datetime64("2026-11-01") + day),
        "user": _named("u", user),
        "segment": _named("s", segment),
        "item": _named("i", item),
        "category": _named("k", category),
    }
    return _made(columns, _with_rate(logit, 0.1), 23, 10_000)


def only_dense() -> Log:
    """Returns rows of eight numbers, with products, a square and a sine of them."""
    draw, rows = np.random.default_rng(14), 60_000
    x = draw.normal(0, 1, (rows, 8))
    logit = 0.8 * x[:, 0] - 0.5 * x[:, 1] + 0.6 * x[:, 0] * x[:, 2] - 0.3 * x[:, 3]
    logit += 0.5 * np.sin(2 * x[:, 4]) + 0.4 * x[:, 5] ** 2 + 0.4 * x[:, 6] * x[:, 7]
    x[:, 3] = np.exp(x[:, 3])
    columns = {f"x{i}": x[:, i].round(4) for i in range(8)}
    return _made(columns, _with_rate(logit, 0.3), 24, 20_000)


def only_categorical() -> Log:
    """Returns rows of six columns of values, three pairs of which interact."""
    draw, rows = np.random.default_rng(15), 80_000
    sizes = 50, 40, 30, 200, 10, 8
    ids = [_zipf(draw, rows, size, 0.6) for size in sizes]
    logit = sum(draw.normal(0, 0.3, k)[c] for k, c in zip(sizes, ids, strict=True))
    for a, b, deviation in ((0, 1, 0.6), (2, 4, 0.5), (4, 5, 0.4)):
        logit += draw.normal(0, deviation, (sizes[a], sizes[b]))[ids[a], ids[b]]
    columns = {f"c{i}": _named("v", c) for i, c in enumerate(ids)}
    return _made(columns, _with_rate(logit, 0.2), 25, 20_000)


def tastes() -> Log:
    """Returns 24,000 rows of users whose tastes for tags decide, with lists."""
    draw = np.random.default_rng(0)
    taste = draw.normal(0, 1, (120, 30))
    tags = [draw.choice(30, draw.integers(1, 6), replace=False) for _ in range(440)]

    def days(rows: int, users: int, items: int) -> dict:
        user, item = draw.integers(0, users, rows), draw.integers(0, items, rows)
        price = draw.lognormal(2, 1, rows).round(2)
        liking = [taste[u, tags[i]].mean() for u, i in zip(user, item, strict=True)]
        return {
            "user": user,
            "item": item,
            "price": price,
            "logit": 3 * np.array(liking) - 0.5 * np.log(price),
        }

    parts = days(20_000, 100, 400), days(4000, 110, 420)
    rows = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
    columns = {
        "user": _named("u", rows["user"]),
        "item": _named("i", rows["item"]),
        "tags": [_named("t", tags[i]) for i in rows["item"]],
        "price": rows["price"],
    }
    return _made(columns, rows["logit"], 20, 4000)


def _shuffled(table: pa.Table, tests: int) -> tuple[pa.Table, pa.Table]:
    order = np.random.default_rng(0).permutation(table.num_rows)
    return table.take(order[:-tests]), table.take(order[-tests:])


def frappe(folder: pathlib.Path) -> Log:
    """Returns Frappe as split for FuxiCTR: ten columns of values."""
    names = "train_reconstructed", "test", "valid"
    paths = (folder / "frappe_x1" / f"frappe_x1_{name}.csv.gz" for name in names)
    train, test, valid = map(csv.read_csv, paths)
    return Log("label", train, test, valid=valid)


def attribution(folder: pathlib.Path) -> Log:
    """Returns the sample of Criteo's attribution log."""
    folder /= "criteo_attribution_small"
    train, test = (
        parquet.read_table(folder / f"criteo_attribution_small_{name}.parquet").drop(
            ["__index_level_0__"]
        )
        for name in ("train", "valid")
    )
    return Log("click", train.select(test.column_names), test)


def criteo(folder: pathlib.Path) -> Log:
    """Returns the sample of Criteo's display log: 13 numbers, 26 columns of values."""
    values = [f"C{i}" for i in range(1, 27)]
    numbers = tuple(f"I{i}" for i in range(1, 14))
    names = ["label", *numbers, *values]

    def read(name: str) -> pa.Table:
        return csv.read_csv(
            folder / "criteo_kaggle_sample" / f"criteo_merged_{name}.tsv.gz",
            read_options=csv.ReadOptions(column_names=names),
            parse_options=csv.ParseOptions(delimiter="\t"),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(values, pa.string()),
                strings_can_be_null=True,
            ),
        )

    return Log("label", read("train_16031"), read("test_10000"), numbers=numbers)


def movielens(folder: pathlib.Path) -> Log:
    """Returns MovieLens 100k: whether a rating is above 3, in a random split."""
    folder /= "movielens_100k"
    u_data = csv.read_csv(
        folder / "u.data.gz",
        read_options=csv.ReadOptions(column_names=["user", "item", "rating", "time"]),
        parse_options=csv.ParseOptions(delimiter="\t"),
    )

    def lines(name: str) -> dict[int, list[str]]:
        with gzip.open(folder / f"{name}.gz", "rt", encoding="latin-1") as file:
            rows = (line.rstrip("\n").split("|") for line in file)
            return {int(row[0]): row for row in rows}

    users = list(map(lines("u.user").__getitem__, u_data["user"].to_pylist()))
    items = list(map(lines("u.item").__getitem__, u_data["item"].to_pylist()))
    columns = {
        "user": u_data["user"],
        "item": u_data["item"],
        "age": [int(row[1]) for row in users],
        "gender": [row[2] for row in users],
        "occupation": [row[3] for row in users],
        "zip": [row[4][:2] for row in users],
        "genres": [
            [str(genre) for genre, flag in enumerate(row[5:]) if flag == "1"]
            for row in items
        ],
        "label": (u_data["rating"].to_numpy() > 3).astype(int),
    }
    return Log("label", *_shuffled(pa.table(columns), 10_000))


def assistments(folder: pathlib.Path) -> Log:
    """Returns answers of ASSISTments 2017, the last fifth of each pupil's as test."""
    events = csv.read_csv(folder / "assistments_2017" / "events.csv.gz")
    table = events.select(["user", "item", "skill", "correct"])
    user, position = events["user"].to_numpy(), events["position"].to_numpy()
    is_late = position >= 0.8 * np.bincount(user)[user]
    order = np.random.default_rng(0).permutation(len(user))
    train, test = order[~is_late[order]][:200_000], order[is_late[order]][:50_000]
    return Log("correct", table.take(train), table.take(test))


MADE: tuple[Callable[[], Log], ...] = (
    tastes,
    small,
    rare_clicks,
    new_ids,
    only_dense,
    only_categorical,
)
PUBLIC: tuple[Callable[[pathlib.Path], Log], ...] = (
    criteo,
    attribution,
    movielens,
    assistments,
    frappe,
)
