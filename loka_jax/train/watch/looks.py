"""The looks at delayed scales that a run has taken (`scale_watch.py`) and not yet read.

No step waits for a look: it is read where a log line or a checkpoint waits anyway.
"""

import collections
import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from loka_jax.data import Batch
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import named_sites
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.scale_watch import Look, take_look

# Looks that wait for a log line; older ones are read, as they have been computed.
_MAX_UNREAD = 8


class Looks:
    """Unread looks, the oldest first."""

    def __init__(self, say: Callable[[str], None]):
        """Takes a function that receives a sentence for each new outlier."""
        self._say = say
        self._unread: collections.deque[Look] = collections.deque()

    def after(
        self, run: Run, state: TrainState, progress: Progress, batch: Batch
    ) -> Progress:
        """Takes a look after a step on `batch`; returns the progress with old ones."""
        if sites := named_sites(state):
            look = take_look(
                sites,
                {site.path: site.plan.choice.recipe for site in run.sites},
                jnp.asarray(batch.dense),
                step=progress.step,
                position=progress.position,
                skipped=state.skipped,
            )
            self._unread.append(look)
        return self._read(run, progress, _MAX_UNREAD)

    def read(self, run: Run, progress: Progress) -> Progress:
        """Returns the progress with all looks, after waiting for the device."""
        return self._read(run, progress, 0)

    def drop(self) -> None:
        """Forgets unread looks, for a run that goes back to a step before them."""
        self._unread.clear()

    def _read(self, run: Run, progress: Progress, keep: int) -> Progress:
        """Returns the progress with all looks but the newest `keep`."""
        size = run.config.loop.batch_size
        count = len(progress.scale_watch.warnings)
        watch = progress.scale_watch
        while len(self._unread) > keep:
            watch = watch.after(self._unread.popleft(), run.splits.train, size)
        for sentence in watch.warnings[count:]:
            self._say(sentence)
        return dataclasses.replace(progress, scale_watch=watch)
