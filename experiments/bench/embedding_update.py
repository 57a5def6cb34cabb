"""Measures one step of embedding lookup and update against the number of rows.

    python experiments/bench/embedding_update.py --out result.json

Step: look up B x F Zipf ids, make a gradient for each row, update the table in place
(donated). Paths, on the same table and ids:

    rowwise_adagrad, sgd    sort, segmented float32 sum, one update a row (this library)
    scatter_add             table.at[ids].add(-lr * g), XLA's float atomics on a GPU
    sum_by_row, sort        what of the first two is spent there, and on sorting alone

and, where Triton's kernels run,

    ..._triton              the same with them, sums and update in one
    ..._triton_sums         sums by Triton, update by XLA

The time of this library's updates must not grow with the rows: what growth is left is
that of cache and page misses (and, with `--ids-from table`, of more distinct ids), and
`scatter_add` shows it too. Each size is first checked against numpy on the timed
device, and against a second run, bit by bit: row-wise AdaGrad in all its forms.
"""

import dataclasses
import functools
import json
import os
import pathlib
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from loka_jax.ops import embedding
from loka_jax.optim import RowwiseAdagrad, Sgd
from loka_jax.triton import why_not_here

LEARNING_RATE = 0.01
NUM_BATCHES = 8  # rotated, so that ids and rows do not stay in a cache
ADAGRAD = RowwiseAdagrad()


class SumsAlone:
    """Row-wise AdaGrad that offers no update in place."""

    init, update = staticmethod(ADAGRAD.init), staticmethod(ADAGRAD.update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        rows: rows of the stacked table, one case each.
        dim: numbers of a row.
        batch_size: examples of a batch.
        fields: ids of an example, each from its own part of the rows.
        zipf: exponent of the ids' bounded power law; 0 draws them uniformly.
        grads: dtype of the row gradients.
        ids_from: Zipf over all rows of a table ("table"), so that larger tables have
            more distinct ids in a batch, or over as many as the smallest table has,
            spread over all rows ("smallest"): then only the table grows.
        steps: steps in one timing.
        repeats: how often each path is timed; medians and ranges are reported.
        max_gib: memory for table and state; larger cases are skipped. Three quarters
            of a GPU's memory, or 8 GiB on a CPU, if None.
    """

    out: str | None = None
    rows: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)
    dim: int = 16
    batch_size: int = 8192
    fields: int = 26
    zipf: float = 1.1
    grads: Literal["float32", "bfloat16"] = "float32"
    ids_from: Literal["table", "smallest"] = "table"
    steps: int = 20
    repeats: int = 7
    max_gib: float | None = None


def main(arguments: Arguments) -> None:
    """Checks and times every case, prints and writes the result."""
    result = _environment(arguments) | {"cases": []}
    limit_gib = arguments.max_gib or _memory_gib()
    for rows in arguments.rows:
        gib = rows * (arguments.dim + 1) * 4 / 2**30
        if gib > limit_gib:
            reason = f"table and state take {gib:.1f} GiB of {limit_gib:.1f} GiB"
            print(f"{rows:>11,} rows: skipped: {reason}")
            result["cases"].append({"rows": rows, "skipped": reason})
            continue
        case = _measure(arguments, rows) | {"gib": round(gib, 3)}
        times = ", ".join(f"{k} {v['median']:.0f}" for k, v in case["us"].items())
        print(f"{rows:>11,} rows: us a step: {times}")
        result["cases"].append(case)
    result["growth"] = _growth(result["cases"])
    print("slowest over fastest median among the sizes:", result["growth"])
    if arguments.out is not None:
        text = json.dumps(result, indent=1, allow_nan=False)
        pathlib.Path(arguments.out).write_text(text + "\n")


def _measure(arguments: Arguments, rows: int) -> dict:
    batches = _batches(arguments, rows)
    checked = {name: _check(name, arguments, rows, batches[0]) for name in ADAGRADS}
    table = jax.jit(lambda: jnp.full((rows, arguments.dim), 0.01))()
    state = jax.jit(ADAGRAD.init)(table)
    times = {name: [] for name in (*UPDATES, *PARTS)}
    for repeat in range(arguments.repeats + 1):  # the first one compiles and warms
        for name, step in (UPDATES | PARTS).items():  # interleaved: shared noise
            start = time.perf_counter()
            for i in range(arguments.steps):
                out = step(table, state, *batches[i % NUM_BATCHES])
                if name in UPDATES:
                    table, state = out
            jax.block_until_ready(out)
            seconds = time.perf_counter() - start
            if repeat:
                times[name].append(seconds / arguments.steps * 1e6)
    return {
        "rows": rows,
        "ids_a_step": arguments.batch_size * arguments.fields,
        "touched_rows_a_step": int(np.unique(np.asarray(batches[0][0])).size),
        "us": {name: _summary(values) for name, values in times.items()},
        "checked": checked,
    }


# Updates: (table, state, ids, noise) -> (table, state), in place. Parts take the same
# and return what they computed.


def _gradients(table, ids, noise):
    """Row gradients that need the lookup, as a model's do."""
    rows = embedding.lookup(table, ids)
    return (noise.astype(jnp.float32) + 1e-3 * rows).astype(noise.dtype)


def _update(optimizer, implementation, table, state, ids, noise):
    return embedding.update_rows(
        *(table, state, ids, _gradients(table, ids, noise), optimizer, LEARNING_RATE),
        enabled=jnp.asarray(True),
        implementation=implementation,
    )


def _sgd(implementation, table, state, ids, noise):
    table, _ = _update(Sgd(), implementation, table, (), ids, noise)
    return table, state


def _scatter_add(table, state, ids, noise):
    grads = _gradients(table, ids, noise)
    return table.at[ids].add(-LEARNING_RATE * grads, mode="drop"), state


def _sum_by_row(implementation, table, state, ids, noise):
    grads = _gradients(table, ids, noise)
    return embedding.sum_by_row(
        ids, grads, table.shape[0], implementation=implementation
    )


def _sort(table, state, ids, noise):
    positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jax.lax.sort((ids, positions), num_keys=1)


ADAGRADS = {"rowwise_adagrad": (ADAGRAD, "xla")}
IMPLEMENTATIONS = {"": "xla"}  # by the end of an arm's name
if why_not_here() is None:
    ADAGRADS |= {
        "rowwise_adagrad_triton": (ADAGRAD, "triton"),
        "rowwise_adagrad_triton_sums": (SumsAlone(), "triton"),
    }
    IMPLEMENTATIONS["_triton"] = "triton"
UPDATES: dict[str, Callable] = {
    name: functools.partial(_update, *v) for name, v in ADAGRADS.items()
}
PARTS: dict[str, Callable] = {"sort": _sort}
for suffix, implementation in IMPLEMENTATIONS.items():
    UPDATES[f"sgd{suffix}"] = functools.partial(_sgd, implementation)
    PARTS[f"sum_by_row{suffix}"] = functools.partial(_sum_by_row, implementation)
UPDATES["scatter_add"] = _scatter_add
UPDATES = {k: jax.jit(f, donate_argnums=(0, 1)) for k, f in UPDATES.items()}
PARTS = {k: jax.jit(f) for k, f in PARTS.items()}


def _batches(arguments: Arguments, rows: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns flat ids and the noise of their gradients, a pair for each batch."""
    per_field = rows // arguments.fields
    spec = embedding.TableSpec(
        rows=(per_field,) * (arguments.fields - 1)
        + (rows - per_field * (arguments.fields - 1),),
        dim=arguments.dim,
    )
    smallest = min(arguments.rows) // arguments.fields
    num_ids = smallest if arguments.ids_from == "smallest" else per_field
    rng = np.random.default_rng(0)
    batches = []
    for i in range(NUM_BATCHES):
        shape = (arguments.batch_size, arguments.fields)
        ranks = _zipf_ranks(rng.random(shape), num_ids, arguments.zipf)
        ids = ranks * 2_654_435_761 % per_field  # frequent rows are not neighbours
        flat = embedding.flat_ids(spec, jnp.asarray(ids, jnp.int32)).reshape(-1)
        noise = jax.random.normal(jax.random.key(i), (flat.size, arguments.dim))
        batches.append((flat, noise.astype(arguments.grads)))
    return batches


def _zipf_ranks(uniform: np.ndarray, count: int, exponent: float) -> np.ndarray:
    """Returns ranks below `count` of density (1 + rank)^-exponent, by inverse CDF."""
    power = 1 - exponent
    if abs(power) < 1e-9:
        ranks = (count + 1.0) ** uniform
    else:
        ranks = (1 + uniform * ((count + 1.0) ** power - 1)) ** (1 / power)
    return np.clip(ranks.astype(np.int64) - 1, 0, count - 1)


def _check(name: str, arguments: Arguments, rows: int, batch) -> dict:
    """Compares the touched rows after one step with numpy and with a second run.

    Raises:
        SystemExit: if they differ, for then there is nothing to time.
    """
    ids, noise = batch

    def once():
        table = jax.jit(lambda: jnp.full((rows, arguments.dim), 0.01))()
        state = jax.jit(ADAGRAD.init)(table)
        table, state = UPDATES[name](table, state, ids, noise)
        return np.asarray(table[touched]), np.asarray(state.sum_of_squares[touched])

    touched, inverse = np.unique(np.asarray(ids), return_inverse=True)
    grads = np.zeros((touched.size, arguments.dim))
    noise_and_lookup = np.asarray(noise, np.float64) + 1e-5
    np.add.at(grads, inverse, noise_and_lookup.astype(noise.dtype).astype(np.float64))
    acc = np.mean(grads**2, axis=1)
    step = LEARNING_RATE * grads / (np.sqrt(acc) + ADAGRAD.eps)[:, None]
    table, state = once()
    again = once()
    # Of the step, whose largest entries are near lr: rounding of a sum of some
    # thousand terms stays far below 1e-4 of it. A bfloat16 gradient may be rounded to
    # its other neighbour.
    error = float(np.max(np.abs(table - (0.01 - step))) / LEARNING_RATE)
    same = table.tobytes() == again[0].tobytes() and np.array_equal(state, again[1])
    limit = 1e-3 if noise.dtype == jnp.float32 else 1e-2
    if not error < limit or not same:
        what = f"{error=} of a step against numpy; same bytes: {same}"
        sys.exit(f"{name}, {rows} rows: {what}.")
    return {"error_vs_numpy": error, "rerun_is_bitwise_equal": same}


def _growth(cases: list[dict]) -> dict[str, float]:
    measured = [case["us"] for case in cases if "us" in case]
    medians = {
        name: [us[name]["median"] for us in measured] for name in (*UPDATES, *PARTS)
    }
    return {k: round(max(v) / min(v), 2) for k, v in medians.items() if v}


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
    }


def _memory_gib() -> float:
    device = jax.devices()[0]
    if device.platform == "cpu":
        return 8.0
    stats = device.memory_stats() or {}
    return 0.75 * stats.get("bytes_limit", 8 * 2**30) / 2**30


def _environment(arguments: Arguments) -> dict:
    return {
        "benchmark": "embedding_update",
        "command": shlex.join(["python", *sys.argv]),
        "arguments": dataclasses.asdict(arguments) | {"out": None},
        "device": jax.devices()[0].device_kind,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
