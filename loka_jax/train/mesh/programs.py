"""The compiled programs of a mesh, which take routed batches beside the batches.

In place of a state they take its parts by name, as each has a sharding of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from loka_jax.data import Batch
from loka_jax.train.mesh.devices import BATCH, map_shards, shardings, state_specs
from loka_jax.train.mesh.routing import (
    SPECS,
    Router,
    Routing,
    lists_asked,
    routed_batch,
    routed_shardings,
    routed_specs,
    with_needs,
)
from loka_jax.train.mesh.row_sync import RowSync
from loka_jax.train.placement import INFERENCE_OPTIONS, apart
from loka_jax.train.state import TrainState


def train_program(
    mesh: Mesh, router: Router, step: Callable, steps: int, options: dict[str, Any]
) -> jax.stages.Wrapped:
    """Returns steps of `make_train_step`, one after another, compiled.

    The program takes the parts of the state, the batches, the same routed, as many
    batches to route, and routed batches to write over. It returns the parts of the next
    state, the rows that `RowSync` averages, and the later batches routed
    (`with_needs`).

    The state is donated, and so are routed batches to write over: XLA records kernels
    in graphs with the addresses of their arrays, and has to record them again when an
    address changes.
    """

    def parts_after(parts: dict[str, Any], batches, routed, coming, spent):
        del spent
        state, before, later = TrainState(**parts), None, []
        for i, batch in enumerate(batches):
            with jax.named_scope("route"):
                capacity = routed[i].capacity
                routes, counts = router.part(capacity, coming[i])
            state = apart(state) if i else state
            given = Routing(routed[i], counts, lists_asked(routes))
            state, left = step(state, batch, given)
            later.append(routed_batch(routes, left.asked, left.counts))
            before = left.before
        return vars(state), before, with_needs(later)

    specs, every = state_specs(), (SPECS,) * steps
    in_specs = (specs, BATCH, every, BATCH, every)
    out_specs = (specs, BATCH, routed_specs(steps))
    return jax.jit(
        map_shards(parts_after, mesh, in_specs, out_specs),
        donate_argnums=(0, 4),
        keep_unused=True,  # donated ones
        in_shardings=shardings(mesh, in_specs),
        out_shardings=(*shardings(mesh, out_specs[:2]), routed_shardings(mesh, steps)),
        compiler_options=options,
    )


def eval_program(mesh: Mesh, step: Callable) -> jax.stages.Wrapped:
    """Returns a step of `make_eval_step`, compiled, its metrics donated.

    It takes the parts of the state, metrics, a batch, and the same routed.
    """

    def evaluated(parts: dict[str, Any], seen, batch, routed) -> Any:
        return step(TrainState(**parts), seen, batch, Routing(routed))

    in_specs, out_specs = (state_specs(), P(), BATCH, SPECS), (P(), BATCH)
    return jax.jit(
        map_shards(evaluated, mesh, in_specs, out_specs),
        donate_argnums=1,
        keep_unused=True,
        in_shardings=shardings(mesh, in_specs),
        out_shardings=shardings(mesh, out_specs),
        compiler_options=INFERENCE_OPTIONS,
    )


class RoutedStep:
    """Training steps of a mesh, which also route the ids of later batches."""

    def __init__(self, program: jax.stages.Wrapped, router: Router, sync: RowSync):
        """Takes the program, the router of batches, and the averages of rows."""
        self._program, self._router, self._sync = program, router, sync

    def __call__(self, state: TrainState, *batches: Batch) -> TrainState:
        """Returns the state after a step on each batch."""
        parts, before = self._router.run(self._program, vars(state), batches)
        return self._sync.after(state, TrainState(**parts), before)

    def lower(self, state: TrainState, *batches: Batch) -> jax.stages.Lowered:
        """Returns the program lowered for such a state; the batches must be real."""
        placed, routed = self._router.together(batches)
        return self._program.lower(vars(state), placed, routed, placed, routed)
