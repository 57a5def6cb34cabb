"""What a mesh of M x L GPUs takes of memory, wire and time: arithmetic alone.

The rows of the tables lie on L shards, M times; the batch on all n = M L GPUs. Of a
stack of tables, for one GPU: R rows of D values, N lookups of U distinct ids, and
K = 1.05 U ids that it sends and, as owner, receives.

    memory   `mesh_memory`
    wire     ids 4 K, rows K D b, row gradients K D b, of which (L - 1) / L travel;
             dense gradients twice (n - 1) / n; to replicas (M - 1) K (4 + b D). Groups
             that average their rows every k steps send those of a shard that the L
             GPUs have touched in k steps, and what the optimizer keeps of them, once
             in k steps
    time     what travels over its links, a latency for each collective, and the local
             work: sorts of N and K ids, gathers of K and N rows, sums of N gradients,
             updates of K rows (of M K with replicas)

b = 2 bytes travel for a value (bfloat16). Nothing is assumed to overlap, and no GPU to
be slower than another: real steps differ both ways. A step over several GPUs lasts at
least as long as the host takes to launch it, and its share of the call. On one GPU it
is the lookup, the sort and the update of today's step.
"""

import dataclasses
import math
from collections.abc import Iterator

from loka_jax.train.planner.mesh_memory import memory_of
from loka_jax.train.planner.step_sizes import (
    ID_BYTES,
    WIRE_BYTES,
    Mesh,
    Stack,
    Workload,
    meshes,
)

GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of a host and its links.

    The local ones are those of an H200 (docs/kernels.md: lookup, sort and update of
    1.7 M ids, D = 16), the link that of NCCL's all_to_all over four H100. Times of the
    host are those of four H200 with a process each: of a step of one a call, and of
    queueing a step of four a call (docs/distributed.md).

    Attributes:
        link_gb_s: a GPU's, to others of its host, one way.
        network_gb_s: a GPU's, to other hosts: 400 Gb/s, not measured.
        collective_us: latency of a collective in a host.
        launch_us: of the host, for a step over several GPUs.
        call_us: of the host, for a call, which takes one or several steps.
        host_us: added for each doubling of the hosts; not measured.
        peer_us: added for each GPU of other hosts in an all_to_all; not measured.
        sorted_ids_us: ids sorted in a microsecond.
        gather_gb_s: bytes read and written by lookups.
        update_gb_s: bytes read and written by sums and updates of rows.
        gpus_per_host: number of GPUs that `link_gb_s` connects.
        memory_gb: of a GPU.
        memory_share: the part of it that JAX takes.
    """

    link_gb_s: float = 300.0
    network_gb_s: float = 50.0
    collective_us: float = 20.0
    launch_us: float = 250.0
    call_us: float = 945.0
    host_us: float = 5.0
    peer_us: float = 0.5
    sorted_ids_us: float = 14_100.0
    gather_gb_s: float = 4_000.0
    update_gb_s: float = 870.0
    gpus_per_host: int = 8
    memory_gb: float = 141.0
    memory_share: float = 0.75

    def __post_init__(self):  # noqa: D105
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                option = f"--rates.{field.name.replace('_', '-')}"
                raise ValueError(f"{option} {value} must be positive.")
        if self.memory_share > 1:
            raise ValueError(
                f"--rates.memory-share {self.memory_share} must be at most 1."
            )


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a mesh takes of a GPU, by part.

    Attributes:
        mesh: the mesh.
        memory: bytes.
        wire: bytes sent in a step.
        us: of a step.
    """

    mesh: Mesh
    memory: dict[str, float]
    wire: dict[str, float]
    us: dict[str, float]

    @property
    def memory_bytes(self) -> float:
        """All memory."""
        return sum(self.memory.values())

    @property
    def step_us(self) -> float:
        """The time of a step."""
        return sum(self.us.values())

    def why_not(self, rates: Rates) -> str | None:
        """Returns why the mesh does not fit, or None."""
        usable = rates.memory_gb * rates.memory_share
        if self.memory_bytes <= usable * GB:
            return None
        largest = max(self.memory, key=lambda part: self.memory[part])
        return (
            f"{self.memory_bytes / GB:.1f} GB a GPU do not fit into {usable:.1f} GB "
            f"({rates.memory_share:.0%} of {rates.memory_gb:g}); {largest} take "
            f"{self.memory[largest] / GB:.1f}"
        )


def estimate(workload: Workload, mesh: Mesh, rates: Rates) -> Estimate:
    """Returns what a mesh takes."""
    return Estimate(
        mesh,
        memory_of(workload, mesh),
        _wire(workload, mesh),
        _times(workload, mesh, rates),
    )


def fastest(workload: Workload, gpus: int, rates: Rates) -> Estimate:
    """Returns the fastest mesh that fits; if none does, the one that takes least."""
    estimates = [estimate(workload, mesh, rates) for mesh in meshes(gpus)]
    fitting = [one for one in estimates if one.why_not(rates) is None]
    if not fitting:
        return min(estimates, key=lambda one: one.memory_bytes)
    return min(fitting, key=lambda one: one.step_us)


def require_fit(workload: Workload, gpus: int, rates: Rates) -> Estimate:
    """Returns the fastest mesh that fits.

    Raises:
        ValueError: if none fits, in one sentence.
    """
    best = fastest(workload, gpus, rates)
    if reason := best.why_not(rates):
        raise ValueError(
            f"{workload.name} fits no mesh of {gpus} GPUs: on {best.mesh}, which "
            f"takes least, {reason}: use more GPUs, smaller tables or a smaller batch."
        )
    return best


def _wire(workload: Workload, mesh: Mesh) -> dict[str, float]:
    away = (mesh.shards - 1) / mesh.shards
    ids = sum(s.sent for s in workload.stacks) * ID_BYTES
    rows = sum(s.sent * s.dim for s in workload.stacks) * WIRE_BYTES
    summed = 2 * (mesh.gpus - 1) / mesh.gpus * workload.gradient_bytes
    return {
        "ids": away * ids,
        "rows": away * rows,
        "row gradients": away * rows,
        "dense gradients": summed,
        "replicas": _replica_bytes(workload, mesh),
    }


def _touched(workload: Workload, mesh: Mesh) -> Iterator[tuple[Stack, float, int]]:
    """Yields each stack, the rows a step that go to other replicas, and their bytes."""
    every = workload.average_every
    for s in workload.stacks:
        num_bytes = ID_BYTES + WIRE_BYTES * s.dim + (s.state_bytes if every else 0)
        yield s, s.given(mesh, every) / (every or 1), num_bytes


def _replica_bytes(workload: Workload, mesh: Mesh) -> float:
    """Returns the bytes of the touched rows, from each other replica."""
    each = sum(rows * num_bytes for _, rows, num_bytes in _touched(workload, mesh))
    return (mesh.replicas - 1) * each


def _times(workload: Workload, mesh: Mesh, rates: Rates) -> dict[str, float]:
    parts = {
        "dense": workload.dense_us,
        "route": 0.0,
        "fetch": 0.0,
        "give back": 0.0,
        "replicas": 0.0,
        "dense sum": 0.0,
        "host": 0.0,
    }
    for s in workload.stacks:
        _add_rows(parts, s, mesh, rates)
    if mesh.replicas > 1:
        parts["replicas"] += _replica_us(workload, mesh, rates)
    if mesh.gpus > 1:
        # The sum, and the maximum of FP8 state and faults.
        latency = 2 * _latency_us(mesh.gpus, rates)
        parts["dense sum"] = latency + _sum_us(workload.gradient_bytes, mesh, rates)
        host_us = rates.launch_us + rates.call_us / workload.steps_per_call
        parts["host"] = max(host_us - sum(parts.values()), 0.0)
    return parts


def _add_rows(parts: dict[str, float], s: Stack, mesh: Mesh, rates: Rates) -> None:
    """Adds the times of one stack."""
    value_bytes, table_bytes = WIRE_BYTES * s.dim, s.value_bytes * s.dim
    gather, update = 1e3 * rates.gather_gb_s, 1e3 * rates.update_gb_s  # bytes a us
    sort_us = s.lookups / rates.sorted_ids_us
    sums_us = s.lookups * value_bytes / update
    if mesh.shards == 1:
        parts["fetch"] += s.lookups * (table_bytes + value_bytes) / gather
        parts["give back"] += sort_us + sums_us
        parts["give back"] += s.distinct * 2 * s.row_bytes / update
        return
    parts["route"] += sort_us + _exchange_us(s.sent * ID_BYTES, mesh, rates)
    parts["fetch"] += (
        s.sent * (table_bytes + value_bytes) / gather
        + _exchange_us(s.sent * value_bytes, mesh, rates)
        + 2 * s.lookups * value_bytes / gather
    )
    parts["give back"] += (
        sums_us
        + _exchange_us(s.sent * value_bytes, mesh, rates)
        + s.sent / rates.sorted_ids_us
        + s.sent * (value_bytes + 2 * s.row_bytes) / update
    )


def _exchange_us(num_bytes: float, mesh: Mesh, rates: Rates) -> float:
    """Returns the time of an all_to_all over the shards."""
    near = min(mesh.shards, rates.gpus_per_host)
    far = mesh.shards - near
    # Both kinds of link work at a time.
    transfers = (
        (near - 1) / mesh.shards * num_bytes / (1e3 * rates.link_gb_s),
        far / mesh.shards * num_bytes / (1e3 * rates.network_gb_s),
    )
    return _latency_us(mesh.shards, rates) + far * rates.peer_us + max(transfers)


def _replica_us(workload: Workload, mesh: Mesh, rates: Rates) -> float:
    """Returns the time of what makes replicas equal: the touched rows of all."""
    is_near = mesh.gpus <= rates.gpus_per_host
    speed = 1e3 * (rates.link_gb_s if is_near else rates.network_gb_s)
    others = mesh.replicas - 1
    more = sum(
        others * rows / rates.sorted_ids_us
        + others
        * rows
        * (WIRE_BYTES * s.dim + 2 * s.row_bytes)
        / (1e3 * rates.update_gb_s)
        for s, rows, _ in _touched(workload, mesh)
    )
    latency_us = _latency_us(mesh.gpus, rates) / (workload.average_every or 1)
    return latency_us + _replica_bytes(workload, mesh) / speed + more


def _sum_us(num_bytes: int, mesh: Mesh, rates: Rates) -> float:
    """Returns the time of a sum: within hosts, then of each GPU's part between them."""
    near = min(mesh.gpus, rates.gpus_per_host)
    hosts = mesh.gpus / near
    within = 2 * (near - 1) / near * num_bytes / (1e3 * rates.link_gb_s)
    between = 2 * (hosts - 1) / hosts * num_bytes / near / (1e3 * rates.network_gb_s)
    return within + between


def _latency_us(gpus: int, rates: Rates) -> float:
    hosts = max(1.0, gpus / rates.gpus_per_host)
    return rates.collective_us + rates.host_us * math.log2(hosts)
