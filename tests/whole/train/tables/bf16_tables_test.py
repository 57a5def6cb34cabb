"""Runs with tables in bfloat16: on a mesh, over a resume, in an export."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from loka_jax.export import export_run, loader
from loka_jax.ops.row_order import Order, places_of
from loka_jax.train import build as build_lib
from loka_jax.train import session
from loka_jax.train.mesh.devices import MeshConfig
from tests.support import train as support
from tests.support.train import digest, train

SIZE = 128
DATA = dataclasses.replace(support.DATA, examples=512)
ROWS = sum(DATA.rows)
PLACES = places_of(np.arange(ROWS), Order(ROWS, 256))


def in_bf16(config, **changes):
    tables = dataclasses.replace(config.embedding, dtype="bf16")
    return dataclasses.replace(config, embedding=tables, **changes)


def stepped(mesh):
    """The rows after two steps, in their order, float32."""
    config = support.config(batch_size=SIZE, data=DATA)
    model = config.model.clone(dropout_rate=0.0)
    optim = dataclasses.replace(config.optim, rows="rowwise_adagrad")
    config = in_bf16(config, model=model, mesh=mesh, optim=optim)
    run = build_lib.build(config, None, lambda line: None)
    state = run.init()
    for step in range(2):
        state = run.first_step(state, run.read(run.splits.train, step))
    assert state.table.dtype == jnp.bfloat16
    rows = np.asarray(state.table, np.float32)
    return rows if run.spread is None else rows[PLACES]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_mesh_rounds_as_one_device_does():
    mesh = MeshConfig(replicas=2, shards=4, wire_rows="f32", wire_gradients="f32")
    found, want = stepped(mesh), stepped(MeshConfig(replicas=1, shards=1))
    # Sums in another order differ by some 2^-24: by 2^-16 of the distance of two
    # numbers in bfloat16, and so often other neighbours are drawn.
    assert np.count_nonzero(found != want) <= 4
    np.testing.assert_allclose(found, want, rtol=2**-7, atol=1e-9)


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path, monkeypatch):
    support.share_data(monkeypatch)

    def table_of(name, steps, resume=False):
        config = support.config(
            tmp_path / name, max_steps=steps, save_every=3, resume=resume
        )
        console = Console(file=io.StringIO())
        done = session.train(in_bf16(config, plan="off"), [], console)
        assert done.state is not None and done.state.table.dtype == jnp.bfloat16
        return digest(done.state.table)

    whole, cut = table_of("whole", 8), table_of("cut", 3)
    assert cut != whole
    assert table_of("cut", 8, resume=True) == whole


def test_an_export_has_the_rows_of_the_run(tmp_path, monkeypatch):
    support.share_data(monkeypatch)
    config = in_bf16(support.config(tmp_path / "run", epochs=1), plan="off")
    assert train(config)[0] == 0
    out = tmp_path / "model"
    options = dict(batch_sizes=(32,), platforms=("cpu",), plan="off")
    done = export_run(tmp_path / "run", out, **options, say=lambda line: None)
    assert done.differences == {32: 0.0}
    table = loader.read_arrays(out / "weights.safetensors")["table_0"]
    assert table.dtype == ml_dtypes.bfloat16 and table.shape == (ROWS, 16)
