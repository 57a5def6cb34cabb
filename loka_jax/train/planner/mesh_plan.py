"""What a mesh of M x L GPUs takes of memory, wire and time: arithmetic alone.

The rows of the tables lie on L shards, M times; the batch on all n = M L GPUs. Of a
stack of tables, for one GPU: R rows of D values, N lookups of U distinct ids, and
K = 1.05 U ids that it sends and, as owner, receives.

    memory   see below
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

Memory of a GPU:

    tables        (R / L) row_bytes
    dense         parameters, optimizer and gradients
    log           rows as they were before each of k > 1 steps between averages of
                  groups, with their numbers: k K (4 + row_bytes)

and the more of what a step needs until it has the gradients of rows, and of what
replicas, M > 1, need then:

    activations   of the dense part
    exchange      ids 8 K; rows and their gradients, both ways, 4 K D b
    rows          embeddings and cotangents 2 N D b; sums 4 N D; sort 16 N

    replicas      from all of them, M lists: sort 8 M K; gradients M K D b; the same as
                  float32 and their sums 8 M K D. Of groups that average the A rows that
                  each has touched: sort 8 M A; changes, sums and means 3 M A (4 D + s),
                  s bytes of the optimizer's state; with k > 1 beside the log its oldest
                  entries of all rows

Sums are XLA's; Triton's kernels take less.
"""

import dataclasses
import math
from collections.abc import Iterator

from loka_jax.options import require
from loka_jax.train.mesh.devices import group_counts
from loka_jax.train.planner.workload import SPARE, Stack, Workload

GB = 1e9
_WIRE_BYTES = 2  # of a value: bfloat16
_ID_BYTES = 4
_FLOAT_BYTES = 4
_SORT_BYTES = 8  # a row's number and its place


@dataclasses.dataclass(frozen=True)
class Mesh:
    """M replicas of L shards."""

    replicas: int
    shards: int

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"{self.replicas} x {self.shards}"


def meshes(gpus: int) -> Iterator[Mesh]:
    """Yields all meshes of that many GPUs, those with the most shards first."""
    for replicas in group_counts(gpus):
        yield Mesh(replicas, gpus // replicas)


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
        gather_gb_s: bytes read and written by lookups.
        update_gb_s: bytes read and written by sums and updates of rows.
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

    def __post_init__(self):
        for name, value in vars(self).items():
            require(value > 0, f"--rates.{name.replace('_', '-')}", value, "positive")
        share = self.memory_share
        require(share <= 1, "--rates.memory-share", share, "at most 1")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a mesh takes of a GPU, by part.

    Attributes:
        memory: bytes.
        wire: bytes sent in a step.
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
        _memory(workload, mesh),
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


def _memory(workload: Workload, mesh: Mesh) -> dict[str, float]:
    """Returns bytes, by part."""
    tables = exchange = rows = log = lists = 0.0
    for s in workload.stacks:
        tables += math.ceil(s.rows / mesh.shards) * s.row_bytes
        if mesh.gpus > 1:  # ids are routed though one shard has all rows
            exchange += s.sent_ids * (8 + 4 * s.dim * _WIRE_BYTES)
        rows += s.lookups * (s.dim * (2 * _WIRE_BYTES + 4) + 16)
        log += _log(s, workload, mesh)
        lists += _lists(s, workload, mesh)
    activations = float(workload.activation_bytes)
    step = {"activations": activations, "exchange": exchange, "rows": rows}
    replicas = {"replicas": lists}
    most = max(step, replicas, key=lambda parts: sum(parts.values()))
    held = {"tables": tables, "dense": float(workload.state_bytes), "log": log}
    return held | dict.fromkeys((*step, *replicas), 0.0) | most


def _log(s: Stack, workload: Workload, mesh: Mesh) -> float:
    """Returns what a group keeps of the rows of a stack that it will average."""
    if mesh.replicas == 1 or workload.average_every < 2:
        return 0.0
    return workload.average_every * s.sent_ids * (_ID_BYTES + s.row_bytes)


def _lists(s: Stack, workload: Workload, mesh: Mesh) -> float:
    """Returns what replicas need to give each other a stack's rows."""
    if mesh.replicas == 1:
        return 0.0
    rows = mesh.replicas * _given_rows(s, workload, mesh)
    if not workload.average_every:
        return rows * (_SORT_BYTES + s.dim * (_WIRE_BYTES + 2 * _FLOAT_BYTES))
    lists = rows * (_SORT_BYTES + 3 * (_FLOAT_BYTES * s.dim + s.state_bytes))
    shard = s.rows / mesh.shards * (_ID_BYTES + s.row_bytes)
    return lists + min(_log(s, workload, mesh), shard)


def _given_rows(s: Stack, workload: Workload, mesh: Mesh) -> float:
    """Returns the rows that a GPU gives to other replicas at a time."""
    if not workload.average_every:
        return s.sent_ids
    touched = s.sent_ids
    if workload.average_every > 1:  # a row once, of all devices and steps
        touched = SPARE * s.averaged[mesh.shards.bit_length() - 1]
    return min(touched, s.rows / mesh.shards)


def _wire(workload: Workload, mesh: Mesh) -> dict[str, float]:
    away = (mesh.shards - 1) / mesh.shards
    ids = away * sum(s.sent_ids for s in workload.stacks) * _ID_BYTES
    rows = away * sum(s.sent_ids * s.dim for s in workload.stacks) * _WIRE_BYTES
    summed = 2 * (mesh.gpus - 1) / mesh.gpus * workload.gradient_bytes
    every, replicas = workload.average_every, 0.0
    for s in workload.stacks:
        num_bytes = _ID_BYTES + _WIRE_BYTES * s.dim + (s.state_bytes if every else 0)
        replicas += _given_rows(s, workload, mesh) / (every or 1) * num_bytes
    return {
        "ids": ids,
        "rows": rows,
        "row gradients": rows,
        "dense gradients": summed,
        "replicas": (mesh.replicas - 1) * replicas,
    }


def _times(workload: Workload, mesh: Mesh, rates: Rates) -> dict[str, float]:
    names = ("route", "fetch", "give back", "replicas", "dense sum", "host")
    parts = {"dense": workload.dense_us} | dict.fromkeys(names, 0.0)
    for s in workload.stacks:
        for name, us in _row_times(s, mesh, rates).items():
            parts[name] += us
    if mesh.replicas > 1:
        parts["replicas"] = _replica_us(workload, mesh, rates)
    if mesh.gpus > 1:
        # The sum, and the maximum of FP8 state and faults.
        latency = 2 * _latency_us(mesh.gpus, rates)
        parts["dense sum"] = latency + _sum_us(workload.gradient_bytes, mesh, rates)
        host_us = rates.launch_us + rates.call_us / workload.steps_per_call
        parts["host"] = max(host_us - sum(parts.values()), 0.0)
    return parts


def _row_times(s: Stack, mesh: Mesh, rates: Rates) -> dict[str, float]:
    """Returns the times of the rows of one stack."""
    value_bytes, table_bytes = _WIRE_BYTES * s.dim, s.value_bytes * s.dim
    gather, update = 1e3 * rates.gather_gb_s, 1e3 * rates.update_gb_s  # bytes a us
    sort_us = s.lookups / rates.sorted_ids_us
    sums_us = s.lookups * value_bytes / update
    if mesh.shards == 1:
        return {
            "fetch": s.lookups * (table_bytes + value_bytes) / gather,
            "give back": sort_us + sums_us + s.distinct * 2 * s.row_bytes / update,
        }
    exchange_us = _exchange_us(s.sent_ids * value_bytes, mesh, rates)
    return {
        "route": sort_us + _exchange_us(s.sent_ids * _ID_BYTES, mesh, rates),
        "fetch": s.sent_ids * (table_bytes + value_bytes) / gather
        + exchange_us
        + 2 * s.lookups * value_bytes / gather,
        "give back": sums_us
        + exchange_us
        + s.sent_ids / rates.sorted_ids_us
        + s.sent_ids * (value_bytes + 2 * s.row_bytes) / update,
    }


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
    is_near, every = mesh.gpus <= rates.gpus_per_host, workload.average_every or 1
    speed = 1e3 * (rates.link_gb_s if is_near else rates.network_gb_s)
    us = _latency_us(mesh.gpus, rates) / every
    us += _wire(workload, mesh)["replicas"] / speed
    for s in workload.stacks:
        rows = (mesh.replicas - 1) * _given_rows(s, workload, mesh) / every
        num_bytes = _WIRE_BYTES * s.dim + 2 * s.row_bytes
        us += rows / rates.sorted_ids_us + rows * num_bytes / (1e3 * rates.update_gb_s)
    return us


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
