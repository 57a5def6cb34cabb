"""Sums by row and row updates by Triton against XLA's and numpy in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import embedding, kernels, row_rounding
from loka_jax.ops.row_order import Order
from loka_jax.optim.rows import Adam, LaggedRowwiseAdagrad, RowwiseAdagrad, Sgd
from loka_jax.triton import row_update
from loka_jax.triton.row_update import why_not
from tests import support
from tests.support import hopper
from tests.support.triton import (
    compiled_programs,
    interpreted,
    num_kernels,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

BAD_ID = embedding.BAD_ID
KINDS = ["zipf", "equal", "distinct", "one long", "pairs", "bad", "all bad"]
TRUE, FALSE = jnp.asarray(True), jnp.asarray(False)
ADAGRAD = RowwiseAdagrad(eps=1e-6, initial_accumulator=0.1)
_NEEDS_EXTRA = "needs the extra loka-jax[triton]"
optimizers = pytest.mark.parametrize("optimizer", [ADAGRAD, Sgd(), Adam()], ids=str)
# Eagerly, each level of XLA's sums is dozens of dispatches; the interpreter takes no
# traced arrays.
_sums_by_xla = jax.jit(
    functools.partial(embedding.sum_by_row, implementation="xla"), static_argnums=2
)
_update_by_xla = jax.jit(
    functools.partial(embedding.update_rows, implementation="xla"), static_argnums=4
)
_sums = functools.partial(embedding.sum_by_row, implementation="triton")
_update = functools.partial(embedding.update_rows, implementation="triton")


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request, monkeypatch):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)
    if request.param == "interpreted":  # which takes no traced arrays
        call = lambda kernel, *operands: kernel(*operands)  # noqa: E731
        monkeypatch.setattr(kernels, "one_by_one", call)


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


def _summed(ids, grads, rows):
    """Returns the gradients and their magnitudes, added by row in float64."""
    ids, grads = np.asarray(ids), np.asarray(grads, np.float64)
    used = (ids >= 0) & (ids < rows)
    sums, sizes = np.zeros((2, rows, grads.shape[1]))
    np.add.at(sums, ids[used], grads[used])
    np.add.at(sizes, ids[used], np.abs(grads[used]))
    return sums, sizes


def _dense(unique, rows):
    """Returns the rows of a UniqueRows, which must ascend."""
    ids = np.asarray(unique.ids)
    used = ids != BAD_ID
    assert np.all(np.diff(ids[used]) > 0)
    out = np.zeros((rows, unique.grads.shape[1]), np.float32)
    out[ids[used]] = np.asarray(unique.grads)[used]
    return out


def _check_sums(kind, n, dim, dtype=jnp.float32):
    ids, rows = _ids(kind, n)
    grads = support.normal(n, dim, dtype=dtype)
    ours, theirs = _sums(ids, grads, rows), _sums_by_xla(ids, grads, rows)
    assert ours.grads.dtype == jnp.float32
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    expected, sizes = _summed(ids, grads, rows)
    for unique in (ours, theirs):
        error = np.abs(_dense(unique, rows) - expected)
        assert np.all(error <= 1e-6 * sizes), (error / np.maximum(sizes, 1)).max()


def _problem(optimizer, kind, n, dim, dtype=jnp.float32, table_dtype=jnp.float32):
    """Returns the operands of `update_rows`, `enabled` aside."""
    ids, rows = _ids(kind, n)
    table = support.normal(rows, dim, seed=1)
    state = jax.tree.map(lambda x: x + jnp.ones_like(x), optimizer.init(table))
    grads = support.normal(n, dim, seed=2, dtype=dtype)
    return table.astype(table_dtype), state, ids, grads, optimizer, jnp.float32(0.1)


def _check_update(optimizer, kind, n, dim, **dtypes):
    operands = _problem(optimizer, kind, n, dim, **dtypes)
    theirs = jax.tree.leaves(_update_by_xla(*operands, enabled=TRUE))
    ours = jax.tree.leaves(_update(*operands, enabled=TRUE))
    touched = np.isin(np.arange(len(operands[0])), operands[2])
    for old, our, their in zip(
        jax.tree.leaves(operands[:2]), ours, theirs, strict=True
    ):
        assert our.dtype == their.dtype == old.dtype
        old, our, their = (np.asarray(x, np.float64) for x in (old, our, their))
        # Two trees of sums in float32, of some thousand terms.
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(our[~touched], old[~touched])
        # All but those whose gradient is too small to leave a trace.
        stays = our[touched] == old[touched]
        assert np.count_nonzero(stays) <= 0.01 * stays.size


@pytest.mark.usefixtures("anywhere", "small_tiles")
@pytest.mark.parametrize(
    "kind, n",
    [(kind, 90) for kind in KINDS] + [("equal", 1), ("equal", 4), ("bad", 5)],
)
def test_sums_of_runs_over_many_levels(kind, n):
    _check_sums(kind, n, 4)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "dim, dtype",
    [(1, jnp.float32), (10, jnp.bfloat16), (16, jnp.bfloat16), (128, jnp.float32)],
)
def test_sums_of_every_width(dim, dtype):
    _check_sums("one long", 530, dim, dtype)


@pytest.mark.usefixtures("anywhere", "small_tiles")
def test_sums_of_whole_numbers_are_exact():
    ids, rows = _ids("one long", 200)
    grads = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (200, 4)), jnp.float32)
    expected, _ = _summed(ids, grads, rows)
    np.testing.assert_array_equal(_dense(_sums(ids, grads, rows), rows), expected)


@pytest.mark.usefixtures("anywhere", "small_tiles")
def test_runs_that_end_at_block_boundaries_are_kept_apart():
    for length in (2, 4, 8, 12):
        ids = jnp.repeat(jnp.arange(5, dtype=jnp.int32), length)
        unique = _sums(ids, jnp.ones((ids.size, 2)), 5)
        np.testing.assert_array_equal(_dense(unique, 5), np.full((5, 2), length))


@pytest.mark.usefixtures("anywhere", "small_tiles")
@pytest.mark.parametrize("faulty", [np.nan, np.inf])
def test_nan_stays_in_its_row(faulty):
    ids = jnp.repeat(jnp.arange(9, dtype=jnp.int32), 11)
    grads = jnp.ones((99, 2)).at[50].set(faulty)  # of row 4
    sums = _dense(_sums(ids, grads, 9), 9)
    np.testing.assert_array_equal(np.delete(sums, 4, 0), np.full((8, 2), 11.0))
    assert not np.isfinite(sums[4]).any()
    table, _ = _update(jnp.zeros((9, 2)), (), ids, grads, Sgd(), 1.0, enabled=TRUE)
    np.testing.assert_array_equal(table, -sums)


@pytest.mark.usefixtures("anywhere", "small_tiles")
@pytest.mark.parametrize(
    "optimizer, kind",
    [(ADAGRAD, kind) for kind in ("zipf", "equal", "distinct", "bad", "all bad")]
    + [(Sgd(), "zipf"), (Sgd(), "bad"), (Adam(), "zipf")],
)
def test_updates_over_many_levels(optimizer, kind):
    _check_update(optimizer, kind, 99, 4)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "optimizer, dim",
    [(ADAGRAD, 1), (ADAGRAD, 10), (ADAGRAD, 128), (Sgd(), 16), (Adam(), 16)]
    + [(RowwiseAdagrad(eps=1e-2, c=9.0), 16), (LaggedRowwiseAdagrad(c=9.0), 16)],
)
def test_updates_of_every_width(optimizer, dim):
    _check_update(optimizer, "one long", 300, dim)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("optimizer", [ADAGRAD, Sgd()], ids=str)
def test_bfloat16_gradients_and_tables(optimizer):
    dtypes = dict(dtype=jnp.bfloat16, table_dtype=jnp.bfloat16)
    _check_update(optimizer, "distinct", 70, 16, dtype=jnp.bfloat16)
    table, *rest = _problem(optimizer, "zipf", 70, 16, **dtypes)
    ours, _ = _update(table, *rest, enabled=TRUE)
    theirs, _ = _update_by_xla(table, *rest, enabled=TRUE)
    assert ours.dtype == jnp.bfloat16
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    # Rounded once, from float32 values that may differ in their last bits.
    np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("anywhere", "small_tiles")
@pytest.mark.parametrize("shards, first", [(1, 0), (256, 192)])
@pytest.mark.parametrize("kind, n, dim", [("distinct", 300, 4), ("zipf", 90, 16)])
def test_rows_are_rounded_by_the_bits_of_the_twin(shards, first, kind, n, dim):
    ids, rows = _ids(kind, n)
    # Sums of whole numbers are exact, and so are powers of two times them.
    grads = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (n, dim)), jnp.float32)
    table = support.normal(rows, dim, seed=1).astype(jnp.bfloat16)
    order = Order(rows * 4 if shards > 1 else rows, shards)
    rounding = row_rounding.of_step(7, jnp.asarray(3), order, dim, first)
    optimizer = embedding.Rounded(Sgd(), rounding)
    operands = table, (), ids, grads, optimizer, 2.0**-9
    ours, _ = _update(*operands, enabled=TRUE)
    theirs, _ = embedding.update_rows(*operands, enabled=TRUE, implementation="xla")
    np.testing.assert_array_equal(ours, theirs)
    to_nearest, _ = _update(*operands[:4], Sgd(), 2.0**-9, enabled=TRUE)
    assert np.any(np.asarray(ours != to_nearest))


@pytest.mark.usefixtures("anywhere")
def test_adagrad_rounds_to_a_neighbour_of_its_float32_row():
    table, state, ids, grads, optimizer, lr = _problem(ADAGRAD, "distinct", 300, 16)
    table = table.astype(jnp.bfloat16)
    rounding = row_rounding.of_step(7, jnp.asarray(3), Order(len(table), 1), 16)
    rounded = embedding.Rounded(optimizer, rounding)
    ours, _ = _update(table, state, ids, grads, rounded, lr, enabled=TRUE)
    wide = table.astype(jnp.float32), state, ids, grads
    exact, _ = _update(*wide, optimizer, lr, enabled=TRUE)
    exact, found = np.asarray(exact), np.asarray(ours, np.float32)
    assert np.all(np.abs(found - exact) <= np.abs(exact) * 2.0**-7)
    # To the nearest, nothing would be further away than half of that distance.
    assert np.any(np.abs(found - exact) > np.abs(exact) * 2.0**-8)


@optimizers
@pytest.mark.usefixtures("anywhere")
def test_a_disabled_step_with_nan_gradients_leaves_no_trace(optimizer):
    table, state, ids, grads, *rest = _problem(optimizer, "zipf", 90, 4)
    grads = jnp.full_like(grads, jnp.nan)
    new = _update(table, state, ids, grads, *rest, enabled=FALSE)
    jax.tree.map(np.testing.assert_array_equal, new, (table, state))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "kind, dim",
    [(kind, 16) for kind in KINDS[:4]] + [("bad", 1), ("zipf", 10), ("zipf", 512)],
)
def test_many_programs(kind, dim):
    _check_sums(kind, 50_003, dim)
    _check_sums(kind, 50_003, dim, jnp.bfloat16)
    _check_update(ADAGRAD, kind, 5003, dim)
    _check_update(Sgd(), kind, 5003, dim)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "optimizer, dim", [(ADAGRAD, 16), (ADAGRAD, 128), (Sgd(), 10), (Adam(), 16)]
)
def test_updates_repeat_bit_by_bit(optimizer, dim):
    operands = _problem(optimizer, "one long", 200_001, dim)
    run = jax.jit(_update, static_argnums=4)
    first = run(*operands, enabled=TRUE)
    for _ in range(50):
        again = run(*operands, enabled=TRUE)
        jax.tree.map(np.testing.assert_array_equal, first, again)


# Programs lowered and compiled without a GPU.


def _shapes(optimizer, n, dim, dtype, rows=33_000_000):
    table = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    state = jax.eval_shape(optimizer.init, table)
    ids = jax.ShapeDtypeStruct((n,), jnp.int32)
    return table, state, ids, jax.ShapeDtypeStruct((n, dim), dtype)


def _step(optimizer, table, state, ids, grads):
    return _update(table, state, ids, grads, optimizer, 0.1, enabled=TRUE)


@pytest.mark.parametrize(
    "optimizer, dim",
    [(ADAGRAD, 16)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [(ADAGRAD, 10), (ADAGRAD, 128), (Adam(), 10), (Adam(), 128)]
    ],
)
def test_programs_for_hopper_do_not_spill_and_add_once(optimizer, dim):
    pytest.importorskip("jax_triton", reason=_NEEDS_EXTRA, exc_type=ImportError)
    n, shuffles = 1_703_936, []
    for dtype in (jnp.float32, jnp.bfloat16):
        step = functools.partial(_step, optimizer)
        programs = compiled_programs(step, *_shapes(optimizer, n, dim, dtype))
        assert len(programs) == len(set(row_update.levels(n, dim)))
        spilled = [spilled_bytes(program.ptxas_report()) for program in programs]
        # ptxas spills a word or two even with registers to spare.
        assert spilled[0] == 0 and max(spilled) <= 16, spilled
        shuffles.append(programs[0].ptx.count("shfl.sync"))
    # Two dtypes may get the compiler to make two layouts of a tile, and sum both.
    assert shuffles[0] == shuffles[1]


@optimizers
def test_the_update_lowers_under_vmap_and_shard_map(optimizer):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    step = functools.partial(_step, optimizer)
    shapes = _shapes(optimizer, 800, 16, jnp.float32, rows=4000)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    parts = dict(in_specs=P("data"), out_specs=P("data"))
    assert num_kernels(jax.shard_map(step, mesh=mesh, **parts), *shapes) > 0
    batched = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), shapes
    )
    assert num_kernels(jax.vmap(step), *batched) > 0


@optimizers
def test_a_donated_update_copies_no_table_on_a_gpu(optimizer):
    pytest.importorskip("jax_triton", reason=_NEEDS_EXTRA, exc_type=ImportError)

    def step(table, state, ids, noise):
        grads = noise * embedding.lookup(table, ids)
        return _step(optimizer, table, state, ids, grads)

    shapes = _shapes(optimizer, 1_703_936, 16, jnp.float32)
    hlo = hopper.compiled(step, *shapes, donate_argnums=(0, 1))
    launches = [kernel.opcode for kernel in hopper.kernels(hlo)]
    assert launches.count("custom-call") == 3
    assert "copy" not in hlo


@pytest.mark.parametrize(
    "sizes, dtype, reason",
    [
        ((1, 1), jnp.float32, None),
        ((2**30, 512), jnp.bfloat16, None),
        ((0, 16), jnp.float32, "N=0, D=16: there is nothing to add"),
        ((2**30 + 1, 16), jnp.float32, "N=1073741825 is more than 1073741824"),
        ((8, 513), jnp.float32, "D=513 is more than 512"),
        ((8, 16), jnp.float16, "float16 is neither float32 nor bfloat16"),
    ],
)
def test_refused_operands_have_a_reason(sizes, dtype, reason):
    assert why_not(*sizes, dtype) == reason


def test_an_update_that_cannot_run_is_an_error():
    ids, grads = jnp.zeros(4, jnp.int32), jnp.zeros((4, 600))
    with pytest.raises(ValueError, match="'triton' cannot run: D=600 is more than 512"):
        _sums(ids, grads, 4)
    with pytest.raises(ValueError, match="sgd: D=600 is more than 512"):
        row_update.sgd(grads, ids, ids, grads, lr=0.1)
    with pytest.raises(ValueError, match="neither float32 nor bfloat16"):
        row_update.sgd(jnp.zeros((4, 2), jnp.float16), ids, ids, grads[:, :2], lr=0.1)
    with pytest.raises(ValueError, match="'triton' cannot run: N=0"):
        _update(grads, (), ids[:0], grads[:0], Sgd(), 0.1, enabled=TRUE)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1_703_936, 2**30])
@pytest.mark.parametrize("dim", [1, 16, 100, 512])
def test_levels_shrink_to_a_single_program(n, dim):
    levels = row_update.levels(n, dim)
    assert levels[0].n == n and levels[-1].blocks == 1
    for level, above in itertools.pairwise(levels):
        assert above.n == 2 * level.blocks < level.n
