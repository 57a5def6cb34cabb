"""Makes everything a run needs from its configuration, before anything is trained."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import optax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding

from loka_jax import nn
from loka_jax.data import Batch, Dataset, Position, Splits, open_data
from loka_jax.data.prefetch import Batches, prefetch
from loka_jax.data.shards import ShardFolder
from loka_jax.dispatch.gradient_wire import choose_sum
from loka_jax.dispatch.hope import Hope
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.review import Reviewer
from loka_jax.measure.compiling import untuned_here
from loka_jax.optim import make_dense_optimizer, make_row_optimizer, make_schedule
from loka_jax.train import metrics, tasks
from loka_jax.train.baselines import Baselines
from loka_jax.train.config import Config
from loka_jax.train.mesh.devices import BATCH, mesh_of, scaled_sums
from loka_jax.train.mesh.placement import MeshPlacement, placement_of
from loka_jax.train.model import RunModel, model_of
from loka_jax.train.own_functions import check_functions, require_functions
from loka_jax.train.placement import Placement
from loka_jax.train.plan_files import require_readable
from loka_jax.train.planning import choose_plan, resumed_plan
from loka_jax.train.processes.group import hosts
from loka_jax.train.state import TrainState, init_without_tables
from loka_jax.train.step import TrainStep, compiled_eval_step, make_train_step
from loka_jax.train.tables.update import RowUpdate


@dataclasses.dataclass(frozen=True)
class Run:
    """A configured run: data, model, optimizers, steps that compile when first used.

    Attributes:
        placement: the device or devices of the run, and its tables.
        list_sites: from a plan to every GEMM of the model at the training batch size,
            in a first step, or if `scales_initialized` in those after it.
        plan: choices for the sites; the modules decide for a site without one.
        plan_notes: sentences on the plan for the user.
        outlook: what the plan gains, or what keeps FP8 out of it; empty if it was not
            made by times.
        reviewer: changes the plan by live errors; None where they change nothing, as
            Probe observes none, or the plan was not made by times.
        baselines: simple models of the same rows; copies of a run share them.
        total_steps: steps of the whole run, if nothing ends it early.
        hope: the plan that the first review chooses if errors are as small as they may
            be; None if it would change nothing.
        log_inputs: shapes of what the model is initialized with, of an event log.
    """

    config: Config
    splits: Splits
    placement: Placement
    list_sites: Callable[..., tuple[nn.Site, ...]]
    plan: DispatchPlan
    plan_notes: tuple[str, ...]
    outlook: str
    reviewer: Reviewer | None
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    row_update: RowUpdate
    baselines: Baselines
    steps_per_epoch: int
    total_steps: int
    hope: Hope | None = None
    log_inputs: tuple[Any, ...] | None = None
    # A copy of a run, as under another plan, has none yet.
    programs: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
        """Returns the run under another plan; steps of the hoped one are compiled."""
        run = dataclasses.replace(self, plan=plan)
        if self.has_steps_of(plan):
            run.programs.update(self.hoped.programs)
        return run

    @functools.cached_property
    def hoped(self) -> "Run":
        """The run under the plan that it hopes for, whose kernels are checked first."""
        plan = self.plan if self.hope is None else self.hope.checked().plan
        return dataclasses.replace(self, plan=plan)

    def has_steps_of(self, plan: DispatchPlan) -> bool:
        """Returns whether a plan is the hoped one, whose steps were made ahead."""
        return "hoped" in vars(self) and self.hoped.plan.choices == plan.choices

    @contextlib.contextmanager
    def turn(self, begun: Callable[[], Any]) -> Iterator[None]:
        """Leaves the GPU to kernels that are timed meanwhile, before and after a block.

        `begun` returns the arrays that are ready when all of the block has run.
        """
        none = contextlib.nullcontext(False)
        with none if self.hope is None else self.hope.turn() as beside_timers:
            yield
            if beside_timers:
                jax.block_until_ready(begun())

    @property
    def reviewer_now(self) -> Reviewer | None:
        """The reviewer, who knows of all checks; may wait for them.

        None for a run without one, or whose checks have not ended and are for others.
        """
        if self.reviewer is None or self.hope is None:
            return self.reviewer
        if not (self.hope.is_awaited or self.hope.is_checked):
            return None
        self.hope.is_ready.wait()
        known = self.hope.checked().performance.measured()
        return dataclasses.replace(self.reviewer, performance=known)

    @property
    def source(self) -> str:
        """The name of the run's operands in tables."""
        return self.config.source(self.splits.identity)

    @property
    def planned(self) -> nn.Planned:
        """The model, its sites run as the plan says."""
        return nn.Planned(self.config.model, self.plan.choices)

    def init(self) -> TrainState:
        """Returns the state before the first step."""
        schema, stddev = self.splits.train.schema, self.config.embedding.init_stddev

        def init(key: jax.Array) -> TrainState:
            state = init_without_tables(
                key,
                model=self.planned.by_xla(),
                tables=self.placement.tables,
                num_dense=len(schema.dense),
                log_inputs=self.log_inputs,
                optimizer=self.optimizer,
                probe=self.config.probe.first(),
            )
            seen = metrics.init(weighted=schema.weighted, tasks=len(schema.labels))
            return dataclasses.replace(state, metrics=seen)

        key = jax.random.key(self.config.seed)
        return self.placement.init(init, key, stddev, self.row_update.optimizer)

    def template(self) -> dict[str, Any]:
        """Returns shapes and placement of the parts of a state; none is computed."""
        return self.placement.template(jax.eval_shape(lambda: vars(self.init())))

    def prefetched(
        self, start: Position, num_batches: int | None = None
    ) -> AbstractContextManager[Batches]:
        """Returns training batches from a position on, to be used as a context.

        There is no end without `num_batches`.
        """
        return prefetch(
            self.splits.train,
            start,
            self.config.loop.batch_size,
            shuffle=True,
            num_batches=num_batches,
            depth=max(4, 2 * self.config.loop.steps_per_call),  # of two calls
            sharding=self.placement.sharding,
            part=self.placement.part,
        )

    def train_step(
        self,
        *,
        scales_initialized: bool = False,
        steps: int = 1,
    ) -> TrainStep:
        """Returns the training step; the same for the same arguments.

        Args:
            steps: how many are taken by a call, each on a batch of its own.
        """
        scales_initialized = scales_initialized and self.planned.is_delayed
        key = scales_initialized, steps
        if key not in self.programs:
            model = dataclasses.replace(
                self.planned, scales_initialized=scales_initialized
            )
            step = make_train_step(
                *(model, self.placement, self.optimizer, self.row_update),
                microbatches=self.config.loop.microbatches,
                dropout_seed=self.config.seed,
                objective=tasks.objective_of(self.config.optim),
            )
            # The steps until all delayed scales are initialized are one or a few.
            is_first = self.planned.is_delayed and not scales_initialized
            options = untuned_here() if is_first else {}
            program = self.placement.train_program(step, steps, options)
            self.programs[key] = TrainStep(program)
        return self.programs[key]

    def eval_step(self, model: nn.Planned) -> Any:
        """Returns the evaluation step of a model with the run's variables.

        It is the same for the same model.
        """
        if model not in self.programs:
            self.programs[model] = compiled_eval_step(model, self.placement)
        return self.programs[model]

    def read(self, dataset: Dataset, step: int) -> Batch:
        """Returns a batch in order, over all devices of the run if there are several.

        Of several processes, each reads its part.
        """
        size, part = self.config.loop.batch_size, self.placement.part
        batch = dataset.batch(Position(0, step, 0), size, shuffle=False, part=part)
        return self.placement.put(batch)

    def fetched(self, tree: Any) -> Any:
        """Returns arrays in host memory, whole in each of several processes."""
        if self.placement.part.count == 1:
            return jax.device_get(tree)
        return process_allgather(tree, tiled=True)


def build(
    config: Config,
    saved: Any = None,
    say: Callable[[str], None] = print,
    base: ShardFolder | None = None,
) -> Run:
    """Returns the run that `config` describes.

    Args:
        saved: the plan of the checkpoint being resumed, as JSON values; None to choose
            a plan by the configuration.
        base: a folder with the encoding to use; None to learn one from the data.

    Raises:
        ValueError: one sentence with the option or file and the remedy.
    """
    loop = config.loop
    # What needs no data first: these can take long.
    mesh = mesh_of(config.mesh, loop.batch_size, loop.microbatches)
    _check_log(config)
    own = config.optim.loss, config.metrics
    require_functions(*own)
    if saved is None:
        require_readable(config)
    splits = _open(config, mesh, base)
    schema = splits.train.schema
    model = model_of(config, schema, 1 if mesh is None else mesh.size)
    check_functions(*own, tasks=len(schema.labels))
    placement = placement_of(
        *(mesh, config.mesh, model.tables, config.embedding.implementation),
        steps_per_call=loop.steps_per_call,
    )
    return _with_gradient_sum(_planned(config, splits, model, placement, saved, say))


def _open(config: Config, mesh: Mesh | None, base: ShardFolder | None) -> Splits:
    """Returns the splits of the data, whose batches lie on the devices of a mesh."""
    splits = open_data(config.data, seed=config.seed, base=base)
    splits = splits.crossed(config.embedding.crosses)
    splits = splits.divided(1 if mesh is None else mesh.size)
    # CPU devices share the cores that make the examples.
    if mesh is not None and jax.process_count() == 1 and jax.default_backend() == "gpu":
        return splits.over(NamedSharding(mesh, BATCH))
    return splits


def _planned(
    config: Config,
    splits: Splits,
    model: RunModel,
    placement: Placement,
    saved: Any,
    say: Callable[[str], None],
) -> Run:
    """Returns the run, under the saved plan or one that is chosen."""
    loop = config.loop
    steps_per_epoch = splits.train.num_batches(loop.batch_size)
    total_steps = min(steps_per_epoch * loop.epochs, loop.max_steps or sys.maxsize)
    sites, source = model.list_sites(DispatchPlan()), config.source(splits.identity)
    if saved is None:
        chosen = choose_plan(config, sites, total_steps, say, source=source)
    else:
        chosen = resumed_plan(config, saved, sites, say, source=source)
    if chosen.observed is not None:
        config = config.observed(*chosen.observed)
    return Run(
        config=config,
        splits=splits,
        placement=placement,
        list_sites=model.list_sites,
        log_inputs=model.log_inputs,
        plan=chosen.plan,
        plan_notes=chosen.notes,
        outlook=chosen.outlook,
        reviewer=_reviewer(config, sites, chosen.performance, source),
        hope=chosen.hope,
        optimizer=make_dense_optimizer(config.optim, total_steps),
        schedule=jax.jit(make_schedule(config.optim.lr, config.optim, total_steps)),
        row_update=_row_update(config, total_steps, _groups(config, placement)),
        baselines=Baselines(splits.train, splits.valid),
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
    )


def _with_gradient_sum(run: Run) -> Run:
    """Returns the run with how its devices sum their gradients, if it has several."""
    placement, optim = run.placement, run.config.optim
    if not isinstance(placement, MeshPlacement):
        return run
    params, wire = run.template()["params"], run.config.collectives.gradients
    gradient_sum = choose_sum(wire, params, placement.size, hosts())
    notes, groups = (*run.plan_notes, gradient_sum.note), _groups(run.config, placement)
    if groups > 1 and optim.rows == "rowwise_adagrad":
        notes = (*notes, scaled_sums(groups, optim))
    placement = dataclasses.replace(placement, gradient_sum=gradient_sum)
    return dataclasses.replace(run, placement=placement, plan_notes=notes)


def _groups(config: Config, placement: Placement) -> int:
    """Returns how many groups of devices have rows of their own."""
    return placement.shape[0] if config.mesh.sync == "weights" else 1


def _check_log(config: Config) -> None:
    """Raises ValueError for what does not go with an event log."""
    if not config.data.is_log:
        return
    loop = config.loop
    if loop.microbatches > 1:
        raise ValueError(
            "Batches of an event log have no microbatches: leave out "
            "--loop.microbatches, and lower --loop.batch-size."
        )
    if config.data.stream and loop.epochs > 1:
        raise ValueError(
            "--data.stream passes over the data once: set --loop.epochs 1."
        )


def _row_update(config: Config, total_steps: int, groups: int) -> RowUpdate:
    optim, embedding = config.optim, config.embedding
    return RowUpdate(
        optimizer=make_row_optimizer(optim, groups),
        learning_rate=make_schedule(optim.rows_lr, optim, total_steps),
        l2=optim.rows_l2,
        implementation=embedding.implementation,
        rounding_seed=config.seed if embedding.dtype == "bf16" else None,
    )


def _reviewer(
    config: Config,
    sites: tuple[nn.Site, ...],
    performance: PerformanceModel | None,
    source: str,
) -> Reviewer | None:
    if performance is None or not config.probe.observe_every:
        return None
    return Reviewer(
        sites,
        performance.measured(),  # a candidate that was never checked must not run
        limits=config.dispatch.limits,
        rules=config.dispatch.by_pattern,
        config=source,
    )
