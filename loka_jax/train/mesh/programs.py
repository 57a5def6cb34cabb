"""The compiled programs of a run: they take a batch as their last argument."""

import dataclasses
from typing import Any

import jax

from loka_jax.data import Batch
from loka_jax.train.mesh.routing import Router
from loka_jax.train.mesh.row_sync import RowSync
from loka_jax.train.state import TrainState


class RoutedProgram:
    """A compiled program of a mesh, which takes the routed batch beside the batch.

    In place of a state it takes the state's parts by name, as each has a sharding of
    its own.
    """

    def __init__(self, program: jax.stages.Wrapped, router: Router):
        """Takes the program, and the router of batches."""
        self._program, self._router = program, router

    def __call__(self, state: TrainState, *args: Any) -> Any:
        """Returns the result; the last argument is the batch."""
        return self._program(vars(state), *args[:-1], *self._router(args[-1]))

    def lower(self, state: TrainState, *args: Any) -> jax.stages.Lowered:
        """Returns the program lowered for such a state; the batch must be real."""
        return self._program.lower(vars(state), *args[:-1], *self._router(args[-1]))


class RoutedStep:
    """Training steps of a mesh, which also route the ids of later batches.

    Their program takes the parts of the state, the batches, the same routed, as many
    batches to route, and routed batches to write over. It returns the parts of the next
    state, the rows that `sync` averages, and the later batches routed (`with_needs`).
    """

    def __init__(self, program: jax.stages.Wrapped, router: Router, sync: RowSync):
        """Takes the program, the router of batches, and the averages of rows."""
        self._program, self._router, self._sync = program, router, sync

    def __call__(self, state: TrainState, *batches: Batch) -> TrainState:
        """Returns the state after a step on each batch."""
        placed, routed = self._router.together(batches)
        coming = self._router.next_to_route(batches, placed)
        spent = self._router.spent(placed)
        parts, before, routed_later = self._program(
            vars(state), placed, routed, coming, spent
        )
        self._router.keep(batches, routed, routed_later)
        return self._sync.after(state, TrainState(**parts), before)

    def lower(self, state: TrainState, *batches: Batch) -> jax.stages.Lowered:
        """Returns the program lowered for such a state; the batches must be real."""
        placed, routed = self._router.together(batches)
        return self._program.lower(vars(state), placed, routed, placed, routed)


class TrainStep:
    """A compiled training step, or several by one call.

    Only observed steps take and return Probe's statistics. Passing their many small
    arrays to the others would cost the host more time than a step of a small model.
    """

    def __init__(self, step: jax.stages.Wrapped | RoutedStep, *, is_observed: bool):
        """Takes a compiled step, and whether it reads `TrainState.probe`."""
        self._step = step
        self._is_observed = is_observed
        self.has_run = False

    def __call__(self, state: TrainState, *batches: Batch) -> TrainState:
        """Returns the state after a step on each batch; the old state is donated."""
        after = self._step(self._seen(state), *batches)
        self.has_run = True
        if self._is_observed:
            return after
        return dataclasses.replace(after, probe=state.probe)

    def lower(self, state: TrainState, *batches: Batch) -> jax.stages.Lowered:
        """Returns the step lowered for arguments of these shapes."""
        return self._step.lower(self._seen(state), *batches)

    def _seen(self, state: TrainState) -> TrainState:
        return state if self._is_observed else dataclasses.replace(state, probe={})
