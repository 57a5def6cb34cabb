"""The programs of a candidate, for its check, its times and its digest.

draw, begin                     operands, and what the passes take
training, prepare, inference    the passes, see `passes`
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import scaling
from loka_jax.measure.check_operands import AIMS, Trial, draw
from loka_jax.measure.check_reference import Numerics, settle
from loka_jax.measure.compiling import (
    NO_CAPTURE,
    UNTUNED,
    Abstract,
    Lowered,
    abstract,
    evaluated,
    lower,
)
from loka_jax.measure.passes import Inputs, Passes
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.site import Choice, SiteSpec

EPSILON = 1e-6


class Program(NamedTuple):
    """A function, the arguments that it is lowered for, and options of the compiler."""

    function: Callable[..., Any]
    arguments: Abstract
    options: dict[str, str] = UNTUNED

    def lower(self) -> Lowered:
        """Returns the program lowered; uses no GPU."""
        return lower(*self)


class Programs(NamedTuple):
    """The programs of a candidate.

    Attributes:
        numerics: what its numbers should be.
        passes: as functions.
        begun: what "begin" returns, without values: `begin`.
        by_name: the programs.
    """

    numerics: Numerics
    passes: Passes
    begun: Abstract
    by_name: dict[str, Program]


def planned(spec: SiteSpec, choice: Choice, device: Device | None = None) -> KernelPlan:
    """Returns the plan of a candidate once its delayed scales are initialized.

    Args:
        spec: the site.
        choice: of provider and recipe.
        device: that kernels are planned for; JAX's default device if None.
    """
    if choice.recipe.is_delayed:
        choice = choice.with_initialized_scales()
    return resolve(spec, choice, device or local_device())


def programs_of(plan: KernelPlan, epsilon: float = EPSILON) -> Programs:
    """Returns the programs of a candidate; nothing is computed.

    Args:
        plan: of the candidate.
        epsilon: added to the variance or mean square.

    Raises:
        Exception: of any kind, if the passes cannot be traced.
    """
    numerics, passes = Numerics.of(plan, epsilon), Passes(plan, epsilon)
    draw_one = functools.partial(draw, numerics.spec, numerics.compute_dtype.name)
    begin_one = functools.partial(begin, plan, numerics)
    aimed = abstract(arguments_of_draw("ordinary", 0))
    drawn = evaluated(lambda *arguments: (draw_one(*arguments),), aimed)
    begun = evaluated(begin_one, drawn)

    def to_train(trial: Trial, stored, inputs: Inputs):
        return inputs, trial.g

    def to_prepare(trial, stored, inputs: Inputs):
        weights, lhs = inputs.split()
        return weights, *lhs

    def to_infer(trial, stored, inputs: Inputs):
        weights, lhs = inputs.split()
        return passes.prepare(weights, *lhs), *lhs

    by_name = {
        "draw": Program(draw_one, aimed),
        "begin": Program(begin_one, drawn),
    }
    timed = {
        "training": (passes.training, to_train),
        "prepare": (passes.prepare, to_prepare),
        "inference": (passes.inference, to_infer),
    }
    for name, (function, arguments) in timed.items():
        by_name[name] = Program(function, evaluated(arguments, begun), NO_CAPTURE)
    return Programs(numerics, passes, begun, by_name)


def arguments_of_draw(aim: str, seed: int) -> tuple:
    """Returns what "draw" takes: what operands are aimed at, and their seed."""
    return jax.tree.map(jnp.float32, AIMS[aim]), jnp.uint32(seed)


def begin(plan: KernelPlan, numerics: Numerics, trial: Trial):
    """Returns the settled operands, the delayed scales, and what the passes take."""
    trial, stored = settle(numerics, trial)
    recipe, state = plan.choice.recipe, None
    if recipe.is_delayed:
        state = scaling.stored(stored, recipe)
    inputs = Inputs(trial.lhs, trial.lhs_fp8, trial.rhs, trial.vectors, state)
    return trial, stored, inputs


def form_spec(spec: SiteSpec, form: str) -> SiteSpec:
    """Returns a site in a form of chain: "in", "out", "in out", or "" alone.

    "in": lhs comes in FP8; "out": the activations leave in FP8.
    """
    words = form.split()
    return dataclasses.replace(
        spec,
        fp8_in=spec.fp8_out if "in" in words else None,
        out="fp8" if "out" in words else spec.out,
    )


def chain_forms(spec: SiteSpec, choice: Choice) -> tuple[str, ...]:
    """Returns the forms of a candidate in a chain; the last has all that it does."""
    reads_fp8 = planned(spec, choice).reads_fp8
    return ("out", "in", "in out") if reads_fp8 else ("out",)
