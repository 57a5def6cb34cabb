"""A checkpoint that several processes write together: each its own shards.

    all         the shards are copied to the host, then written in the background
    process 0   makes the folder before, and commits it when all have written

Processes meet at barriers of JAX's coordination service, never by collectives on the
devices: in the background these would come in another order than training's.
"""

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from loka_jax.train.processes.group import Processes

_TIMEOUT_SECONDS = 3600  # of a barrier: the slowest disk of all is waited for
_meetings = itertools.count()


def meet(processes: Processes, name: str) -> None:
    """Waits until all processes have come here; nothing in a process alone.

    Args:
        processes: of the run, which meet at the same places in the same order.
        name: of the place.
    """
    wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(processes.count)))
    wait(key=f"{name}-{next(_meetings)}", timeout_ms=1000 * _TIMEOUT_SECONDS)


def begin(
    path: Path, arrays: dict[str, jax.Array | np.ndarray], processes: Processes
) -> ocp.AsyncCheckpointer:
    """Returns a writer that has copied the arrays; `wait_until_finished` awaits it.

    Args:
        path: of the folder to write, as `CheckpointManager` does, in one that is
            there.
        arrays: of which each process writes the shards that it has, and the first
            those in host memory.
        processes: of the run.
    """
    together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(processes.count))
    )
    handler = ocp.CompositeCheckpointHandler(
        default=ocp.PyTreeCheckpointHandler(multiprocessing_options=together),
        composite_options=ocp.CompositeOptions(multiprocessing_options=together),
    )
    writer = ocp.AsyncCheckpointer(
        handler, timeout_secs=_TIMEOUT_SECONDS, multiprocessing_options=together
    )
    args = ocp.args.Composite(default=ocp.args.PyTreeSave(arrays))
    writer.save(path, args=args)
    return writer


def restore_args(leaf: Any) -> ocp.RestoreArgs:
    """Returns how to read a leaf: where it lies if processes share it, or on the host.

    Args:
        leaf: shape, dtype and sharding, or a NumPy array.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )
