"""A run over the devices of a mesh, each with a part of every batch and of the tables.

Rows are fetched from their owners. What must be equal everywhere then is, in two
collectives:

    sum         dense gradients, loss, metrics of the batch, moments of batch norms,
                how many devices have a number that is not finite, and what is counted
                of the batch that the step routes
    maximum     FP8 state, where a model has any

Gradients that travel in fewer bits have a sum of their own (`ops.collectives`), which
keeps what is not finite; the rest is exact. The loss of a part is over the weight of
the whole batch, found when it was routed. FP8 state is merged by the maximum as over
microbatches. In the steps before scales are initialized, and with current scaling, each
device casts by the amaxes of its own part.

A step whose lists were too short for its ids (`exchange`) is skipped, too.

Replicas get the row gradients of all of them, or update rows alone (`row_sync`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, override

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from loka_jax import compat
from loka_jax.data import Batch, Part, Position
from loka_jax.data.prefetch import placed
from loka_jax.dispatch.gradient_wire import GradientSum
from loka_jax.ops import exchange, row_order
from loka_jax.ops.collectives import sum_gradients
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.exchange import Routed
from loka_jax.ops.joint_collectives import (
    gathered_by,
    max_all,
    sum_all,
    swap,
    to_gather,
)
from loka_jax.ops.row_order import VIRTUAL_SHARDS
from loka_jax.ops.tables import Tables, TableSpec, require_one_array
from loka_jax.train.checkpoints.row_layout import RowLayout
from loka_jax.train.mesh import programs
from loka_jax.train.mesh.devices import (
    AXES,
    REPLICA,
    SHARD,
    MeshConfig,
    map_shards,
    order_of,
    require_places,
    shardings,
    state_specs,
)
from loka_jax.train.mesh.routing import Router, Routing
from loka_jax.train.mesh.row_sync import RowSync, update_alone
from loka_jax.train.placement import Outcome, Placement, dtype_of, rows_lr
from loka_jax.train.state import TrainState, table_keys
from loka_jax.train.tables import lookup
from loka_jax.train.tables.stacks import by_stack, regroup, split
from loka_jax.train.tables.update import RowUpdate, update_table
from loka_jax.triton import Implementation
from loka_jax.unbiased import words_of

_ROUNDING = 2**31 - 1  # folded into the key of a step, as no device's number is


def placement_of(
    mesh: Mesh | None,
    wire: MeshConfig,
    tables: Tables,
    implementation: Implementation | None = None,
    *,
    steps_per_call: int = 1,
) -> Placement:
    """Returns the placement of a run: over a mesh, or without one on one device.

    Raises:
        ValueError: if the devices have too few places for the rows.
    """
    if mesh is None:
        require_one_array(tables)
        return Placement(tables)
    require_places(tables, mesh)
    router = Router(mesh, tables, implementation, steps_per_call)
    sync = RowSync(mesh, wire, tables, implementation)
    return MeshPlacement(tables, mesh, wire, implementation, router, sync)


@dataclasses.dataclass(frozen=True, eq=False)
class MeshPlacement(Placement):
    """The devices of a mesh.

    Attributes:
        implementation: of lookups and updates of rows.
        gradient_sum: how dense gradients are summed; None for float32.
    """

    mesh: Mesh
    wire: MeshConfig
    implementation: Implementation | None
    router: Router
    row_sync: RowSync
    gradient_sum: GradientSum | None = None

    @property
    @override
    def shape(self) -> tuple[int, int]:
        return self.mesh.shape[REPLICA], self.mesh.shape[SHARD]

    @property
    @override
    def layout(self) -> RowLayout:
        return RowLayout(self.tables, VIRTUAL_SHARDS)

    @property
    @override
    def sharding(self) -> NamedSharding:
        return self.router.sharding

    @property
    @override
    def part(self) -> Part:
        return Part(jax.process_index(), jax.process_count())

    @override
    def numbers(self) -> dict[str, Any]:
        # Lists have a capacity by stack of tables, and climb where it was too small.
        return {
            "mesh": " x ".join(map(str, self.shape)),
            "list_capacity": jax.tree.leaves(self.router.capacity),
            "list_climbs": self.router.climbs,
        }

    @override
    def choices(self) -> dict[str, Any]:
        summed = self.gradient_sum
        return {} if summed is None else {"gradients": summed._asdict()}

    @override
    def put(self, batch: Batch) -> Batch:
        return placed(batch, self.sharding, self.part)

    @override
    def look_ahead(
        self, batches: Iterable[tuple[Position, Batch]]
    ) -> Iterator[tuple[Position, Batch]]:
        return self.router.look_ahead(batches)

    @override
    def sync(self, state: TrainState) -> TrainState:
        return self.row_sync(state)

    @override
    def template(self, shapes: dict[str, Any]) -> dict[str, Any]:
        def table(spec: TableSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((order_of(spec).places, spec.dim), spec.dtype)

        def place(part: Any, sharding: NamedSharding) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                part,
            )

        shapes = shapes | {"table": by_stack(table, self.tables)}
        by_name = shardings(self.mesh, state_specs())
        return {name: place(part, by_name[name]) for name, part in shapes.items()}

    @override
    def init(
        self,
        init: Callable[[Array], TrainState],
        key: Array,
        stddev: float,
        row_optimizer: Any,
    ) -> TrainState:
        # Row by row these are the tables of one device, but for the last bit, as XLA
        # may multiply constants in another order.
        def part(spec: TableSpec, key: Array) -> tuple[Array, Any]:
            order = order_of(spec)
            count = order.shards // self.mesh.shape[SHARD]
            first = jax.lax.axis_index(SHARD) * count
            shards = first + jnp.arange(count, dtype=jnp.int32)
            rows = functools.partial(
                row_order.normal_rows, key, order, spec.dim, shards
            )
            if spec.storage == "f32":
                table = stddev * rows()
            else:  # shard by shard: float32 would take twice the table's memory
                table = rows(lambda x: (stddev * x).astype(spec.dtype))
            return table, row_optimizer.init(table)

        def parts_of(key: Array) -> dict[str, Any]:
            _, table_key = jax.random.split(key)
            make = functools.partial(by_stack, part, self.tables)
            program = map_shards(make, self.mesh, P(), P(SHARD))
            parts = program(table_keys(table_key, self.tables))
            table, row_state = regroup(self.tables, parts)
            return {"table": table, "row_state": row_state}

        alike, sharded = shardings(self.mesh, (P(), P(SHARD)))
        with compat.random_bits_by_kernel():
            state = jax.jit(init, out_shardings=alike)(key)
        parts = jax.jit(parts_of, out_shardings=sharded)(key)
        return dataclasses.replace(state, **parts)

    @override
    def train_program(
        self, step: Callable, steps: int, options: dict[str, Any]
    ) -> programs.RoutedStep:
        program = programs.train_program(self.mesh, self.router, step, steps, options)
        return programs.RoutedStep(program, self.router, self.row_sync)

    @override
    def eval_program(self, step: Callable) -> Callable:
        program = programs.eval_program(self.mesh, step)

        def evaluate(state: TrainState, seen: Any, batch: Batch) -> Any:
            return program(vars(state), seen, *self.router(batch))

        return evaluate

    @override
    def everywhere(self, function: Callable[..., Any]) -> Callable[..., Any]:
        program = map_shards(
            lambda parts, rest: function(TrainState(**parts), *rest),
            self.mesh,
            in_specs=(state_specs(), P()),
            out_specs=P(),
        )
        return lambda state, *rest: program(vars(state), rest)

    @override
    def look_up(
        self, model: Any, state: TrainState, batch: Batch, routed: Routing
    ) -> tuple[Any, Routing]:
        # The lists of a later batch travel by the collective of the rows.
        codec, routes = self.wire.wire_rows, routed.batch.routes
        how: Any = {"implementation": self.implementation}

        def to_send(_, table: Array, route: Routed):
            return exchange.rows_to_send(table, route, codec, **how)

        def receive(spec: TableSpec, part: Batch, route: Routed, payload: Array):
            if part.bags or part.events is not None:
                rows = exchange.receive_lists(payload, codec, spec.dim)
                ids = lookup.at_slots(part, route.slots)
                return lookup.embeddings(spec, rows, ids, dtype_of(model))
            rows = exchange.receive_rows(payload, route, codec, spec.dim, **how)
            return rows.reshape(*part.ids.shape, -1).astype(dtype_of(model))

        payloads = by_stack(to_send, self.tables, state.table, routes)
        payloads, arrived = swap((payloads, routed.asked), SHARD)
        parts = split(self.tables, batch), routes, payloads
        rows = by_stack(receive, self.tables, *parts)
        return rows, routed._replace(asked=arrived)

    @override
    def look_up_alike(self, model: Any, state: TrainState, batch: Batch) -> Any:
        def look_up(spec: TableSpec, table: Array, part: Batch):
            order = order_of(spec)
            places, _ = lookup.places(spec, part, order)
            rows = exchange.fetch_everywhere(table, places, order, SHARD)
            slots = jnp.arange(len(rows), dtype=jnp.int32)
            is_row = places.v < order.shards
            ids = lookup.at_slots(part, jnp.where(is_row, slots, BAD_ID))
            return lookup.embeddings(spec, rows, ids, dtype_of(model))

        return by_stack(look_up, self.tables, state.table, split(self.tables, batch))

    @override
    def key_of_part(self, key: Array) -> Array:
        return jax.random.fold_in(key, jax.lax.axis_index(AXES))

    @override
    def merge(
        self, own: Outcome, found: Routing, key: Array
    ) -> tuple[Outcome, Routing]:
        count = jax.lax.axis_size(AXES)
        batch_stats = jax.tree.map(lambda x: x / count, own.batch_stats)
        # The loss and the dense gradients of all devices are looked at after the sum.
        bad = 1.0 - own.is_finite.astype(jnp.float32)
        counts = to_gather(found.counts, AXES)
        rest, params = (own.loss, batch_stats, own.seen, bad, counts), own.grads.params
        wire = "f32" if self.gradient_sum is None else self.gradient_sum.wire
        if wire == "f32":
            rest, params = sum_all((rest, params), AXES)
        else:
            of_sum, _ = _rounding_keys(key)
            rest = sum_all(rest, AXES)
            params = sum_gradients(params, AXES, wire, of_sum)
        loss, batch_stats, seen, bad, counts = rest
        grads = own.grads._replace(params=params)
        if jax.tree.leaves(grads.fp8):
            grads = grads._replace(fp8=max_all(grads.fp8, AXES))
        is_complete = jnp.all(jnp.stack(found.batch.missing) <= 0)
        is_finite = (bad == 0) & is_complete
        found = found._replace(counts=gathered_by(counts, found.counts))
        return Outcome(loss, grads, batch_stats, seen, is_finite), found

    @override
    def sum(self, tree: Any) -> Any:
        return sum_all(tree, AXES)

    @override
    def update_rows(
        self,
        state: TrainState,
        batch: Batch,
        row_grads: Any,
        found: Routing,
        row_update: RowUpdate,
        enabled: Bool[Array, ""],
        key: Array,
    ) -> tuple[Any, Any, Routing]:
        lr, weights = rows_lr(row_update, state), jnp.asarray(batch.weights)
        codec, routes = self.wire.wire_gradients, found.batch.routes
        words = words_of(_rounding_keys(key)[1], AXES, 2)
        has_replicas = jax.lax.axis_size(REPLICA) > 1
        is_alone = has_replicas and self.wire.sync == "weights"
        how: Any = {"implementation": row_update.implementation}

        def to_send(spec: TableSpec, part: Batch, route: Routed, grads):
            ids = lookup.at_slots(part, route.slots)
            _, grads = lookup.row_gradients(spec, ids, grads, weights)
            grads = grads.reshape(-1, spec.dim)
            return exchange.sums_to_send(route, grads, codec, words[0], **how)

        def update(spec: TableSpec, table, row_state, route: Routed, payload):
            replicas = REPLICA if has_replicas and not is_alone else None
            touched = exchange.receive_sums(payload, route, codec, spec.dim, replicas)
            parts = table, row_state, touched, row_update, lr, enabled
            if is_alone:
                return update_alone(*parts, self.wire, words[1])
            order = order_of(spec)
            shards = order.shards // jax.lax.axis_size(SHARD)
            first = jax.lax.axis_index(SHARD) * shards
            rounded = row_update.at_step(state.step, order, spec.dim, first)
            parts = table, row_state, touched, rounded, lr, enabled
            return *update_table(*parts, ascending=True), None

        parts = split(self.tables, batch), routes, row_grads
        payloads = swap(by_stack(to_send, self.tables, *parts), SHARD)
        parts = state.table, state.row_state, routes, payloads
        updated = by_stack(update, self.tables, *parts)
        table, row_state, before = regroup(self.tables, updated)
        return table, row_state, found._replace(before=before)


def _rounding_keys(key: Array) -> Array:
    """Returns the keys by which dense gradients, and those of rows, are rounded."""
    return jax.random.split(jax.random.fold_in(key, _ROUNDING))
