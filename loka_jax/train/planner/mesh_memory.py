"""The memory that a mesh of M x L GPUs takes of one of them.

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

Letters are those of `mesh_plan`. Sums are XLA's; Triton's kernels take less.
"""

import math

from loka_jax.train.planner.step_sizes import (
    ID_BYTES,
    WIRE_BYTES,
    Mesh,
    Stack,
    Workload,
)

_FLOAT_BYTES = 4
_SORT_BYTES = 8  # a row's number and its place


def memory_of(workload: Workload, mesh: Mesh) -> dict[str, float]:
    """Returns bytes, by part."""
    tables = sum(math.ceil(s.rows / mesh.shards) * s.row_bytes for s in workload.stacks)
    step = _step(workload, mesh)
    replicas = {"replicas": sum(_lists(s, workload, mesh) for s in workload.stacks)}
    most = max(step, replicas, key=lambda parts: sum(parts.values()))
    held = {
        "tables": float(tables),
        "dense": float(workload.state_bytes),
        "log": sum(_log(s, workload, mesh) for s in workload.stacks),
    }
    return held | dict.fromkeys((*step, *replicas), 0.0) | most


def _step(workload: Workload, mesh: Mesh) -> dict[str, float]:
    """Returns what a step needs until it has the gradients of rows."""
    exchange = rows = 0.0
    for s in workload.stacks:
        if mesh.gpus > 1:  # ids are routed though one shard has all rows
            exchange += s.sent_ids * (8 + 4 * s.dim * WIRE_BYTES)
        rows += s.lookups * (s.dim * (2 * WIRE_BYTES + 4) + 16)
    activations = float(workload.activation_bytes)
    return {"activations": activations, "exchange": exchange, "rows": rows}


def _log(s: Stack, workload: Workload, mesh: Mesh) -> float:
    """Returns what a group keeps of the rows of a stack that it will average."""
    if mesh.replicas == 1 or workload.average_every < 2:
        return 0.0
    return workload.average_every * s.sent_ids * (ID_BYTES + s.row_bytes)


def _lists(s: Stack, workload: Workload, mesh: Mesh) -> float:
    """Returns what replicas need to give each other a stack's rows."""
    if mesh.replicas == 1:
        return 0.0
    rows = mesh.replicas * s.rows_for_replicas(mesh, workload.average_every)
    if not workload.average_every:
        return rows * (_SORT_BYTES + s.dim * (WIRE_BYTES + 2 * _FLOAT_BYTES))
    lists = rows * (_SORT_BYTES + 3 * (_FLOAT_BYTES * s.dim + s.state_bytes))
    shard = s.rows / mesh.shards * (ID_BYTES + s.row_bytes)
    return lists + min(_log(s, workload, mesh), shard)
