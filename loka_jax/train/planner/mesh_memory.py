"""The memory that a mesh of M x L GPUs takes of one of them.

    tables        (R / L) row_bytes
    dense         parameters, optimizer and gradients
    activations   of the dense part
    exchange      ids 8 K; rows and their gradients, both ways, 4 K D b
    rows          embeddings and cotangents 2 N D b; sums 4 N D; sort 16 N

Letters are those of `mesh_plan`.
"""

import math

from loka_jax.train.planner.step_sizes import WIRE_BYTES, Mesh, Workload


def memory_of(workload: Workload, mesh: Mesh) -> dict[str, float]:
    """Returns bytes, by part."""
    parts = {
        "tables": 0.0,
        "dense": float(workload.state_bytes),
        "activations": float(workload.activation_bytes),
        "exchange": 0.0,
        "rows": 0.0,
    }
    for s in workload.stacks:
        parts["tables"] += math.ceil(s.rows / mesh.shards) * s.row_bytes
        if mesh.gpus > 1:  # ids are routed though one shard has all rows
            parts["exchange"] += s.sent * (8 + 4 * s.dim * WIRE_BYTES)
        parts["rows"] += s.lookups * (s.dim * (2 * WIRE_BYTES + 4) + 16)
    return parts
