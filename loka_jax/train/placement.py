"""Where a run computes: on one device, here, or over a mesh (`mesh.placement`).

A training step is the same on both (`step.py`) but for what a placement does: it looks
rows up, brings together what devices have of a step, and updates rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from loka_jax import compat
from loka_jax.data import WHOLE, Batch, Part, Position
from loka_jax.ops.row_order import Order
from loka_jax.ops.tables import Tables
from loka_jax.train import metrics
from loka_jax.train.checkpoints.row_layout import RowLayout
from loka_jax.train.gradients import Gradients
from loka_jax.train.state import TrainState, init_tables
from loka_jax.train.tables import lookup
from loka_jax.train.tables.stacks import by_stack, regroup, split
from loka_jax.train.tables.update import RowUpdate, update_table

# Of evaluation and inference: roundings that the model makes are made, so that weights
# may be rounded ahead, as in an exported model. By default XLA leaves some out.
INFERENCE_OPTIONS = {"xla_allow_excess_precision": False}


class Outcome(NamedTuple):
    """The outcome of a device's part of a batch, or of the whole batch.

    Attributes:
        loss: a part's share in the loss of the batch.
        grads: the gradients; those of embeddings are always of a device's part.
        batch_stats: running moments of batch norms after the step.
        seen: metrics of the examples.
        is_finite: whether dense features and the gradients of embeddings are finite,
            and no embedding is missing.
    """

    loss: Float[Array, ""]
    grads: Gradients
    batch_stats: Any
    seen: metrics.MetricState
    is_finite: Bool[Array, ""]


class Found(NamedTuple):
    """The ids of a batch (`lookup.BatchIds` by stack), and how many are bad."""

    ids: Any
    bad_ids: Int[Array, ""]
    total_weight: None = None  # that of the batch


@dataclasses.dataclass(frozen=True)
class Placement:
    """One device, which has all tables and takes whole batches."""

    tables: Tables

    @property
    def shape(self) -> tuple[int, int]:
        """The groups of devices, and the devices of a group."""
        return 1, 1

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def layout(self) -> RowLayout:
        """The order of the tables' rows."""
        return RowLayout(self.tables, 1)

    @property
    def sharding(self) -> Sharding | None:
        """Where batches lie; None for JAX's default device."""
        return None

    @property
    def part(self) -> Part:
        """The part of each batch that this process reads."""
        return WHOLE

    def numbers(self) -> dict[str, Any]:
        """Returns what several devices add to a log line."""
        return {}

    def choices(self) -> dict[str, Any]:
        """Returns what was chosen for several devices, as JSON values."""
        return {}

    def put(self, batch: Batch) -> Batch:
        """Returns a batch, of which this process has read its part, on the devices."""
        return batch

    def look_ahead(
        self, batches: Iterable[tuple[Position, Batch]]
    ) -> Iterable[tuple[Position, Batch]]:
        """Returns the batches, each with what its step needs begun a step before."""
        return batches

    def sync(self, state: TrainState) -> TrainState:
        """Returns a state that all groups of devices have alike.

        Between training steps they may not (`row_sync`), and whatever else reads the
        tables needs them so. The state is donated.
        """
        return state

    def template(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Returns the parts of a state of one device as they lie on the devices."""
        return shapes

    def init(
        self,
        init: Callable[[Array], TrainState],
        key: Array,
        stddev: float,
        row_optimizer: Any,
    ) -> TrainState:
        """Returns the state before the first step, its tables made where they lie.

        With the key, `init` gives the state without tables.
        """
        with compat.random_bits_by_kernel():
            state = jax.jit(init)(key)
        how = self.tables, row_optimizer, stddev
        parts = jax.jit(lambda key: init_tables(key, *how))(key)
        return dataclasses.replace(state, **parts)

    def train_program(self, step: Callable, steps: int, options: dict[str, Any]) -> Any:
        """Returns steps of `make_train_step`, compiled, their state donated.

        A call of it, and of its `lower`, takes the state and a batch for each of the
        `steps`.
        """
        del steps
        return jax.jit(
            one_after_another(step), donate_argnums=0, compiler_options=options
        )

    def eval_program(self, step: Callable) -> Any:
        """Returns a step of `make_eval_step`, compiled, its metrics donated."""
        return jax.jit(step, donate_argnums=1, compiler_options=INFERENCE_OPTIONS)

    def everywhere(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a state and more that all devices compute alike."""
        return function

    def look_up(
        self, model: Any, state: TrainState, batch: Batch, routed: Any
    ) -> tuple[Any, Any]:
        """Returns the fields' embeddings of a batch, by stack, and what was found.

        The model says of which dtype they are; `routed` is what a mesh has routed.
        """
        del routed
        parts = split(self.tables, batch)
        ids = by_stack(lookup.find, self.tables, parts)
        bad_ids = by_stack(
            lambda _, *part: lookup.count_bad_ids(*part), self.tables, ids, parts
        )
        rows = self._embeddings(model, state, ids)
        return rows, Found(ids, jax.tree.reduce(jnp.add, bad_ids))

    def look_up_alike(self, model: Any, state: TrainState, batch: Batch) -> Any:
        """Returns the fields' embeddings of a batch that all devices have, on all."""
        ids = by_stack(lookup.find, self.tables, split(self.tables, batch))
        return self._embeddings(model, state, ids)

    def _embeddings(self, model: Any, state: TrainState, ids: Any) -> Any:
        look_up = functools.partial(lookup.embeddings, dtype=dtype_of(model))
        return by_stack(look_up, self.tables, state.table, ids)

    def key_of_part(self, key: Array) -> Array:
        """Returns the random key of the device in a step, from that of the step."""
        return key

    def merge(self, own: Outcome, found: Any, key: Array) -> tuple[Outcome, Any]:
        """Returns the outcome of all devices, from that of each.

        What `look_up` found is returned with what came by the same collectives.
        """
        del key
        return own, found

    def sum(self, tree: Any) -> Any:
        """Returns the sum over all devices."""
        return tree

    def update_rows(
        self,
        state: TrainState,
        batch: Batch,
        row_grads: Any,
        found: Any,
        row_update: RowUpdate,
        enabled: Bool[Array, ""],
        key: Array,
    ) -> tuple[Any, Any, Any]:
        """Returns tables and their optimizers' states after a step, and what is left.

        Nothing changes unless the step is `enabled`.
        """
        del key
        lr, weights = rows_lr(row_update, state), jnp.asarray(batch.weights)

        def update(spec, table, row_state, ids, grads):
            touched = lookup.row_gradients(spec, ids, grads, weights)
            how = row_update.at_step(state.step, Order(spec.total_rows, 1), spec.dim)
            return update_table(table, row_state, touched, how, lr, enabled)

        parts = state.table, state.row_state, found.ids, row_grads
        updated = by_stack(update, self.tables, *parts)
        return *regroup(self.tables, updated), found


def dtype_of(model: Any) -> Any:
    """Returns the dtype in which a model takes embeddings.

    The model would cast them first of all. Cast at the lookup, the rows' gradients have
    that dtype too, and half the bytes to write and to gather.
    """
    return getattr(model, "compute_dtype", jnp.float32)


def rows_lr(row_update: RowUpdate, state: TrainState) -> Array:
    """Returns the learning rate of the rows in a step."""
    lr = row_update.learning_rate(state.step - state.skipped)
    return jnp.asarray(lr) * state.lr_scale


def one_after_another(step: Callable) -> Callable[..., TrainState]:
    """Returns a function of a state and batches that takes a step on each.

    Bit for bit the same as a call for each.
    """

    def steps(state: TrainState, *batches: Batch) -> TrainState:
        for i, batch in enumerate(batches):
            state, _ = step(apart(state) if i else state, batch)
        return state

    return steps


def apart(state: Any) -> Any:
    """Returns the state between two steps, across which XLA is to compute nothing."""
    return jax.lax.optimization_barrier(state)
