"""Serialized programs for inference, with their weights apart and prepared once.

    logits = program(weights, tables, dense, ids, bags)

With histories, `ids` are those of samples, and in place of `bags` are the arrays of
`data.Events`; a batch size is the number of rows of all sequences.

`weights` are what the model computes from its variables alone (`serving.fold`): FP8
where the plan says so. Programs of several batch sizes share equal ones. What runs at
each site is planned for the program's platform and batch size:

    cpu     the recipes of the run's plan, by XLA
    cuda    on a GPU: what Dispatch chooses at this batch size for the forward pass;
            without one: as on a CPU, so that the program runs on every GPU

JAX promises that programs with Pallas's Mosaic kernels can be read later; it promises
nothing of Triton's, so in a program these have their XLA twins.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array

from loka_jax import nn, triton
from loka_jax.data import Batch, Events
from loka_jax.data.batch import Bag
from loka_jax.data.crosses import crossed, crosses_of
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.first_use import Budget, check_plan
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export.rows import Encoding, Inputs
from loka_jax.nn.context import site_context
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import resolve
from loka_jax.predict.trained import Trained
from loka_jax.serving import fold, keep
from loka_jax.site import Choice
from loka_jax.train import metrics
from loka_jax.train.step import compiled_eval_step, logits_of, past_first_steps

Platform = Literal["cpu", "cuda"]
PlanName = Literal["auto", "saved", "off"]
_BETWEEN = "operations between sites"
NO_TRITON = "JAX promises nothing of Triton's kernels in exported programs"
_WEIGHTS = ("params", "fp8", "batch_stats")
_MOSAIC = "mosaic_gpu_v2"
# A hint that XLA reads on every platform. JAX has not said for how long it will.
_UNPROMISED = (export.DisabledSafetyCheck.custom_call("LayoutConstraint"),)


class Form(NamedTuple):
    """A program to export.

    Attributes:
        device: that kernels are planned for.
        runs: by site, what runs there.
        twins: by site, which kernel XLA stands in for, and why.
    """

    platform: Platform
    batch_size: int
    model: nn.Planned
    device: Device
    runs: dict[str, str]
    twins: dict[str, str]


def make_form(
    trained: Trained,
    platform: Platform,
    batch_size: int,
    plan: DispatchPlan,
    *,
    by_xla: bool = False,
) -> Form:
    """Returns the form of a program, with XLA in place of what cannot be exported.

    Args:
        by_xla: no kernels for this machine's GPU, which run where nothing is chosen.
    """
    device = _any_device(platform) if by_xla else _device_of(platform)
    with tracing(device) as left_out:
        sites = trained.model.list_sites(DispatchPlan(), batch_size)
        by_path = {site.path: site for site in sites}
        choices, twins = [], {}
        for path, choice in plan.choices:
            reason, attention = NO_TRITON, by_path[path].attention
            if attention is not None:
                reason = None if choice.provider == "xla" else attention.why_xla
            elif choice.provider != "triton":
                reason = resolve(by_path[path].spec, choice, device).why_not
            if reason is not None:
                twins[path] = f"{choice.name}: {reason}"
                choice = Choice("xla", choice.recipe)
            choices.append((path, choice))
        model = nn.Planned(trained.config.model, tuple(choices))
        model = past_first_steps(model, trained.state)
        inputs = trained.model.inputs(batch_size)
        runs = {s.path: s.runs["fwd"] for s in nn.list_sites(model, *inputs)}
    if left_out and platform == "cuda":
        twins[_BETWEEN] = f"triton: {NO_TRITON}"
    return Form(platform, batch_size, model, device, runs, twins)


@contextlib.contextmanager
def tracing(device: Device) -> Iterator[list[str]]:
    """Plans sites for a device, without Triton's kernels, while they are traced.

    Yields a list, which grows by an entry for each operation that would have had one.
    """
    with site_context(device=device), triton.left_out() as left_out:
        yield left_out


def runs_here(platform: Platform) -> bool:
    """Returns whether JAX's default device is of that platform."""
    return {"cpu": "cpu", "cuda": "gpu"}[platform] == jax.default_backend()


def plan_of(
    name: PlanName, saved: DispatchPlan, trained: Trained, form: tuple[Platform, int]
) -> DispatchPlan:
    """Returns the plan of a program by its name, see `export_run`."""
    platform, batch_size = form
    if name == "off":
        return DispatchPlan()
    if name == "saved" or platform == "cpu" or not runs_here(platform):
        return saved
    sites = trained.model.list_sites(DispatchPlan(), batch_size)
    options, performance = trained.config.dispatch, local_performance().performance
    make_plan = functools.partial(
        plans.make_plan,
        sites,
        limits=options.limits,
        rules=options.by_pattern,
        config=trained.source,
        roles=("fwd",),
    )
    if performance is None:
        return make_plan(None)
    how = make_plan, sites, performance, Budget(options.check_seconds)
    return check_plan(*how, pass_name="inference").plan


def _device_of(platform: Platform) -> Device:
    return local_device() if runs_here(platform) else _any_device(platform)


def _any_device(platform: Platform) -> Device:
    """Returns a device without kernels of its own: its programs run on all others."""
    return Device(platform="cpu" if platform == "cpu" else "gpu")


class Program(NamedTuple):
    """A serialized program.

    Attributes:
        compute_capability: the only one that it runs on; None for any.
    """

    form: Form
    content: bytes
    weights: list[str]
    compute_capability: str | None

    def as_json(self) -> dict[str, Any]:
        """Returns its description but for the names of files."""
        return {
            "platform": self.form.platform,
            "batch_size": self.form.batch_size,
            "compute_capability": self.compute_capability,
            "weights": self.weights,
            "sites": self.form.runs,
            "twins": self.form.twins,
        }


def make_program(
    trained: Trained, form: Form, encoding: Encoding, weights: list[Array]
) -> Program:
    """Returns the program of a form; its weights are added to those of others.

    Nothing runs but the preparation of the weights, so that programs for a GPU can be
    made on a CPU.
    """
    state = trained.state
    own = {name: getattr(state, name) for name in _WEIGHTS}
    tables = jax.tree.leaves(state.table)
    logits = logits_function(form.model, trained)
    inputs = tables, *encoding.blank(form.batch_size)
    exported, ready = export_function(form, logits, own, *inputs)
    names = [f"weight_{keep(weights, weight)}" for weight in ready]
    needs = None
    if _MOSAIC in exported.mlir_module():
        needs = form.device.compute_capability
    return Program(form, bytes(exported.serialize()), names, needs)


def export_function(
    form: Form, function: Callable, weights: Any, *inputs: Any
) -> tuple[export.Exported, list[Array]]:
    """Returns a function of prepared weights and inputs, and the prepared weights."""
    with tracing(form.device):
        folded = fold(function, weights, *inputs)
        exported = export.export(
            jax.jit(folded.function),
            platforms=(form.platform,),
            disabled_checks=_UNPROMISED,
        )(*jax.tree.map(_shape, (folded.ready, *inputs)))
    return exported, folded.ready


def evaluation_logits(trained: Trained, form: Form, inputs: Inputs) -> np.ndarray:
    """Returns the logits of the run's evaluation step with the choices of a form."""
    tasks, batch = len(trained.schema.labels), _batch(trained, *inputs)
    rows = len(inputs.dense)  # as many as targets, if they are sequences
    labels = np.zeros((rows, tasks) if tasks > 1 else rows, np.float32)
    batch = batch._replace(labels=labels, weights=np.ones(rows, np.float32))
    step = compiled_eval_step(form.model, trained.placement)
    with tracing(form.device):
        _, logits = step(trained.state, metrics.init(tasks=tasks), batch)
    return np.asarray(logits)


def logits_function(model: nn.Planned, trained: Trained) -> Callable:
    """Returns the logits as a function of weights, tables and inputs."""
    state, structure = trained.state, jax.tree.structure(trained.state.table)

    def logits(weights, table, *inputs):
        table = jax.tree.unflatten(structure, table)
        own = dataclasses.replace(state, **weights, table=table)
        batch = _batch(trained, *inputs)
        return logits_of(model, trained.model.tables, own, batch).astype(jnp.float32)

    return logits


def _batch(trained: Trained, dense: Any, ids: Any, further: Any) -> Batch:
    """Returns a batch of inputs; evaluation has no labels."""
    none: Any = None
    schema = trained.schema
    if schema.user is not None:
        return Batch(dense, ids, none, none, events=Events(*further))
    batch = Batch(dense, ids, none, none, tuple(Bag(*bag) for bag in further))
    crosses = crosses_of(trained.config.embedding.crosses, schema)
    return crossed(batch, schema, crosses)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
