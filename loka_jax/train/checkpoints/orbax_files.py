"""Arrays in a folder, written and read by Orbax.

    <path>/default/   OCDBT; of several processes each writes its own shards

Processes meet at barriers of JAX's coordination service, never by collectives on the
devices: in the background these would come in another order than training's.
"""

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from loka_jax.train.processes.group import ALONE, Processes

_TIMEOUT_SECONDS = 3600  # of a barrier: the slowest disk of all is waited for
_meetings = itertools.count()
_one_at_a_time = threading.Lock()


def quiet() -> None:
    """Keeps Orbax's progress messages off the console, but not warnings and errors."""
    for logger in map(logging.getLogger, ("absl", "orbax")):
        logger.setLevel(max(logger.getEffectiveLevel(), logging.WARNING))


def meet(processes: Processes, name: str) -> None:
    """Waits until all processes have come to a place; nothing in a process alone.

    They meet at the same places in the same order.
    """
    wait = ocp.multihost.get_barrier_sync_fn(processes=set(range(processes.count)))
    wait(key=f"{name}-{next(_meetings)}", timeout_ms=1000 * _TIMEOUT_SECONDS)


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a new folder, in a process alone."""
    handler, args, _ = _orbax_arguments(arrays, ALONE)
    # Orbax numbers saves by process: two at once await each other's folders.
    with _one_at_a_time, ocp.Checkpointer(handler) as writer:
        writer.save(path, args=args)


def begin(
    path: Path, arrays: dict[str, jax.Array | np.ndarray], processes: Processes
) -> ocp.AsyncCheckpointer:
    """Returns a writer that has copied the arrays; `wait_until_finished` awaits it.

    Each process writes the shards that it has to the new folder, in one that is there,
    and the first the arrays in host memory.
    """
    handler, args, together = _orbax_arguments(arrays, processes)
    writer = ocp.AsyncCheckpointer(
        handler, timeout_secs=_TIMEOUT_SECONDS, multiprocessing_options=together
    )
    writer.save(path, args=args)
    return writer


def _orbax_arguments(arrays: dict[str, Any], processes: Processes) -> tuple:
    """Returns the handler, the arguments of a save, and the options of processes."""
    # Orbax refuses arrays without elements, and a tree without arrays.
    stored = {name: array for name, array in arrays.items() if array.size}
    stored = stored or {"nothing": np.zeros(1, np.int8)}
    together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(processes.count))
    )
    handler = ocp.CompositeCheckpointHandler(
        default=ocp.PyTreeCheckpointHandler(multiprocessing_options=together),
        composite_options=ocp.CompositeOptions(multiprocessing_options=together),
    )
    return handler, ocp.args.Composite(default=ocp.args.PyTreeSave(stored)), together


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays that Orbax finds in a folder, by name."""
    folder: Any = path / "default"  # for which Orbax has a type of its own
    tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    return {name: tuple(array.shape) for name, array in tree.items()}


def read(path: Path, leaves: dict[str, Any]) -> dict[str, np.ndarray | jax.Array]:
    """Returns arrays of a folder.

    Args:
        leaves: shape, dtype and sharding, or a NumPy array, by name. Where processes
            share a leaf it is read to where it lies; others come to the host.
    """
    if not leaves:
        return {}
    how = {name: _restore_args(leaf) for name, leaf in leaves.items()}
    args = ocp.args.PyTreeRestore(
        item=dict.fromkeys(leaves, 0),
        restore_args=how,
        partial_restore=True,  # `require_fit` has compared the names
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path / "default", args=args)


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype
    )
