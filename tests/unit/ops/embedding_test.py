import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from loka_jax.ops import embedding
from loka_jax.ops.tables import require_one_array
from loka_jax.optim.rows import Adam, RowwiseAdagrad, Sgd
from tests import support

BAD_ID = embedding.BAD_ID
SPEC = embedding.TableSpec(rows=(3, 5, 2), dim=4)
# Eagerly, each level of the segmented sum is dozens of dispatches.
sum_by_row = jax.jit(embedding.sum_by_row, static_argnums=2)
lookup_pooled = jax.jit(embedding.lookup_pooled, static_argnums=3)
pooled_row_grads = jax.jit(embedding.pooled_row_grads, static_argnums=3)
update_rows = jax.jit(embedding.update_rows, static_argnums=4)
TRUE, FALSE = jnp.asarray(True), jnp.asarray(False)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def zipf_ids(seed, shape, rows):
    ids = np.random.default_rng(seed).zipf(1.3, shape) - 1
    return jnp.asarray(np.minimum(ids, rows - 1), jnp.int32)


def summed(ids, grads, rows):
    """The oracle: gradients added by row in float64."""
    out = np.zeros((rows, grads.shape[-1]))
    ids, grads = np.ravel(ids), np.asarray(grads, np.float64)
    for row, grad in zip(ids, grads.reshape(ids.size, out.shape[1]), strict=True):
        if 0 <= row < rows:
            out[row] += grad
    return out


def as_dense(unique, rows):
    """The rows of a UniqueRows, each of which must stand there once."""
    used = np.asarray(unique.ids) != BAD_ID
    ids = np.asarray(unique.ids)[used]
    assert len(set(ids.tolist())) == len(ids)
    out = np.zeros((rows, unique.grads.shape[-1]))
    out[ids] = np.asarray(unique.grads)[used]
    return out


# Tables and lookups.


def test_offsets_are_the_rows_before():
    assert SPEC.offsets == (0, 3, 8)
    assert SPEC.total_rows == 10


@pytest.mark.parametrize(
    "rows, dim, reason",
    [
        ((2**31 - 1,) * 257, 4, "rows in all are more than 549755813887"),
        ((), 4, "positive number for each field"),
        ((3, 0), 4, "positive number for each field"),
        ((3,), 0, "dim=0"),
    ],
)
def test_impossible_tables_are_refused_with_a_reason(rows, dim, reason):
    with pytest.raises(ValueError, match=reason):
        embedding.TableSpec(rows=rows, dim=dim)


def test_tables_too_large_for_one_device_are_refused_by_the_sentence():
    require_one_array(SPEC)
    spec = embedding.TableSpec(rows=(2**30, 2**30), dim=4)
    with pytest.raises(ValueError, match="2147483648 rows .* int32 .* --mesh.shards"):
        require_one_array(spec)


def test_the_largest_table_has_int32_ids():
    spec = embedding.TableSpec(rows=(2**31 - 2, 1), dim=1)
    ids = jnp.asarray([[2**31 - 3, 0]], jnp.int32)
    flat = embedding.flat_ids(spec, ids)
    np.testing.assert_array_equal(flat, [[2**31 - 3, 2**31 - 2]])


def test_ids_out_of_range_become_bad_ids_and_are_counted():
    low, high = -(2**31), 2**31 - 1
    ids = jnp.asarray([[0, 4, 1], [-1, 5, low], [3, high, 0]], jnp.int32)
    flat = embedding.flat_ids(SPEC, ids)
    np.testing.assert_array_equal(
        flat, [[0, 7, 9], [BAD_ID, BAD_ID, BAD_ID], [BAD_ID, BAD_ID, 8]]
    )
    assert int(embedding.count_bad_ids(flat)) == 5


def test_ids_of_other_types_or_fields_are_refused():
    with pytest.raises(ValueError, match="must be int32"):
        embedding.flat_ids(SPEC, jnp.zeros((2, 3), jnp.int16))
    with pytest.raises(ValueError, match="3 fields"):
        embedding.flat_ids(SPEC, jnp.zeros((2, 4), jnp.int32))


def test_lookup_reads_the_rows_of_each_field_and_zeros_for_bad_ids():
    table = embedding.init_table(jax.random.key(0), SPEC, stddev=1.0)
    ids = jnp.asarray([[2, 0, 1], [-1, 4, 2]], jnp.int32)
    rows = jax.jit(embedding.lookup)(table, embedding.flat_ids(SPEC, ids))
    expected = np.asarray(table)[[[2, 3, 9], [0, 7, 0]]]
    expected[1, [0, 2]] = 0
    np.testing.assert_array_equal(rows, expected)


def test_lookup_of_a_negative_flat_id_does_not_wrap():
    rows = embedding.lookup(jnp.ones((4, 2)), jnp.asarray([-1], jnp.int32))
    np.testing.assert_array_equal(rows, np.zeros((1, 2)))


def test_init_table_has_the_asked_deviation():
    spec = embedding.TableSpec(rows=(5000, 5000), dim=8)
    table = embedding.init_table(jax.random.key(0), spec, stddev=1e-2)
    assert table.dtype == jnp.float32
    assert abs(float(jnp.std(table)) / 1e-2 - 1) < 0.02


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pooled_lookup_matches_numpy(pooling):
    table = np.asarray(normal(0, 10, 4))
    ids = np.asarray(zipf_ids(1, (6, 3, 5), 10)).copy()
    ids[0, 0, 1] = BAD_ID
    weights = np.random.default_rng(2).integers(0, 3, ids.shape).astype(np.float32)
    weights[1, 1] = 0  # nothing to pool
    used = np.where(ids == BAD_ID, 0, weights).astype(np.float64)
    expected = np.einsum("bfh,bfhd->bfd", used, table[np.where(ids < 10, ids, 0)])
    if pooling == "mean":
        expected /= np.maximum(used.sum(-1), 1e-30)[..., None]
    out = lookup_pooled(
        jnp.asarray(table), jnp.asarray(ids), jnp.asarray(weights), pooling
    )
    atol = support.sum_error(6, np.abs(table).max() * used.sum(-1).max())
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=atol)
    np.testing.assert_array_equal(out[1, 1], np.zeros(4))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pooled_row_grads_equal_the_gradient_of_the_table(pooling):
    table, target = normal(0, 10, 4), normal(1, 6, 3, 4)
    ids = zipf_ids(2, (6, 3, 5), 10)
    weights = jax.random.uniform(jax.random.key(3), ids.shape)
    weights = jnp.where(weights > 0.3, weights, 0.0)

    def loss(pooled):
        return jnp.sum(jnp.sin(pooled) * target)

    def loss_of_table(table):
        return loss(lookup_pooled(table, ids, weights, pooling))

    pooled = lookup_pooled(table, ids, weights, pooling)
    grads = jax.jit(jax.grad(loss))(pooled)
    row_ids, row_grads = pooled_row_grads(grads, ids, weights, pooling)
    of_table = jax.jit(jax.grad(loss_of_table))(table)
    np.testing.assert_allclose(
        summed(row_ids, row_grads, 10), of_table, rtol=1e-5, atol=1e-5
    )


def test_pooled_padding_touches_no_row():
    weights = jnp.asarray([[[1.0, 0.0]]])
    ids, _ = embedding.pooled_row_grads(
        jnp.ones((1, 1, 4)), jnp.asarray([[[7, 0]]], jnp.int32), weights
    )
    np.testing.assert_array_equal(ids, [7, BAD_ID])


def test_pooling_of_another_name_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    ids, weights = jnp.zeros((1, 1, 1), jnp.int32), jnp.ones((1, 1, 1))
    with pytest.raises(ValueError, match="'sum' or 'mean'"):
        embedding.lookup_pooled(jnp.ones((2, 4)), ids, weights, "max")


# Sums by row.


@pytest.mark.parametrize("n", [0, 1, 2, 8, 9, 64, 65, 5000])
@pytest.mark.parametrize("used_rows", [1, 3, 1000])
def test_sums_match_numpy(n, used_rows):
    rows = 1000  # one compilation for each n
    ids, grads = zipf_ids(n, (n,), used_rows), normal(n, n, 4)
    unique = sum_by_row(ids, grads, rows)
    chex.assert_shape(unique.grads, (n, 4))
    expected = summed(ids, grads, rows)
    size = np.sqrt(np.bincount(np.asarray(ids), minlength=rows) + 1.0)[:, None]
    error = np.abs(as_dense(unique, rows) - expected)
    assert np.all(error <= 1e-6 * size), error.max()


def test_runs_that_end_at_block_boundaries_are_kept_apart():
    for length in (8, 9, 64):
        ids = jnp.repeat(jnp.arange(6, dtype=jnp.int32), length)
        grads = jnp.ones((ids.size, 2))
        unique = sum_by_row(ids, grads, 6)
        np.testing.assert_array_equal(as_dense(unique, 6), np.full((6, 2), length))


def test_ids_out_of_range_are_left_out_of_the_sums():
    ids = jnp.asarray([-1, 3, 4, BAD_ID, 3, -(2**31)], jnp.int32)
    unique = sum_by_row(ids, jnp.ones((6, 2)), 4)
    np.testing.assert_array_equal(np.sort(unique.ids), [3] + [BAD_ID] * 5)
    np.testing.assert_array_equal(as_dense(unique, 4)[3], [2, 2])


def test_bfloat16_gradients_are_summed_in_float32():
    # In bfloat16 the sum would stay at 256: 256 + 1 rounds to 256.
    unique = sum_by_row(
        jnp.zeros(4096, jnp.int32), jnp.ones((4096, 2), jnp.bfloat16), 1
    )
    assert unique.grads.dtype == jnp.float32
    np.testing.assert_array_equal(as_dense(unique, 1), [[4096, 4096]])


def test_a_small_row_keeps_its_precision_beside_a_huge_one():
    ids = jnp.asarray([0] * 50 + [1] * 50, jnp.int32)
    grads = jnp.where(ids[:, None] == 0, 1e20, 1e-20) * jnp.ones((100, 2))
    unique = sum_by_row(ids, grads, 2)
    np.testing.assert_allclose(as_dense(unique, 2)[1], [50e-20] * 2, rtol=1e-6)


def test_a_nan_stays_in_its_own_row():
    ids = jnp.asarray([0, 1, 1, 2] * 20, jnp.int32)
    grads = jnp.ones((80, 2)).at[1].set(jnp.nan).at[2].set(jnp.inf)
    sums = as_dense(sum_by_row(ids, grads, 3), 3)
    np.testing.assert_array_equal(sums[[0, 2]], np.full((2, 2), 20.0))
    assert np.isnan(sums[1]).all()


def test_sums_hold_no_scatter_whose_order_is_free():
    lowered = jax.jit(embedding.sum_by_row, static_argnums=2).lower(
        jax.ShapeDtypeStruct((1000,), jnp.int32),
        jax.ShapeDtypeStruct((1000, 4), jnp.float32),
        50,
    )
    assert "scatter" not in lowered.as_text()


@pytest.fixture
def compiling():
    """Compiles what the cache that tests share holds already."""
    for use_cache in (False, True):
        jax.config.update("jax_enable_compilation_cache", use_cache)
        compilation_cache.reset_cache()
        if not use_cache:
            yield


@pytest.mark.usefixtures("compiling")
def test_two_compilations_give_the_same_bytes():
    ids, grads = zipf_ids(0, (3000,), 100), normal(0, 3000, 8)

    def run():
        jitted = jax.jit(lambda i, g: embedding.sum_by_row(i, g, 100))
        return jax.tree.map(lambda x: np.asarray(x).tobytes(), jitted(ids, grads))

    assert run() == run()


# Updates.


def test_row_gradients_are_those_of_a_plain_table():
    table, weights = normal(0, 10, 4), normal(1, 12)
    flat = embedding.flat_ids(SPEC, jnp.asarray([[0, 4, 1], [2, 4, 1]] * 3, jnp.int32))

    def loss_of_rows(rows):
        return jnp.sum(jnp.tanh(rows.reshape(6, -1) @ weights))

    row_grads = jax.grad(loss_of_rows)(embedding.lookup(table, flat))
    of_table = jax.grad(lambda table: loss_of_rows(table[flat]))(table)
    updated, _ = update_rows(table, (), flat, row_grads, Sgd(), 0.5, enabled=TRUE)
    np.testing.assert_allclose(updated, table - 0.5 * of_table, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(), Sgd(), Adam()], ids=str)
def test_untouched_rows_keep_their_bytes(optimizer):
    table = normal(0, 50, 4)
    state = jax.tree.map(lambda x: x + 1, optimizer.init(table))
    ids = jnp.asarray([3, 3, 49, 0, -1, 50, BAD_ID], jnp.int32)
    new = update_rows(table, state, ids, normal(1, 7, 4), optimizer, 0.1, enabled=TRUE)
    others = np.setdiff1d(np.arange(50), [0, 3, 49])
    for before, after in zip(
        jax.tree.leaves((table, state)), jax.tree.leaves(new), strict=True
    ):
        assert (
            np.asarray(before)[others].tobytes() == np.asarray(after)[others].tobytes()
        )
    assert np.all(np.asarray(new[0])[[0, 3, 49]] != np.asarray(table)[[0, 3, 49]])


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(), Sgd(), Adam()], ids=str)
def test_a_disabled_step_with_nan_gradients_leaves_no_trace(optimizer):
    table = normal(0, 20, 4)
    state = optimizer.init(table)
    grads = jnp.full((9, 4), jnp.nan)
    ids = zipf_ids(0, (9,), 20)
    new = update_rows(table, state, ids, grads, optimizer, 0.1, enabled=FALSE)
    chex.assert_trees_all_equal(new, (table, state))


def test_an_empty_batch_changes_nothing():
    table = normal(0, 20, 4)
    state = RowwiseAdagrad().init(table)
    new = update_rows(
        table,
        state,
        jnp.zeros((0, 3), jnp.int32),
        jnp.zeros((0, 3, 4)),
        RowwiseAdagrad(),
        0.1,
        enabled=TRUE,
    )
    chex.assert_trees_all_equal(new, (table, state))


def test_a_batch_of_one_moves_one_row():
    new, _ = update_rows(
        jnp.zeros((5, 2)),
        (),
        jnp.asarray([[2]], jnp.int32),
        jnp.ones((1, 1, 2)),
        Sgd(),
        1.0,
        enabled=TRUE,
    )
    np.testing.assert_array_equal(new, -np.eye(5)[:, [2, 2]])


def test_a_batch_of_one_id_sums_before_it_steps():
    grads = normal(0, 1000, 2)
    new, _ = update_rows(
        jnp.zeros((5, 2)),
        (),
        jnp.full((1000,), 4, jnp.int32),
        grads,
        Sgd(),
        1.0,
        enabled=TRUE,
    )
    np.testing.assert_allclose(new[4], -np.sum(np.asarray(grads, np.float64), 0), 1e-5)
    np.testing.assert_array_equal(new[:4], np.zeros((4, 2)))


def test_a_bfloat16_table_stays_bfloat16():
    table = jnp.ones((5, 2), jnp.bfloat16)
    new, _ = update_rows(
        table,
        (),
        jnp.asarray([1], jnp.int32),
        jnp.ones((1, 2)),
        Sgd(),
        0.5,
        enabled=TRUE,
    )
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new[1].astype(jnp.float32), [0.5, 0.5])


@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(), Sgd(), Adam()], ids=str)
def test_a_donated_update_holds_no_second_table(optimizer):
    rows, dim, n = 200_000, 16, 64

    def step(table, state, ids, grads, enabled):
        looked_up = embedding.lookup(table, ids)
        return embedding.update_rows(
            table, state, ids, looked_up * grads, optimizer, 0.1, enabled=enabled
        )

    table = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
    state = jax.eval_shape(optimizer.init, table)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(
            table,
            state,
            jax.ShapeDtypeStruct((n,), jnp.int32),
            jax.ShapeDtypeStruct((n, dim), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        )
        .compile()
    )
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((table, state)))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    # N-sized buffers only: even one float a row would take 800,000 bytes.
    assert memory.temp_size_in_bytes < 100_000
