"""Which devices form a mesh, what it cannot do, and how gradients travel on it."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from loka_jax.ops.tables import TableSpec, with_dims
from loka_jax.optim import OptimConfig
from loka_jax.train.config import EmbeddingConfig, LoopConfig
from loka_jax.train.mesh import devices
from loka_jax.train.mesh.devices import (
    MeshConfig,
    mesh_of,
    require_places,
    used_devices,
)
from tests.support import train as support


@pytest.fixture
def eight(monkeypatch):
    """Lets this machine have eight GPUs, of which nothing is asked."""

    def make_mesh(shape, axes, *, axis_types, devices):
        assert axes == ("replica", "shard") and len(axis_types) == 2
        return SimpleNamespace(devices=np.reshape(devices, shape), size=len(devices))

    monkeypatch.setattr(jax, "devices", lambda: list(range(8)))
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "make_mesh", make_mesh)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    "options, hosts, shape",
    [
        ({}, 1, (1, 8)),
        ({}, 2, (2, 4)),
        ({"replicas": 3, "shards": 2}, 1, (3, 2)),
        ({"replicas": 4}, 1, (4, 2)),
    ],
)
def test_meshes_say_how_many_devices_they_use(monkeypatch, options, hosts, shape):
    monkeypatch.setattr(devices, "hosts", lambda: hosts)
    mesh = mesh_of(MeshConfig(**options), 96, 1)
    (groups, shards), used = shape, mesh.size
    assert mesh.devices.tolist() == np.arange(used).reshape(shape).tolist()
    what = f"{groups} group{'s' * (groups > 1)} of {shards}"
    assert used_devices(*mesh.devices.shape) == f"Devices: {used} of 8, in {what}."
    assert mesh_of(MeshConfig(replicas=1, shards=1), 63, 1) is None


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    "options, size, microbatches, reason",
    [
        ({"shards": 16}, 96, 1, "^--mesh.shards 16 are 16 devices, and there are 8"),
        ({"replicas": 1, "shards": 8}, 64, 3, "multiple of 8 devices x 3"),
        ({"replicas": 3}, 96, 1, "3 does not divide 8 devices: use 1 or 2 or 4 or 8, "),
    ],
)
def test_meshes_that_do_not_fit_are_refused(options, size, microbatches, reason):
    with pytest.raises(ValueError, match=reason):
        mesh_of(MeshConfig(**options), size, microbatches)


WEIGHTS = dict(sync="weights")


@pytest.mark.parametrize(
    "mesh, other, reason",
    [
        (dict(shards=3), {}, "--mesh.shards 3 must be a power of two up to 256"),
        (dict(shards=512), {}, "--mesh.shards 512 must be a power of two"),
        (dict(sync_every=2), {}, "--mesh.sync-every 2 needs --mesh.sync weight"),
        (WEIGHTS, dict(optim=OptimConfig(rows="adam")), "--optim.rows rowwise_adag"),
        (WEIGHTS, dict(optim=OptimConfig(rows_l2=0.1)), "--optim.rows-l2 0.1 changes"),
        (WEIGHTS, dict(embedding=EmbeddingConfig(dtype="bf16")), "--embedding.dtype"),
        (
            WEIGHTS | dict(sync_every=2),
            dict(loop=LoopConfig(steps_per_call=3)),
            "--loop.steps-per-call 3 cannot be with --mesh.sync-every 2",
        ),
    ],
)
def test_odd_meshes_and_what_has_no_average_are_refused(mesh, other, reason):
    config = dataclasses.replace(support.config(), optim=OptimConfig())
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(config, mesh=MeshConfig(**mesh), **other)


def test_rows_must_have_places_on_the_devices():
    rows = (2**31 - 1,) * 3
    one = TableSpec(rows=rows, dim=1)
    require_places(one, SimpleNamespace(shape={"shard": 4}))
    mixed = with_dims(TableSpec(rows=(5, *rows), dim=4), (4, 2, 2, 2))
    for tables in (one, mixed):
        with pytest.raises(ValueError, match="over 2 devices do .* raise --mesh.shard"):
            require_places(tables, SimpleNamespace(shape={"shard": 2}))
