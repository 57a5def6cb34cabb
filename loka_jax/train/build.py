"""Makes everything a run needs from its configuration, before anything is trained."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import optax
from flax import linen
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

from loka_jax import nn
from loka_jax.data import (
    WHOLE,
    Batch,
    Dataset,
    Part,
    Position,
    Splits,
    open_data,
)
from loka_jax.data.prefetch import Prefetcher, placed
from loka_jax.data.shards import ShardFolder
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.review import Reviewer
from loka_jax.measure.compiling import untuned_here
from loka_jax.ops.tables import Tables
from loka_jax.optim import make_dense_optimizer, make_row_optimizer, make_schedule
from loka_jax.train import metrics
from loka_jax.train.checkpoints.row_layout import RowLayout
from loka_jax.train.config import Config
from loka_jax.train.mesh import gradient_sum
from loka_jax.train.mesh.devices import BATCH, groups_alone, mesh_of, scaled_sums
from loka_jax.train.mesh.gradient_sum import GradientSum
from loka_jax.train.mesh.mesh_step import StepOptions, make_mesh_train_step
from loka_jax.train.mesh.programs import RoutedProgram, TrainStep
from loka_jax.train.mesh.spread import Spread, eval_step, layout_of, spread_of
from loka_jax.train.network import network
from loka_jax.train.planning import choose_plan, resumed_plan
from loka_jax.train.state import TrainState, init_state
from loka_jax.train.step import (
    RowUpdate,
    make_train_step,
    one_after_another,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A configured run: data, model, optimizers, steps that compile when first used.

    Attributes:
        config: of the run.
        splits: the data.
        model: from (dense features, embeddings) to logits.
        tables: the embedding tables.
        list_sites: from a plan to every GEMM of the model at the training batch size,
            in a first step, or if `scales_initialized` in those after it.
        plan: choices for the sites; the modules decide for a site without one.
        plan_notes: sentences on the plan for the user.
        reviewer: changes the plan by live errors; None where they change nothing, as
            Probe observes none, or the plan was not made by times.
        optimizer: of the dense parameters.
        schedule: the dense learning rate of a step number.
        row_update: of the tables.
        steps_per_epoch: training batches in an epoch.
        total_steps: steps of the whole run, if nothing ends it early.
        spread: tables and batches over several devices; None with one device.
        summed: how dense gradients are summed over them; None with one device.
    """

    config: Config
    splits: Splits
    model: linen.Module
    tables: Tables
    list_sites: Callable[..., tuple[nn.Site, ...]]
    plan: DispatchPlan
    plan_notes: tuple[str, ...]
    reviewer: Reviewer | None
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    row_update: RowUpdate
    steps_per_epoch: int
    total_steps: int
    spread: Spread | None = None
    summed: GradientSum | None = None

    @functools.cached_property
    def sites(self) -> tuple[nn.Site, ...]:
        """Every GEMM of the model, with its plan in a first step."""
        return self.list_sites(self.plan)

    @functools.cached_property
    def running_sites(self) -> tuple[nn.Site, ...]:
        """Every GEMM of the model, with its plan in the steps after the first.

        Sites with delayed scales may run with their neighbours there.
        """
        return self.list_sites(self.plan, scales_initialized=True)

    def replanned(self, plan: DispatchPlan) -> "Run":
        """Returns the run under another plan; its steps are compiled anew."""
        return dataclasses.replace(self, plan=plan)

    @property
    def source(self) -> str:
        """The name of the run's operands in tables."""
        return self.config.source(self.splits.identity)

    @property
    def planned(self) -> nn.Planned:
        """The model, its sites run as the plan says."""
        return nn.Planned(self.model, self.plan.choices)

    def init(self) -> TrainState:
        """Returns the state before the first step."""
        init = functools.partial(
            init_state,
            model=self.planned.by_xla(),
            tables=self.tables,
            num_dense=len(self.splits.train.schema.dense),
            optimizer=self.optimizer,
            row_optimizer=self.row_update.optimizer,
            init_stddev=self.config.embedding.init_stddev,
            probe=self.config.probe.config_at(0),
        )
        schema = self.splits.train.schema
        weighted, num_tasks = schema.weighted, len(schema.labels)

        def init_weighted(key):
            return dataclasses.replace(
                init(key), metrics=metrics.init(weighted=weighted, tasks=num_tasks)
            )

        key = jax.random.key(self.config.seed)
        if self.spread is None:
            return jax.jit(init_weighted)(key)
        stddev = self.config.embedding.init_stddev
        return self.spread.init(init_weighted, key, stddev, self.row_update.optimizer)

    def template(self) -> dict[str, Any]:
        """Returns shapes and placement of the parts of a state; none is computed."""
        shapes = jax.eval_shape(lambda: vars(self.init()))
        return shapes if self.spread is None else self.spread.placed(shapes)

    @property
    def layout(self) -> RowLayout:
        """The order of the tables' rows."""
        return layout_of(self.tables, self.spread)

    @property
    def batch_sharding(self) -> jax.sharding.Sharding | None:
        """Where batches lie; None for JAX's default device."""
        return None if self.spread is None else self.spread.router.sharding

    @property
    def part(self) -> Part:
        """The part of each batch that this process reads."""
        if self.spread is None:
            return WHOLE
        return Part(jax.process_index(), jax.process_count())

    def prefetched(self, start: Position, num_batches: int | None = None) -> Prefetcher:
        """Returns training batches from a position on, to be used as a context.

        Args:
            start: of the first batch.
            num_batches: their number; None for no end.
        """
        return Prefetcher(
            self.splits.train,
            start,
            self.config.loop.batch_size,
            shuffle=True,
            num_batches=num_batches,
            depth=max(4, 2 * self.config.loop.steps_per_call),  # of two calls
            sharding=self.batch_sharding,
            part=self.part,
        )

    def ahead(
        self, batches: Iterable[tuple[Position, Batch]]
    ) -> Iterable[tuple[Position, Batch]]:
        """Returns the batches, each with what its step needs begun a step before."""
        return batches if self.spread is None else self.spread.router.ahead(batches)

    def synced(self, state: TrainState) -> TrainState:
        """Returns a state that all groups of devices have alike.

        Between training steps they may not (`row_sync`), and whatever else reads the
        tables needs them so. The state is donated.
        """
        return state if self.spread is None else self.spread.sync(state)

    @property
    def first_step(self) -> TrainStep:
        """The training step for states whose delayed scales may be uninitialized."""
        return self.train_step(scales_initialized=False)

    @property
    def step(self) -> TrainStep:
        """The training step for states with initialized scales."""
        return self.train_step(scales_initialized=True)

    def train_step(
        self,
        *,
        scales_initialized: bool,
        probe: nn.ProbeConfig | None = None,
        steps: int = 1,
    ) -> TrainStep:
        """Returns the training step; the same for the same arguments.

        Args:
            scales_initialized: all delayed scales are initialized.
            probe: how Probe observes the sites; None if it does not.
            steps: how many are taken by a call, each on a batch of its own.
        """
        scales_initialized = scales_initialized and self.planned.is_delayed
        key = scales_initialized, probe, steps
        if key not in self.compiled_steps:
            model = dataclasses.replace(
                self.planned, scales_initialized=scales_initialized
            )
            self.compiled_steps[key] = self._train_step(model, probe, steps)
        return self.compiled_steps[key]

    @functools.cached_property
    def compiled_steps(
        self,
    ) -> dict[tuple[bool, nn.ProbeConfig | None, int], TrainStep]:
        """The training steps used so far, by the arguments of `train_step`."""
        return {}

    @functools.cached_property
    def compiled_eval_steps(
        self,
    ) -> dict[nn.Planned, jax.stages.Wrapped | RoutedProgram]:
        """The evaluation steps used so far, by their models."""
        return {}

    def eval_step(self, model: nn.Planned) -> jax.stages.Wrapped | RoutedProgram:
        """Returns the evaluation step of a model that has the run's variables.

        It is the same for the same model.
        """
        if model not in self.compiled_eval_steps:
            self.compiled_eval_steps[model] = eval_step(model, self.tables, self.spread)
        return self.compiled_eval_steps[model]

    def read(self, dataset: Dataset, step: int) -> Batch:
        """Returns a batch in order, over all devices of the run if there are several.

        Of several processes, each reads its part.
        """
        place, size, part = Position(0, step, 0), self.config.loop.batch_size, self.part
        batch = dataset.batch(place, size, shuffle=False, part=part)
        if self.spread is None:
            return batch
        return placed(batch, self.batch_sharding, part)

    def fetched(self, tree: Any) -> Any:
        """Returns arrays in host memory, whole in each of several processes."""
        if self.part.count == 1:
            return jax.device_get(tree)
        return process_allgather(tree, tiled=True)

    def _train_step(
        self, model: nn.Planned, probe: nn.ProbeConfig | None, steps: int
    ) -> TrainStep:
        parts = (model, self.tables, self.optimizer, self.row_update)
        # The steps until all delayed scales are initialized are one or a few.
        is_first = self.planned.is_delayed and not model.scales_initialized
        compiler_options = untuned_here() if is_first else {}
        options = StepOptions(
            microbatches=self.config.loop.microbatches,
            dropout_seed=self.config.seed,
            probe=probe,
            task_weights=self.config.optim.task_weights,
        )
        if self.spread is None or self.summed is None:
            step = make_train_step(*parts, **options._asdict())
            program = jax.jit(
                one_after_another(step),
                donate_argnums=0,
                compiler_options=compiler_options,
            )
        else:
            step = make_mesh_train_step(
                *parts, self.spread.wire, options, self.summed.wire
            )
            program = self.spread.train_program(step, steps, compiler_options)
        return TrainStep(program, is_observed=probe is not None)


def build(
    config: Config,
    saved: Any = None,
    say: Callable[[str], None] = print,
    base: ShardFolder | None = None,
) -> Run:
    """Returns the run that `config` describes.

    Args:
        config: the run.
        saved: the plan of the checkpoint being resumed, as JSON values; None to choose
            a plan by the configuration.
        say: takes lines on the progress of tuning.
        base: a folder with the encoding to use; None to learn one from the data.

    Raises:
        ValueError: one sentence with the option or file and the remedy.
    """
    splits = open_data(config.data, seed=config.seed, base=base)
    loop = config.loop
    mesh = mesh_of(config.mesh, loop.batch_size, loop.microbatches)
    devices = 1 if mesh is None else mesh.size
    groups = groups_alone(mesh, config.mesh)
    tables, list_sites, *_ = network(config, splits.train.schema, devices)
    spread = spread_of(
        *(mesh, config.mesh, tables, config.embedding.implementation),
        steps_per_call=loop.steps_per_call,
    )
    # CPU devices share the cores that make the examples.
    if mesh is not None and jax.process_count() == 1 and jax.default_backend() == "gpu":
        splits = splits.over(NamedSharding(mesh, BATCH))
    steps_per_epoch = splits.train.num_batches(loop.batch_size)
    total_steps = min(steps_per_epoch * loop.epochs, loop.max_steps or sys.maxsize)
    sites, source = list_sites(DispatchPlan()), config.source(splits.identity)
    if saved is None:
        planned = choose_plan(config, sites, total_steps, say, source=source)
    else:
        planned = resumed_plan(config, saved, sites)
    probe = dataclasses.replace(config.probe, every=planned.observe_every)
    config = dataclasses.replace(config, probe=probe)
    run = Run(
        config=config,
        splits=splits,
        model=config.model,
        tables=tables,
        list_sites=list_sites,
        plan=planned.plan,
        plan_notes=planned.notes,
        reviewer=_reviewer(config, sites, planned.performance, source),
        optimizer=make_dense_optimizer(config.optim, total_steps),
        schedule=jax.jit(make_schedule(config.optim.lr, config.optim, total_steps)),
        row_update=_row_update(config, total_steps, groups),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        spread=spread,
    )
    if mesh is None:
        return run
    params = run.template()["params"]
    summed = gradient_sum.choose(config.collectives, params, mesh.size)
    notes = (*run.plan_notes, summed.note)
    if groups > 1 and config.optim.rows == "rowwise_adagrad":
        notes = (*notes, scaled_sums(groups, config.optim))
    return dataclasses.replace(run, summed=summed, plan_notes=notes)


def _row_update(config: Config, total_steps: int, groups: int) -> RowUpdate:
    optim, embedding = config.optim, config.embedding
    return RowUpdate(
        optimizer=make_row_optimizer(optim, groups),
        learning_rate=make_schedule(optim.rows_lr, optim, total_steps),
        l2=optim.rows_l2,
        implementation=embedding.implementation,
        rounding_seed=config.seed if embedding.is_rounded_stochastically else None,
    )


def _reviewer(
    config: Config,
    sites: tuple[nn.Site, ...],
    performance: PerformanceModel | None,
    source: str,
) -> Reviewer | None:
    if performance is None or not config.probe.every:
        return None
    return Reviewer(
        sites,
        performance.measured(),  # a candidate that was never checked must not run
        limits=config.dispatch.limits,
        rules=config.dispatch.by_pattern,
        config=source,
    )
