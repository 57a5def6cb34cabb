"""Times one step of embedding lookup and update against the number of rows.

    python experiments/bench/embedding_update.py --out result.json

Step: look up B x F Zipf ids, compute a gradient for each row, update the table in place
(donated). Paths, on the same table and ids:

    rowwise_adagrad         sort, segmented float32 sum, one update a row (this library)
    rowwise_adagrad_triton  the same with Triton's kernels, where they run
    scatter_add             table.at[ids].add(-lr * g), XLA's float atomics on a GPU

The time of this library's updates must not grow with the rows but for cache and page
misses and more distinct ids, which `scatter_add` shows too. Each size is first checked
against numpy on the timed device, and against a second run, bit by bit.

On a CPU: `--batch-size 64 --rows 10000 --steps 2`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bench import result as results
from experiments.bench.steps import chain_of
from loka_jax.measure.timing import time_chains
from loka_jax.ops import embedding
from loka_jax.optim import RowwiseAdagrad
from loka_jax.triton import why_not_here

LEARNING_RATE = 0.01
DIM, FIELDS = 16, 26  # columns of the table; ids of an example, each in its own rows
INITIAL = 0.01  # value of the table
ZIPF = 1.1  # exponent of the ids' power law
NUM_BATCHES = 8  # rotated, so that ids and rows do not stay in a cache
ADAGRAD = RowwiseAdagrad()
# Rounding of a float32 sum of some thousand terms stays far below it.
MAX_ERROR = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        rows: rows of the stacked table, one case each.
        batch_size: examples of a batch.
        steps: steps queued in a round.
    """

    out: pathlib.Path | None = None
    rows: tuple[int, ...] = (10**5, 10**6, 10**7, 10**8)
    batch_size: int = 8192
    steps: int = 20


def main(arguments: Arguments) -> dict[str, Any]:
    """Checks and times every case, prints, writes and returns the result."""
    result = results.head("embedding_update", arguments) | {"cases": []}
    for rows in arguments.rows:
        case = measure(arguments, rows)
        times = ", ".join(f"{k} {v['median']:.0f}" for k, v in case["us"].items())
        print(f"{rows:>11,} rows: us a step: {times}", flush=True)
        result["cases"].append(case)
        result["growth"] = _growth(result["cases"])
        results.write(arguments.out, result)
    print("slowest over fastest median among the sizes:", result["growth"])
    return result


def measure(arguments: Arguments, rows: int) -> dict[str, Any]:
    """Returns the times of all updates of a table, checked before."""
    batches = make_batches(arguments, rows)
    functions = updates()
    checked = {
        name: check(name, update, rows, batches[0])
        for name, update in functions.items()
        if name != "scatter_add"
    }
    held = [_initial(rows)]
    chains = {
        name: chain_of(lambda pair, batch, f=update: f(*pair, *batch), held, batches)
        for name, update in functions.items()
    }
    times = time_chains(chains, calls=arguments.steps)
    return {
        "rows": rows,
        "ids_a_step": arguments.batch_size * FIELDS,
        "touched_rows_a_step": int(np.unique(np.asarray(batches[0][0])).size),
        "us": {
            name: {"median": t.median_us, "min": t.min_us, "max": t.max_us}
            for name, t in times.items()
        },
        "checked": checked,
    }


def updates() -> dict[str, Any]:
    """Returns (table, state, ids, noise) -> (table, state), in place, by name."""
    functions: dict[str, Callable] = {
        "rowwise_adagrad": functools.partial(_update, "xla")
    }
    if why_not_here() is None:
        functions["rowwise_adagrad_triton"] = functools.partial(_update, "triton")
    functions["scatter_add"] = _scatter_add
    return {k: jax.jit(f, donate_argnums=(0, 1)) for k, f in functions.items()}


def _update(implementation, table, state, ids, noise):
    return embedding.update_rows(
        *(table, state, ids, _gradients(table, ids, noise), ADAGRAD, LEARNING_RATE),
        enabled=jnp.asarray(True),
        implementation=implementation,
    )


def _scatter_add(table, state, ids, noise):
    grads = _gradients(table, ids, noise)
    return table.at[ids].add(-LEARNING_RATE * grads, mode="drop"), state


def _gradients(table, ids, noise):
    """Returns row gradients that need the lookup, as a model's do."""
    return noise + 1e-3 * embedding.lookup(table, ids)


@functools.partial(jax.jit, static_argnums=0)
def _initial(rows: int):
    table = jnp.full((rows, DIM), INITIAL)
    return table, ADAGRAD.init(table)


def make_batches(arguments: Arguments, rows: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns flat ids and the noise of their gradients, a pair for each batch."""
    per_field = rows // FIELDS
    last = rows - per_field * (FIELDS - 1)
    spec = embedding.TableSpec(rows=(per_field,) * (FIELDS - 1) + (last,), dim=DIM)
    rng = np.random.default_rng(0)
    batches = []
    for i in range(NUM_BATCHES):
        ranks = _zipf_ranks(rng.random((arguments.batch_size, FIELDS)), per_field)
        ids = ranks * 2_654_435_761 % per_field  # frequent rows are not neighbours
        flat = embedding.flat_ids(spec, jnp.asarray(ids, jnp.int32)).reshape(-1)
        noise = jax.random.normal(jax.random.key(i), (flat.size, DIM))
        batches.append((flat, noise))
    return batches


def _zipf_ranks(uniform: np.ndarray, count: int) -> np.ndarray:
    """Returns ranks below `count` of density (1 + rank)^-ZIPF, by inverse CDF."""
    power = 1 - ZIPF
    ranks = (1 + uniform * ((count + 1.0) ** power - 1)) ** (1 / power)
    return np.clip(ranks.astype(np.int64) - 1, 0, count - 1)


def check(name: str, update, rows: int, batch) -> dict[str, Any]:
    """Returns how far the touched rows are from numpy after one step, and a rerun.

    Raises:
        SystemExit: if they differ.
    """
    ids, noise = batch
    touched, inverse = np.unique(np.asarray(ids), return_inverse=True)
    grads = np.zeros((touched.size, DIM))
    np.add.at(grads, inverse, np.asarray(noise, np.float64) + 1e-3 * INITIAL)
    root = np.sqrt(np.mean(grads**2, axis=1, keepdims=True))
    exact = INITIAL - LEARNING_RATE * grads / (root + ADAGRAD.eps)

    def touched_rows():
        table, state = update(*_initial(rows), ids, noise)
        return np.asarray(table[touched]), np.asarray(state.sum_of_squares[touched])

    (table, squares), again = touched_rows(), touched_rows()
    # Relative to the step, whose largest entries are near the learning rate.
    error = float(np.max(np.abs(table - exact)) / LEARNING_RATE)
    is_same = np.array_equal(table, again[0]) and np.array_equal(squares, again[1])
    if not error < MAX_ERROR or not is_same:
        raise SystemExit(
            f"{name}, {rows} rows: error {error} of a step against numpy; a second run "
            f"gives the same bits: {is_same}."
        )
    return {"error_vs_numpy": error, "rerun_is_bitwise_equal": is_same}


def _growth(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Returns, by path, the slowest over the fastest median of the cases."""
    medians = {
        name: [c["us"][name]["median"] for c in cases] for name in cases[0]["us"]
    }
    return {name: round(max(times) / min(times), 2) for name, times in medians.items()}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
