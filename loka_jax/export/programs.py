"""Serialized programs for inference, with their weights apart and prepared once.

    logits = program(weights, tables, dense, ids, bags)

`weights` are what the model computes from its variables alone (`serving.fold`): FP8
where the plan says so. Programs of several batch sizes share equal ones.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array

from loka_jax import nn
from loka_jax.data import Batch
from loka_jax.data.batch import Bag
from loka_jax.export.forms import Form, tracing
from loka_jax.export.loader import Encoding, Inputs
from loka_jax.ops.tables import Tables
from loka_jax.predict.trained import Trained
from loka_jax.serving import fold, keep
from loka_jax.train import metrics
from loka_jax.train.state import TrainState
from loka_jax.train.step import compiled_eval_step, logits_of

_WEIGHTS = ("params", "fp8", "batch_stats")
_MOSAIC = "mosaic_gpu_v2"
# A hint that XLA reads on every platform. JAX has not said for how long it will.
_UNPROMISED = (export.DisabledSafetyCheck.custom_call("LayoutConstraint"),)


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
    logits = logits_function(form.model, trained.network.tables, state)
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
    rows, tasks = len(inputs.dense), len(trained.schema.labels)
    labels = np.zeros((rows, tasks) if tasks > 1 else rows, np.float32)
    weights = np.ones(rows, np.float32)
    bags = tuple(Bag(*bag) for bag in inputs.bags)
    batch = Batch(inputs.dense, inputs.ids, labels, weights, bags)
    step = compiled_eval_step(form.model, trained.placement)
    with tracing(form.device):
        _, logits = step(trained.state, metrics.init(tasks=tasks), batch)
    return np.asarray(logits)


def logits_function(model: nn.Planned, tables: Tables, state: TrainState) -> Callable:
    """Returns the logits as a function of weights, tables and inputs."""
    structure = jax.tree.structure(state.table)

    def logits(weights, table, dense, ids, bags):
        table = jax.tree.unflatten(structure, table)
        batch = Batch(dense, ids, None, None, tuple(Bag(*bag) for bag in bags))  # pyright: ignore[reportArgumentType]  # evaluation has no labels
        own = dataclasses.replace(state, **weights, table=table)
        return logits_of(model, tables, own, batch).astype(jnp.float32)

    return logits


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
