"""Sums by row and row updates by Triton against XLA's and numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import embedding, row_rounding
from loka_jax.ops.row_order import Order
from loka_jax.optim.rows import Adam, LaggedRowwiseAdagrad, RowwiseAdagrad, Sgd
from loka_jax.triton import row_update
from tests import support
from tests.support.triton import anywhere, interpreted, on_gpu, skip_without_triton

__all__ = ["anywhere", "interpreted", "on_gpu"]

skip_without_triton()

BAD_ID = embedding.BAD_ID
KINDS = ["zipf", "equal", "distinct", "one long", "pairs", "bad", "all bad"]
anywhere_ = pytest.mark.usefixtures("anywhere")
ADAGRAD = RowwiseAdagrad(eps=1e-6, initial_accumulator=0.1)
# Eagerly, each level of XLA's sums is dozens of dispatches; the interpreter takes no
# traced arrays.
_sums_by_xla = jax.jit(
    functools.partial(embedding.sum_by_row, implementation="xla"), static_argnums=2
)
_update_by_xla = jax.jit(
    functools.partial(embedding.update_rows, implementation="xla"), static_argnums=4
)
_sums = functools.partial(embedding.sum_by_row, implementation="triton")
update = functools.partial(embedding.update_rows, implementation="triton")


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes blocks of 4 entries: a hundred entries go through many levels."""
    config = row_update.TuningConfig(values=1, carried_values=1, min_positions=4)
    monkeypatch.setattr(row_update, "CONFIG", config)


def _ids(kind, n, seed=0):
    """Returns ids, and one more than the largest that is not bad."""
    rng = np.random.default_rng(seed)
    ids = {
        "zipf": np.minimum(rng.zipf(1.3, n) - 1, 199),
        "equal": np.full(n, 3),
        "distinct": rng.permutation(n),
        "one long": np.where(rng.random(n) < 0.8, 7, rng.integers(0, 50, n)),
        "pairs": rng.permutation(n) // 2,
        "bad": rng.choice([-1, BAD_ID, 5, 6, 10_000_000, -(2**31)], n),
        "all bad": np.full(n, BAD_ID),
    }[kind]
    return jnp.asarray(ids, jnp.int32), max(n, 200)


def _dense(unique, rows):
    """Returns the rows of a UniqueRows, which must ascend."""
    ids = np.asarray(unique.ids)
    used = ids != BAD_ID
    assert np.all(np.diff(ids[used]) > 0)
    out = np.zeros((rows, unique.grads.shape[1]), np.float32)
    out[ids[used]] = np.asarray(unique.grads)[used]
    return out


def check_sums(kind, n, dim, dtype=jnp.float32):
    """Checks the sums of n gradients of ids of some kind, in float64."""
    ids, rows = _ids(kind, n)
    grads = support.normal(n, dim, dtype=dtype)
    ours, theirs = _sums(ids, grads, rows), _sums_by_xla(ids, grads, rows)
    assert ours.grads.dtype == jnp.float32
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    ids, grads = np.asarray(ids), np.asarray(grads, np.float64)
    used = (ids >= 0) & (ids < rows)
    expected, sizes = np.zeros((2, rows, dim))
    np.add.at(expected, ids[used], grads[used])
    np.add.at(sizes, ids[used], np.abs(grads[used]))
    for unique in (ours, theirs):
        error = np.abs(_dense(unique, rows) - expected)
        assert np.all(error <= 1e-6 * sizes), (error / np.maximum(sizes, 1)).max()


def problem_of(optimizer, kind, n, dim, dtype=jnp.float32, table_dtype=jnp.float32):
    """Returns the operands of `update_rows`."""
    ids, rows = _ids(kind, n)
    table = support.normal(rows, dim, seed=1)
    state = jax.tree.map(lambda x: x + jnp.ones_like(x), optimizer.init(table))
    grads = support.normal(n, dim, seed=2, dtype=dtype)
    return table.astype(table_dtype), state, ids, grads, optimizer, jnp.float32(0.1)


def check_update(optimizer, kind, n, dim, **dtypes):
    """Checks an update of a table, and that it leaves other rows alone."""
    operands = problem_of(optimizer, kind, n, dim, **dtypes)
    theirs = jax.tree.leaves(_update_by_xla(*operands))
    ours = jax.tree.leaves(update(*operands))
    touched = np.isin(np.arange(len(operands[0])), operands[2])
    # Two trees of sums in float32, of some thousand terms; or one rounding of theirs.
    is_narrow = operands[0].dtype == jnp.bfloat16
    bounds = dict(rtol=2**-7 if is_narrow else 1e-4, atol=1e-5)
    olds = jax.tree.leaves(operands[:2])
    for old, our, their in zip(olds, ours, theirs, strict=True):
        assert our.dtype == their.dtype == old.dtype
        old, our, their = (np.asarray(x, np.float64) for x in (old, our, their))
        np.testing.assert_allclose(our, their, **bounds)
        np.testing.assert_array_equal(our[~touched], old[~touched])
        # All but those whose gradient is too small to leave a trace.
        stays = our[touched] == old[touched]
        assert np.count_nonzero(stays) <= 0.01 * stays.size or is_narrow


@anywhere_
@pytest.mark.parametrize(
    "dim, dtype",
    [(1, jnp.float32), (10, jnp.bfloat16), (16, jnp.bfloat16), (128, jnp.float32)],
)
def test_sums_of_every_width(dim, dtype):
    check_sums("one long", 530, dim, dtype)


@anywhere_
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind, n", [*((k, 90) for k in KINDS[:6]), ("all bad", 5)])
def test_sums_of_runs_over_many_levels(kind, n):
    check_sums(kind, n, 4)


@anywhere_
@pytest.mark.usefixtures("small_tiles")
def test_nan_stays_in_its_row():
    ids = jnp.repeat(jnp.arange(9, dtype=jnp.int32), 11)
    grads = jnp.ones((99, 2)).at[50].set(np.nan)  # of row 4
    sums = _dense(_sums(ids, grads, 9), 9)
    np.testing.assert_array_equal(np.delete(sums, 4, 0), np.full((8, 2), 11.0))
    assert not np.isfinite(sums[4]).any()
    table = jnp.zeros((9, 2))
    for known, want in ((ids, -sums), (jnp.full_like(ids, embedding.BAD_ID), table)):
        new, _ = update(table, (), known, grads, Sgd(), 1.0)
        np.testing.assert_array_equal(new, want)


@anywhere_
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "optimizer, kind",
    [(ADAGRAD, "zipf"), (ADAGRAD, "bad"), (ADAGRAD, "all bad")]
    + [(Sgd(), "distinct"), (Sgd(), "bad"), (Adam(), "zipf")],
)
def test_updates_over_many_levels(optimizer, kind):
    check_update(optimizer, kind, 99, 4)


NARROW = dict(dtype=jnp.bfloat16, table_dtype=jnp.bfloat16)


@anywhere_
@pytest.mark.parametrize(
    "optimizer, dim, dtypes",
    [
        (ADAGRAD, 1, {}),
        (ADAGRAD, 10, {}),
        (ADAGRAD, 16, NARROW),
        (Sgd(), 16, NARROW),
        (Adam(), 16, {}),
        (LaggedRowwiseAdagrad(c=9.0), 16, {}),
    ],
)
def test_updates_of_every_width(optimizer, dim, dtypes):
    check_update(optimizer, "one long", 300, dim, **dtypes)


@anywhere_
@pytest.mark.usefixtures("small_tiles")
def test_rows_are_rounded_by_the_bits_of_the_twin():
    n, dim, shards, first = 120, 4, 256, 192
    ids, rows = _ids("distinct", n)
    # Sums of whole numbers are exact, and so are powers of two times them.
    grads = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (n, dim)), jnp.float32)
    table = support.normal(rows, dim, seed=1).astype(jnp.bfloat16)
    rounding = row_rounding.of_step(
        7, jnp.asarray(3), Order(rows * 4, shards), dim, first
    )
    operands, rounded = (table, (), ids, grads), embedding.Rounded(Sgd(), rounding)
    ours, _ = update(*operands, rounded, 2**-9)
    how = dict(implementation="xla")
    by_xla = lambda *x: embedding.update_rows(*x, rounded, 2**-9, **how)  # noqa: E731
    theirs, _ = jax.jit(by_xla)(*operands)
    nearest, _ = update(*operands, Sgd(), 2.0**-9)
    np.testing.assert_array_equal(ours, theirs)
    assert np.any(np.asarray(ours != nearest))
