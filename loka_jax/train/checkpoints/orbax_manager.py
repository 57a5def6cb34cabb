"""Orbax as checkpoints use it: awaited, and silent while all goes well."""

import logging
from pathlib import Path

import orbax.checkpoint as ocp


def manager_of(directory: Path) -> ocp.CheckpointManager:
    """Returns a manager of a directory, whose saves are done when they return."""
    # Checkpoints have a thread of their own in the background, which awaits the save.
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    return ocp.CheckpointManager(directory, options=options)


def quiet_orbax() -> None:
    """Keeps Orbax's progress messages off the console, but not warnings and errors."""
    for name in ("absl", "orbax"):
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() < logging.WARNING:
            logger.setLevel(logging.WARNING)
