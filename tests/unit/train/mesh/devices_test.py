"""Which devices form a mesh, what it cannot do, and how gradients travel on it."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from loka_jax.dispatch import gradient_wire
from loka_jax.ops.tables import MixedTables, TableSpec, with_dims
from loka_jax.optim import OptimConfig
from loka_jax.train.config import EmbeddingConfig, LoopConfig
from loka_jax.train.mesh import devices, gradient_sum
from loka_jax.train.mesh.devices import (
    MeshConfig,
    group_counts,
    mesh_of,
    require_places,
    used_devices,
)
from loka_jax.train.mesh.gradient_sum import CollectivesConfig
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
    "options, hosts, shape, sentence",
    [
        ({}, 1, (1, 8), "Devices: 8 of 8, in 1 group of 8."),
        ({}, 2, (2, 4), "Devices: 8 of 8, in 2 groups of 4."),
        ({"replicas": 3, "shards": 2}, 1, (3, 2), "Devices: 6 of 8, in 3 groups of 2."),
        ({"replicas": 4}, 1, (4, 2), "Devices: 8 of 8, in 4 groups of 2."),
    ],
)
def test_meshes_say_how_many_devices_they_use(
    monkeypatch, options, hosts, shape, sentence
):
    monkeypatch.setattr(devices, "hosts", lambda _: hosts)
    mesh = mesh_of(MeshConfig(**options), 96, 1)
    assert mesh.devices.shape == shape and used_devices(mesh) == sentence
    assert mesh.devices.ravel().tolist() == list(range(mesh.size))


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


def test_groups_have_numbers_of_shards_that_divide_the_virtual_ones():
    assert (group_counts(6), group_counts(8)) == ([3, 6], [1, 2, 4, 8])
    assert group_counts(512)[0] == 2  # 256 shards are the most


def test_one_device_is_no_mesh():
    assert mesh_of(MeshConfig(), 64, 1) is None  # on a CPU
    assert mesh_of(MeshConfig(replicas=1, shards=1), 63, 1) is None


def config_with(mesh, optim=None, embedding=None, **loop):
    return dataclasses.replace(
        support.config(),
        mesh=MeshConfig(**mesh),
        optim=OptimConfig(**optim or {}),
        embedding=EmbeddingConfig(**embedding or {}),
        loop=LoopConfig(**loop),
    )


WEIGHTS = dict(sync="weights")


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(mesh=dict(shards=3)), "--mesh.shards 3 must be a power of two up to 256"),
        (dict(mesh=dict(shards=512)), "--mesh.shards 512 must be a power of two"),
        (dict(mesh=dict(sync_every=2)), "--mesh.sync-every 2 needs --mesh.sync weight"),
        (dict(mesh=WEIGHTS, optim=dict(rows="adam")), "--optim.rows rowwise_adagrad"),
        (dict(mesh=WEIGHTS, optim=dict(rows_l2=0.1)), "--optim.rows-l2 0.1 changes ev"),
        (dict(mesh=WEIGHTS, embedding=dict(dtype="bf16")), "--embedding.dtype f32"),
        (
            dict(mesh=WEIGHTS | dict(sync_every=2), steps_per_call=3),
            "--loop.steps-per-call 3 cannot be with --mesh.sync-every 2",
        ),
    ],
)
def test_odd_meshes_and_what_has_no_average_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        config_with(**options)


def test_rows_must_have_places_on_the_devices():
    mesh = SimpleNamespace(shape={"shard": 4})
    rows = (2**31 - 1,) * 3
    require_places(TableSpec(rows=rows, dim=1), mesh)
    few = SimpleNamespace(shape={"shard": 2})
    mixed = with_dims(TableSpec(rows=(5, *rows), dim=4), (4, 2, 2, 2))
    assert isinstance(mixed, MixedTables)
    for tables in (TableSpec(rows=rows, dim=1), mixed):
        with pytest.raises(ValueError, match="over 2 devices do .* raise --mesh.shard"):
            require_places(tables, few)


PARAMS = {"a": np.zeros((3, 5)), "b": np.zeros(1)}


def test_auto_takes_what_was_measured_to_be_faster(tmp_path, monkeypatch):
    us = {"f32": {"1000": 100.0}, "int8 xla": {"1000": 10.0}}
    table = tmp_path / "table.json"
    host = {"device": "cpu", "devices": 8, "source": "here", "us": us}
    gradient_wire.add(table, host)
    read = functools.partial(gradient_wire.read, table)
    monkeypatch.setattr(gradient_wire, "read", read)
    found = gradient_sum.choose(CollectivesConfig(), PARAMS, 8)
    assert (found.wire, found.num_bytes) == ("int8", 64)
    assert "f32 100, int8 10 us" in found.reason
    assert gradient_sum.choose(CollectivesConfig(), PARAMS, 4).wire == "f32"
    asked = CollectivesConfig(gradients="bf16")
    assert gradient_sum.choose(asked, PARAMS, 8)[:2] == ("bf16", "as asked")
    # Between hosts times are others.
    monkeypatch.setattr(gradient_sum, "hosts", lambda environment: 2)
    found = gradient_sum.choose(CollectivesConfig(), PARAMS, 8)
    assert found.wire == "f32" and "8 x cpu of 2 hosts" in found.reason
