"""Multi-valued fields, several embedding dims and microbatches over a mesh."""

import jax
import numpy as np
import optax
import pytest

from loka_jax.ops.row_order import Order, places_of
from loka_jax.ops.tables import TableSpec, with_dims
from loka_jax.optim.rows import Adam
from loka_jax.train import metrics
from loka_jax.train.checkpoints.row_layout import _reordered
from loka_jax.train.gradients import variables_of
from loka_jax.train.mesh.devices import MeshConfig, mesh_of
from loka_jax.train.mesh.mesh_step import (
    StepOptions,
    look_up_everywhere,
    make_mesh_train_step,
)
from loka_jax.train.mesh.spread import Spread
from loka_jax.train.state import TrainState
from loka_jax.train.step import RowUpdate, make_eval_step, make_train_step
from loka_jax.train.tables.stacks import projected
from tests.unit.train.tables import lookup_test
from tests.unit.train.tables.lookup_test import MODELS, SIZE
from tests.unit.train.tables.stacks_test import MIXED

CONFIG = MeshConfig(replicas=2, shards=4, wire_rows="f32", wire_gradients="f32")
ADAM = Adam()  # moves a row that is touched by a gradient of zero, too


def placed(spread, parts):
    """Returns the parts of a state of one device on the devices of a mesh."""
    parts = dict(parts)
    for name in ("table", "row_state"):
        parts[name] = tuple(
            jax.tree.map(
                lambda x, rows=stack.total_rows: _reordered(
                    np.asarray(x), Order(rows, 1), Order(rows, 256)
                ),
                part,
            )
            for stack, part in zip(spread.tables.stacks, parts[name], strict=True)
        )
    return jax.tree.map(
        lambda x, like: jax.device_put(np.copy(x), like.sharding),
        parts,
        spread.placed(parts),
    )


def test_a_step_is_that_of_one_device():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    model, batch = MODELS["dlrm"], lookup_test.make_batch()
    batch.weights[-5:] = 0
    batch.ids[3, 1] = 99  # no row's
    state = lookup_test.make_state(model, ADAM, tables=MIXED)
    mesh = mesh_of(CONFIG, SIZE, 2)
    assert mesh is not None
    spread = Spread(mesh, CONFIG, MIXED)
    update = RowUpdate(ADAM, optax.constant_schedule(0.1), 0.0)
    step = make_mesh_train_step(
        model, MIXED, optax.sgd(0.1), update, CONFIG, StepOptions(microbatches=2)
    )
    before = TrainState(**placed(spread, vars(state)))
    found = vars(spread.train_program(step)(before, batch))
    want = vars(lookup_test.make_step(model, ADAM, tables=MIXED)(state, batch))
    assert int(found["bad_ids"]) == int(want["bad_ids"]) == 1
    np.testing.assert_allclose(found["grad_norm"], want["grad_norm"], rtol=1e-5)
    for name in ("table", "row_state"):
        for stack, a, b in zip(MIXED.stacks, found[name], want[name], strict=True):
            rows = stack.total_rows
            at = places_of(np.arange(rows), Order(rows, 256))
            jax.tree.map(
                lambda x, y, at=at: np.testing.assert_allclose(
                    np.asarray(x)[at], y, rtol=1e-3, atol=1e-6
                ),
                a,
                b,
            )
    assert np.any(np.asarray(want["table"][2]) != np.asarray(state.table[2]))


ROWS = lookup_test.ROWS
NO_LISTS = with_dims(TableSpec(rows=ROWS[:2], dim=8), (8, 4))
LISTS_ALONE = with_dims(
    TableSpec(rows=ROWS[2:], dim=8, pooling=("mean", "sum")), (8, 4)
)


def batch_without_dense(fields, lists):
    batch = lookup_test.make_batch()
    return batch._replace(
        dense=batch.dense[:, :0], ids=batch.ids[:, :fields], bags=batch.bags[:lists]
    )


@pytest.mark.parametrize(
    "name, microbatches, tables, fields, lists",
    [
        ("dlrm", 1, MIXED, 2, 2),
        ("dlrm", 2, NO_LISTS, 2, 0),
        ("dlrm", 2, LISTS_ALONE, 0, 2),
        ("dcnv2", 1, NO_LISTS, 2, 0),  # it joins dense features to the others
    ],
)
def test_a_step_needs_no_dense_columns_and_no_field_with_one_id(
    name, microbatches, tables, fields, lists
):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    model, batch = MODELS[name], batch_without_dense(fields, lists)
    update = RowUpdate(ADAM, optax.constant_schedule(0.1), 0.0)
    parts = model, tables, optax.sgd(0.1), update
    state = lookup_test.make_state(model, ADAM, tables, num_dense=0)
    want = jax.jit(make_train_step(*parts, microbatches=2))(state, batch)
    mesh = mesh_of(CONFIG, SIZE, microbatches)
    assert mesh is not None
    spread = Spread(mesh, CONFIG, tables)
    before = TrainState(**placed(spread, vars(state)))
    options = StepOptions(microbatches=microbatches)
    step = make_mesh_train_step(*parts, CONFIG, options)
    found = spread.train_program(step)(before, batch)
    assert int(found.step) == 1 and int(found.skipped) == 0
    np.testing.assert_allclose(found.grad_norm, want.grad_norm, rtol=1e-5)


def test_evaluations_and_looks_need_no_dense_columns():
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    model, batch = MODELS["dcnv2"], batch_without_dense(2, 0)
    state = lookup_test.make_state(model, ADAM, NO_LISTS, num_dense=0)
    seen, want = jax.jit(make_eval_step(model, NO_LISTS))(state, metrics.init(), batch)
    mesh = mesh_of(CONFIG, SIZE, 1)
    assert mesh is not None
    spread = Spread(mesh, CONFIG, NO_LISTS)
    state = TrainState(**placed(spread, vars(state)))
    found, logits = spread.eval_step(model)(state, metrics.init(), batch)
    assert int(found.count) == int(seen.count) == SIZE
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)

    def logits_everywhere(state, batch):
        rows = look_up_everywhere(model, NO_LISTS, state, batch)
        return projected(model, NO_LISTS).apply(variables_of(state), batch.dense, rows)

    logits = jax.jit(spread.everywhere(logits_everywhere))(state, batch)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-6)
