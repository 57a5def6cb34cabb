"""NE of `--config table` on a dozen logs, beside regressions with second-order crosses.

    python experiments/bench/against_regression.py --folder LOGS --out tables.json

The regression is not that of a run: scikit-learn's, on the raw columns. It has weights
for standardized numbers, their squares and products, for each value, and for each pair
of values of two columns, hashed into 2^22; its L2 is chosen on validation rows (a tenth
of the training rows, unless a log has some). Each model trains at several seeds in each
recipe, by the defaults of `--config table`.

The file is written after every run. The same command trains only the runs that it
lacks. Logs of MADE need no folder.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import tempfile
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tyro
from scipy import sparse
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from experiments.bench import logs
from experiments.bench import result as results
from experiments.bench.paired_seeds import describe, train_once
from experiments.configs.generated import FP8

_BUCKETS = 1 << 22
_INVERSE_L2 = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_NO_VALUE = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        folder: of the public logs; None for the made ones only.
        only: names of logs; all if empty.
        seeds: their number.
        recipes: the arms.
        model: `--model` of the runs.
    """

    folder: pathlib.Path | None = None
    only: tuple[str, ...] = ()
    seeds: int = 5
    recipes: tuple[str, ...] = (FP8, "bf16")
    model: str = "dlrm"


def main(arguments: Arguments) -> None:
    """Fits, trains, prints and writes."""
    result = _begun(arguments)
    makers = {maker.__name__: maker for maker in logs.MADE}
    if arguments.folder is not None:
        makers |= {
            x.__name__: functools.partial(x, arguments.folder) for x in logs.PUBLIC
        }
    names = [name for name in makers if name in (arguments.only or makers)]
    with tempfile.TemporaryDirectory() as folder:
        made = {name: makers[name]() for name in names}
        options = {n: log.write(pathlib.Path(folder) / n) for n, log in made.items()}
        for name, log in made.items():
            if name not in result["logs"]:
                result["logs"][name] = {
                    "best_ne": log.best_ne,
                    "runs": {},
                } | regression(log)
                results.write(arguments.out, result)
        cases = itertools.product(range(arguments.seeds), names, arguments.recipes)
        for seed, name, recipe in results.in_time(cases, result, arguments):
            log = result["logs"][name]
            runs = log["runs"].setdefault(recipe, {})
            if str(seed) not in runs:
                extra = [f"--data.{k}={v}" for k, v in options[name].items()]
                extra += ["--model", arguments.model]
                runs[str(seed)] = _kept(train_once("table", recipe, seed, extra))
                ne, against = runs[str(seed)]["ne"], log["regression_ne"]
                print(f"{name} {recipe} {seed}: NE {ne:.5f}; {against:.5f}", flush=True)
            arms = log.setdefault("arms", {})
            arms[recipe] = {"ne": describe([run["ne"] for run in runs.values()])}
    _print(result)


def _begun(arguments: Arguments) -> dict[str, Any]:
    """Returns the result to go on with."""
    if arguments.out is not None and arguments.out.exists():
        return json.loads(arguments.out.read_text())
    return results.head("against_regression", arguments) | {"logs": {}}


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns what is kept of the summary of a run."""
    names = "seconds", "steps", "final_state", "commit"
    return {
        "ne": summary["final_eval"]["ne"],
        "auc": summary["final_eval"]["auc"],
        "fp8_sites": summary["sites"]["fp8"],
        **{name: summary[name] for name in names},
    }


def regression(log: logs.Log) -> dict[str, Any]:
    """Returns NE on the test rows of the regression with crosses, L2 and weights."""
    train, valid = log.train, log.valid
    if valid is None:
        train, valid = _a_tenth_aside(train)
    features = _Features(train, log.label, log.numbers)
    x, y = features.of(train), _labels(train, log.label)
    kept = np.unique(x.indices)  # of values that were seen
    x = x[:, kept]
    sides = [
        (features.of(t)[:, kept], _labels(t, log.label)) for t in (valid, log.test)
    ]
    best: tuple[float, float, float] | None = None
    model = LogisticRegression(warm_start=True, max_iter=300, tol=1e-5)
    for inverse in _INVERSE_L2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says where 300 steps are too few
            model.set_params(C=inverse).fit(x, y)
        on_valid, on_test = (_ne(model.decision_function(a), b) for a, b in sides)
        if best is not None and on_valid > best[0]:
            break
        best = on_valid, on_test, 1 / inverse
    assert best is not None
    return {
        "regression_ne": best[1],
        "regression_valid_ne": best[0],
        "l2": best[2],
        "weights": len(kept),
        "rows": train.num_rows,
    }


def _a_tenth_aside(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns all but a tenth, and the tenth: by time if there is one, else drawn."""
    rows = np.arange(table.num_rows)
    if "time" not in table.column_names:
        rows = np.random.default_rng(1).permutation(rows)
    cut = len(rows) * 9 // 10
    return table.take(rows[:cut]), table.take(rows[cut:])


def _labels(table: pa.Table, label: str) -> np.ndarray:
    return table[label].to_numpy().astype(int)


def _ne(logits: np.ndarray, labels: np.ndarray) -> float:
    mean = np.full(len(labels), labels.mean())
    return log_loss(labels, expit(logits)) / log_loss(labels, mean)


class _Features:
    """A table's row of features, by what its training rows tell of each column."""

    def __init__(self, train: pa.Table, label: str, numbers: tuple[str, ...]):
        fields = [x for x in train.schema if x.name not in (label, "time")]
        is_real = pa.types.is_floating
        self.numbers = [x.name for x in fields if is_real(x.type) or x.name in numbers]
        self.values = [x.name for x in fields if x.name not in self.numbers]
        raw = self._raw(train)
        self.mean, self.deviation = np.nanmean(raw, 0), np.nanstd(raw, 0)

    def _raw(self, table: pa.Table) -> np.ndarray:
        columns = [pc.cast(table[x], pa.float64()).to_numpy() for x in self.numbers]
        x = np.stack(columns, 1) if columns else np.zeros((table.num_rows, 0))
        return np.sign(x) * np.log1p(np.abs(x)) if self.values else x

    def of(self, table: pa.Table) -> sparse.csr_matrix:
        x = (self._raw(table) - self.mean) / np.maximum(self.deviation, 1e-9)
        x = np.clip(np.nan_to_num(x), -5, 5)
        left, right = np.triu_indices(x.shape[1])
        dense = np.hstack([x, x[:, left] * x[:, right]])
        hashed = _hashed([_codes(table[name]) for name in self.values], len(x))
        return sparse.csr_matrix(sparse.hstack([dense, hashed]))


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """Returns a hash of each value of each row, [N, most values of a row]."""
    if not pa.types.is_list(column.type):
        return _hashes(column)[:, None]
    array = column.combine_chunks()
    assert isinstance(array, pa.ListArray)
    lengths = array.value_lengths().to_numpy()
    codes = np.full((len(array), lengths.max()), _NO_VALUE, np.uint64)
    codes[np.arange(codes.shape[1]) < lengths[:, None]] = _hashes(array.flatten())
    return codes


def _hashes(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    encoded = pc.fill_null(pc.cast(column, pa.string()), "").dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    assert isinstance(encoded, pa.DictionaryArray)
    by_value = [_of_text(text) for text in encoded.dictionary.to_pylist()]
    return np.array(by_value, np.uint64)[encoded.indices.to_numpy()]


def _of_text(text: str) -> int:
    """Returns FNV-1a of a text, 64 bits."""
    code = 0xCBF29CE484222325
    for byte in text.encode():
        code = (code ^ byte) * 0x100000001B3 % 2**64
    return code


def _hashed(fields: list[np.ndarray], rows: int) -> sparse.csr_matrix:
    """Returns indicators of values, and of pairs of values of two columns."""
    alone = [
        (_mixed(codes, i + 1), codes != _NO_VALUE) for i, codes in enumerate(fields)
    ]
    parts = list(alone)
    for (a, has_a), (b, has_b) in itertools.combinations(alone, 2):
        pairs = _mixed(a[:, :, None] * np.uint64(3) + b[:, None, :], 0)
        parts.append(
            (
                pairs.reshape(rows, -1),
                (has_a[:, :, None] & has_b[:, None]).reshape(rows, -1),
            )
        )
    at = [np.broadcast_to(np.arange(rows)[:, None], has.shape)[has] for _, has in parts]
    columns = [(codes % np.uint64(_BUCKETS))[has] for codes, has in parts]
    if not parts:
        return sparse.csr_matrix((rows, 0))
    where = np.concatenate(at), np.concatenate(columns).astype(np.int64)
    ones = np.ones(len(where[0]))
    return sparse.csr_matrix((ones, where), (rows, _BUCKETS))


def _mixed(codes: np.ndarray, salt: int) -> np.ndarray:
    """Returns SplitMix64 of codes."""
    x = codes + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _print(result: dict[str, Any]) -> None:
    """Prints NE of each log and arm, mean and deviation over seeds."""
    for name, log in result["logs"].items():
        print(name, f"regression {log['regression_ne']:.5f}", log.get("arms"))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
