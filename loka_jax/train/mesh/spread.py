"""A run's programs and initial state over the devices of a mesh."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from loka_jax.nn import Model
from loka_jax.ops import row_order
from loka_jax.ops.row_order import VIRTUAL_SHARDS
from loka_jax.ops.tables import Tables, TableSpec, require_one_array
from loka_jax.train.checkpoints.row_layout import RowLayout
from loka_jax.train.mesh.devices import (
    BATCH,
    SHARD,
    MeshConfig,
    mapped,
    order_of,
    require_places,
    shardings,
    state_specs,
)
from loka_jax.train.mesh.mesh_step import make_mesh_eval_step
from loka_jax.train.mesh.programs import RoutedProgram, RoutedStep
from loka_jax.train.mesh.routing import (
    SPECS,
    Router,
    agreed,
    asked,
    routed_shardings,
    routed_specs,
    with_needs,
)
from loka_jax.train.mesh.row_sync import RowSync
from loka_jax.train.state import TrainState, table_keys
from loka_jax.train.step import INFERENCE_OPTIONS, apart, compiled_eval_step
from loka_jax.train.tables.stacks import by_stack, regrouped


def spread_of(
    mesh: Mesh | None,
    wire: MeshConfig,
    tables: Tables,
    implementation: Literal["xla"] | None = None,
    *,
    steps_per_call: int = 1,
) -> "Spread | None":
    """Returns the tables over a mesh; None without one. Arguments: those of `Spread`.

    Raises:
        ValueError: if the devices have too few places for the rows.
    """
    if mesh is None:
        require_one_array(tables)
        return None
    require_places(tables, mesh)
    return Spread(mesh, wire, tables, implementation, steps_per_call=steps_per_call)


def eval_step(
    model: Model, tables: Tables, spread: "Spread | None"
) -> jax.stages.Wrapped | RoutedProgram:
    """Returns the evaluation step of a model, on one device or over several."""
    if spread is None:
        return compiled_eval_step(model, tables)
    return spread.eval_step(model)


def layout_of(tables: Tables, spread: "Spread | None") -> RowLayout:
    """Returns the order of the tables' rows, on one device or over several."""
    return RowLayout(tables, 1 if spread is None else VIRTUAL_SHARDS)


class Spread:
    """A run's tables and batches over the devices of a mesh.

    Attributes:
        mesh: the mesh.
        wire: how rows travel.
        tables: the tables.
        router: routes batches.
        sync: averages the rows of groups that update them alone.
    """

    def __init__(
        self,
        mesh: Mesh,
        wire: MeshConfig,
        tables: Tables,
        implementation: Literal["xla"] | None = None,
        *,
        steps_per_call: int = 1,
    ):
        """Takes the parts of a run.

        Args:
            mesh: of the run.
            wire: how rows travel on it.
            tables: the tables.
            implementation: of lookups and updates of rows.
            steps_per_call: the most steps of a call.
        """
        self.mesh, self.wire, self.tables = mesh, wire, tables
        self._implementation: Literal["xla"] | None = implementation
        self.router = Router(mesh, tables, implementation, steps_per_call)
        self.sync = RowSync(mesh, wire, tables, implementation)

    def placed(self, shapes: dict[str, Any]) -> dict[str, Any]:
        """Returns the shapes of a state's parts with their shardings."""

        def place(part: Any, sharding: NamedSharding) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                part,
            )

        by_name = shardings(self.mesh, state_specs())
        return {name: place(part, by_name[name]) for name, part in shapes.items()}

    def train_program(
        self,
        step: Callable[..., Any],
        steps: int = 1,
        options: Mapping[str, str | bool] | None = None,
    ) -> RoutedStep:
        """Returns steps of `make_mesh_train_step`, one after another, compiled.

        Their state is donated, and so are routed batches to write over: XLA records
        kernels in graphs with the addresses of their arrays, and has to record them
        again when an address changes.

        Args:
            step: the training step.
            steps: how many are taken by a call.
            options: of the compiler.
        """

        def parts_after(parts: dict[str, Any], batches, routed, coming, spent):
            del spent
            state, before, later = TrainState(**parts), None, []
            for i, batch in enumerate(batches):
                with jax.named_scope("route"):
                    capacity = routed[i].capacity
                    routes, counts = self.router.part(capacity, coming[i])
                state = apart(state) if i else state
                state, before, each, arrived = step(
                    state, batch, routed[i], counts, asked(routes)
                )
                later.append(agreed(routes, arrived, each))
            return vars(state), before, with_needs(later)

        specs, every = state_specs(), (SPECS,) * steps
        in_specs = (specs, BATCH, every, BATCH, every)
        out_specs = (specs, BATCH, routed_specs(steps))
        places = (
            *shardings(self.mesh, out_specs[:2]),
            routed_shardings(self.mesh, steps),
        )
        program = self._compiled(
            parts_after, in_specs, out_specs, places, donate=(0, 4), options=options
        )
        return RoutedStep(program, self.router, self.sync)

    def eval_step(self, model: Model) -> RoutedProgram:
        """Returns the evaluation step of a model, compiled, its metrics donated."""
        parts = model, self.tables, self.wire
        step = make_mesh_eval_step(*parts, self._implementation)

        def evaluated(parts: dict[str, Any], *args: Any) -> Any:
            return step(TrainState(**parts), *args)

        in_specs = (state_specs(), P(), BATCH, SPECS)
        out_specs = (P(), BATCH)
        places = shardings(self.mesh, out_specs)
        program = self._compiled(
            *(evaluated, in_specs, out_specs, places),
            donate=(1,),
            options=INFERENCE_OPTIONS,
        )
        return RoutedProgram(program, self.router)

    def _compiled(
        self,
        function,
        in_specs,
        out_specs,
        out_shardings,
        donate: tuple[int, ...],
        options=None,
    ):
        return jax.jit(
            mapped(function, self.mesh, in_specs, out_specs),
            donate_argnums=donate,
            keep_unused=True,  # donated ones
            in_shardings=shardings(self.mesh, in_specs),
            out_shardings=out_shardings,
            compiler_options=options,
        )

    def everywhere(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a state and more that all devices compute alike."""
        program = mapped(
            lambda parts, rest: function(TrainState(**parts), *rest),
            self.mesh,
            in_specs=(state_specs(), P()),
            out_specs=P(),
        )
        return lambda state, *rest: program(vars(state), rest)

    def init(
        self,
        init: Callable[[Array], TrainState],
        key: Array,
        stddev: float,
        row_optimizer: Any,
    ) -> TrainState:
        """Returns the state before the first step, its tables made where they lie.

        Row by row these are the tables of a run without a mesh, but for the last bit,
        as XLA may multiply constants in another order.

        Args:
            init: gives the state without a mesh; its tables are not computed.
            key: its argument.
            stddev: standard deviation of the tables' values.
            row_optimizer: optimizer of the rows.
        """

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

        def spread(key: Array) -> dict[str, Any]:
            _, table_key = jax.random.split(key)
            make = functools.partial(by_stack, part, self.tables)
            parts = jax.shard_map(
                make, mesh=self.mesh, in_specs=P(), out_specs=P(SHARD), check_vma=False
            )(table_keys(table_key, self.tables))
            table, row_state = regrouped(self.tables, parts)
            return vars(init(key)) | {"table": table, "row_state": row_state}

        placement = shardings(self.mesh, state_specs())
        return TrainState(**jax.jit(spread, out_shardings=placement)(key))
