"""The devices of a run, what lies where on them, and how their gradients are summed.

mesh ("replica", "shard"), M x L devices
batches     spread over all devices
tables      spread over "shard", each replica has them all
the rest    on all devices
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax.dispatch import gradient_wire
from loka_jax.ops.row_codec import Codec
from loka_jax.ops.row_order import VIRTUAL_SHARDS, Order
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.optim import OptimConfig
from loka_jax.options import option_of, require
from loka_jax.train.processes.group import hosts
from loka_jax.train.state import TrainState
from loka_jax.train.tables.embedding_config import EmbeddingConfig

REPLICA, SHARD = AXES = ("replica", "shard")
BATCH = P(AXES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Several devices: replicas x shards of them.

    Attributes:
        replicas: groups of devices with tables of their own; None for 1, or one for
            each host.
        shards: devices over which a group's tables are spread, a power of two; None for
            all GPUs of a host, or with `replicas` for an equal part of all devices. On
            CPUs, and with one device, None for both is no mesh.
        wire_rows: how rows travel: "f32", "bf16", or "e4m3" or "int8" with a scale a
            row.
        wire_gradients: how the gradients of rows travel, and the changes of rows where
            groups average them.
        sync: what makes the tables of all groups equal: their rows all get the
            "gradients" of all groups, which is exact; or groups update them alone, and
            average the "weights" of touched rows (arXiv 2508.03854).
        sync_every: steps from one average to the next.
    """

    replicas: int | None = None
    shards: int | None = None
    wire_rows: Codec = "bf16"
    wire_gradients: Codec = "bf16"
    sync: Literal["gradients", "weights"] = "gradients"
    sync_every: int = 1

    def __post_init__(self):  # noqa: D105
        for name in ("replicas", "shards", "sync_every"):
            value = getattr(self, name)
            is_count = value is None or value >= 1
            require(is_count, option_of(f"mesh.{name}"), value, "at least 1")
        if self.sync_every > 1 and self.sync != "weights":
            raise ValueError(
                f"--mesh.sync-every {self.sync_every} needs --mesh.sync weights: "
                "gradients reach all groups in every step."
            )
        shards = self.shards or 1
        is_part = shards <= VIRTUAL_SHARDS and VIRTUAL_SHARDS % shards == 0
        allowed = f"a power of two up to {VIRTUAL_SHARDS}"
        require(is_part, "--mesh.shards", shards, allowed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesConfig:
    """Sums over several devices.

    Attributes:
        gradients: how dense gradients travel: "f32" is exact up to the order of
            addition, "bf16" and "int8" round; "auto" takes the fastest by what was
            measured on such GPUs, and "f32" on GPUs that were not. With one device
            nothing travels.
    """

    gradients: gradient_wire.Option = "auto"


def require_averages(
    config: MeshConfig, optim: OptimConfig, embedding: EmbeddingConfig
) -> None:
    """Raises ValueError if groups cannot average what their rows' optimizer changes."""
    if config.sync != "weights":
        return
    if embedding.dtype != "f32":
        raise ValueError(
            "--mesh.sync weights averages rows, and averages of bf16 are no bf16: use "
            "--mesh.sync gradients, or --embedding.dtype f32."
        )
    if optim.rows == "adam":
        raise ValueError(
            "--mesh.sync weights averages what a row optimizer keeps, and the counts "
            "of Adam have no average: use --optim.rows rowwise_adagrad or sgd."
        )
    if optim.rows_l2 > 0:
        raise ValueError(
            f"--optim.rows-l2 {optim.rows_l2} changes every row in every step, and "
            "--mesh.sync weights sends what has changed: use --mesh.sync gradients."
        )


def mesh_of(config: MeshConfig, batch_size: int, microbatches: int) -> Mesh | None:
    """Returns the mesh of a run, None for one device.

    Raises:
        ValueError: if there are too few devices, or groups alone are given that do not
            divide them, or the batch does not divide.
    """
    replicas, shards = shape_of(config)
    count = replicas * shards
    if count == 1:
        return None
    devices = jax.devices()
    if count > len(devices):
        groups = f"--mesh.replicas {replicas} x " if replicas > 1 else ""
        raise ValueError(
            f"{groups}--mesh.shards {shards} are {count} devices, and there are "
            f"{len(devices)}: use fewer."
        )
    if VIRTUAL_SHARDS % shards:
        raise ValueError(
            f"the {shards} devices of a host are no power of two: give "
            "--mesh.shards, and --mesh.replicas for the rest."
        )
    if batch_size % (count * microbatches):
        parts = f"{count} devices" + f" x {microbatches}" * (microbatches > 1)
        raise ValueError(
            f"--loop.batch-size {batch_size} must be a multiple of {parts}: "
            "change it, or use fewer devices with --mesh.shards and --mesh.replicas."
        )
    auto, shape = (AxisType.Auto,) * len(AXES), (replicas, shards)
    return jax.make_mesh(shape, AXES, axis_types=auto, devices=devices[:count])


def shape_of(config: MeshConfig) -> tuple[int, int]:
    """Returns the number of replicas and shards."""
    replicas, devices = config.replicas or 1, jax.device_count()
    if config.shards is not None:
        return replicas, config.shards
    if config.replicas is None:
        # CPU devices share the cores of one CPU: nothing is gained by several.
        if jax.default_backend() == "cpu" and jax.process_count() == 1:
            return 1, 1
        groups = hosts()
        return groups, devices // groups
    if replicas <= devices and devices % replicas:
        counts = " or ".join(map(str, group_counts(devices)))
        raise ValueError(
            f"--mesh.replicas {replicas} does not divide {devices} devices: use "
            f"{counts}, or give --mesh.shards, too, to train on fewer devices."
        )
    return replicas, max(devices // replicas, 1)


def group_counts(devices: int) -> list[int]:
    """Returns in how many groups all of some devices can be, the fewest first."""
    return [
        n
        for n in range(1, devices + 1)
        if devices % n == 0 and VIRTUAL_SHARDS % (devices // n) == 0
    ]


def used_devices(groups: int, shards: int) -> str:
    """Returns a sentence that says how many devices a run uses, and in which groups."""
    return (
        f"Devices: {groups * shards} of {jax.device_count()}, in {groups} "
        f"{'group' if groups == 1 else 'groups'} of {shards}."
    )


def scaled_sums(groups: int, optim: OptimConfig) -> str:
    """Returns a sentence that says by what c groups divide their sums of squares."""
    c, why = optim.rows_c, "--optim.rows-c"
    if c is None:
        c, why = groups, "their number"
    return f"{groups} groups update their rows alone, by AdaGrad with c = {c:g}, {why}."


def order_of(spec: TableSpec) -> Order:
    """Returns the order of the rows of tables over devices."""
    return Order(spec.total_rows, VIRTUAL_SHARDS)


def require_places(tables: Tables, mesh: Mesh) -> None:
    """Raises ValueError if places of rows would not fit in int32 of some device."""
    shards = mesh.shape[SHARD]
    for stack in (tables,) if isinstance(tables, TableSpec) else tables.stacks:
        if not order_of(stack).places // shards < 2**31 - 1:
            raise ValueError(
                f"{stack.total_rows} rows in all over {shards} devices do not fit in "
                "int32 places of each: raise --mesh.shards, or hash the largest fields "
                "into fewer rows."
            )


def state_specs() -> dict[str, P]:
    """Returns how the parts of a state lie on a mesh, by name."""
    names = [field.name for field in dataclasses.fields(TrainState)]
    return dict.fromkeys(names, P()) | {"table": P(SHARD), "row_state": P(SHARD)}


def map_shards(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns the `shard_map` of a function that may use empty arrays."""

    # XLA:CPU (jax 0.11.2) ends the process where an empty argument is used, as features
    # [B, 0] are; empty constants do no harm.
    def without_empty(*args: Any) -> Any:
        return function(
            *jax.tree.map(lambda x: x if x.size else jnp.zeros(x.shape, x.dtype), args)
        )

    return jax.shard_map(
        without_empty,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Returns partition specs as shardings of a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
