"""The programs of a candidate as it is used, for its check and its times.

draw, begin operands, and what the passes take
training    forward and backward: all gradients, and the next scaling state
prepare     what inference needs of the weights, computed once (`loka_jax.serving`)
inference   forward
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import scaling
from loka_jax.fp8 import Fp8Array
from loka_jax.measure.check_operands import AIMS, Trial, draw
from loka_jax.measure.check_reference import Numerics, settle
from loka_jax.measure.compiling import (
    NO_CAPTURE,
    UNTUNED,
    Abstract,
    abstract,
    evaluated,
    leaves,
)
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.scaling import DelayedScaling
from loka_jax.serving import fold
from loka_jax.site import Choice, SiteSpec

_ROTATED_BYTES = 120e6  # twice the L2 of an H200
_MAX_SETS = 16

type State = DelayedScaling | None


class Trained(NamedTuple):
    """What the training pass returns: "y", "dlhs", "drhs" and so on, the next state."""

    results: Mapping[str, Array]
    y_fp8: Fp8Array | None
    state: State


class Passes:
    """The passes of a candidate.

    `inference` is there once `prepare` was traced, which splits the program.
    """

    def __init__(self, plan: KernelPlan):
        """Takes the plan of the candidate."""
        self._plan = plan
        self._inference: Callable[..., Any] | None = None

    def forward(self, trial: Trial, state: State) -> Array | Activations:
        """Returns the activations."""
        lhs = trial.lhs
        if trial.lhs_fp8 is not None:
            lhs = Activations(trial.lhs, trial.lhs_fp8)
        arrays = SiteArrays(lhs, trial.rhs, *trial.vectors)
        return run_site(self._plan, arrays, state)

    def training(self, trial: Trial, state: State) -> Trained:
        """Returns the activations, all gradients, and the next state."""

        def forward(lhs, rhs, vectors, state):
            out = self.forward(trial._replace(lhs=lhs, rhs=rhs, vectors=vectors), state)
            return (out.y, out.fp8) if isinstance(out, Activations) else (out, None)

        operands = trial.lhs, trial.rhs, trial.vectors, state
        y, pull, y_fp8 = jax.vjp(forward, *operands, has_aux=True)
        dlhs, drhs, dvectors, state = pull(trial.g)
        results = {"y": y, "dlhs": dlhs, "drhs": drhs}
        for name, gradient in dvectors._asdict().items():
            if gradient is not None:
                results[f"d{name}"] = gradient
        return Trained(results, y_fp8, state)

    def prepare(self, weights: tuple, *lhs: Any) -> list[Array]:
        """Returns what inference needs of the weights; of `lhs` only its types."""
        folded = fold(self._infer, weights, *lhs)
        self._inference = folded.function
        return folded.ready

    def inference(self, ready: list[Array], *lhs: Any) -> Array | Fp8Array:
        """Returns the activations, in FP8 if these leave."""
        assert self._inference is not None
        return self._inference(ready, *lhs)

    def _infer(self, weights: tuple, lhs, lhs_fp8) -> Array | Fp8Array:
        trial, state = weights
        out = self.forward(trial._replace(lhs=lhs, lhs_fp8=lhs_fp8), state)
        return out.fp8 if isinstance(out, Activations) else out


def to_prepare(trial: Trial, state: State) -> tuple:
    """Returns what `Passes.prepare` takes: what is there before inference, the rows."""
    weights = trial._replace(lhs=None, lhs_fp8=None, g=None, headroom=None)
    return (weights, state), trial.lhs, trial.lhs_fp8


# What `lower` takes: a function, its arguments, and options of the compiler.
type Program = tuple[Callable[..., Any], Abstract, dict[str, str]]


class Programs(NamedTuple):
    """The programs of a candidate, and what "begin" returns, without values."""

    numerics: Numerics
    passes: Passes
    begun: Abstract
    by_name: dict[str, Program]


def planned(spec: SiteSpec, choice: Choice, device: Device | None = None) -> KernelPlan:
    """Returns the plan of a candidate once its delayed scales are initialized."""
    if choice.recipe.is_delayed:
        choice = choice.with_initialized_scales()
    return resolve(spec, choice, device or local_device())


def programs_of(plan: KernelPlan) -> Programs:
    """Returns the programs of a candidate; nothing is computed.

    Raises:
        Exception: of any kind, if the passes cannot be traced.
    """
    numerics, passes = Numerics.of(plan), Passes(plan)
    draw_one = functools.partial(draw, numerics.spec, numerics.recipe.compute_dtype)
    begin_one = functools.partial(begin, plan, numerics)
    aimed = abstract(arguments_of_draw("ordinary", 0))
    drawn = evaluated(lambda *arguments: (draw_one(*arguments),), aimed)
    begun = evaluated(begin_one, drawn)

    def to_infer(trial: Trial, stored, state):
        return passes.prepare(*to_prepare(trial, state)), trial.lhs, trial.lhs_fp8

    trained = evaluated(lambda trial, stored, state: (trial, state), begun)
    prepared = evaluated(to_prepare, trained)
    by_name: dict[str, Program] = {
        "draw": (draw_one, aimed, UNTUNED),
        "begin": (begin_one, drawn, UNTUNED),
        "training": (passes.training, trained, NO_CAPTURE),
        "prepare": (passes.prepare, prepared, NO_CAPTURE),
        "inference": (passes.inference, evaluated(to_infer, begun), NO_CAPTURE),
    }
    return Programs(numerics, passes, begun, by_name)


def arguments_of_draw(aim: str, seed: int) -> tuple:
    """Returns what "draw" takes: what operands are aimed at, and their seed."""
    return jax.tree.map(jnp.float32, AIMS[aim]), jnp.uint32(seed)


def begin(plan: KernelPlan, numerics: Numerics, trial: Trial):
    """Returns the settled operands, the delayed scales, and a state with these."""
    trial, stored = settle(numerics, trial)
    recipe = plan.choice.recipe
    return trial, stored, scaling.stored(stored, recipe) if recipe.is_delayed else None


def operand_sets(compiled: Mapping[str, Any], count: int) -> dict[str, list[tuple]]:
    """Returns what compiled passes take of ordinary operands, by pass and set.

    Delayed scales are those of the first set. Inference takes what "prepare" returns,
    and is left out without it.
    """
    arguments = (arguments_of_draw("ordinary", seed) for seed in range(count))
    trials = [compiled["draw"](*leaves(x)) for x in arguments]
    _, _, state = compiled["begin"](*leaves((trials[0],)))
    taken = {"training": [leaves((trial, state)) for trial in trials]}
    if "prepare" in compiled:
        ready = compiled["prepare"](*leaves(to_prepare(trials[0], state)))
        taken["inference"] = [leaves((ready, x.lhs, x.lhs_fp8)) for x in trials]
    return taken


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
    """Returns the forms of a candidate in a chain; the last has all that it does.

    None but Pallas kernels hand FP8 on.
    """
    if choice.provider != "pallas":
        return ()
    reads_fp8 = planned(spec, choice).reads_fp8
    return ("out", "in", "in out") if reads_fp8 else ("out",)


def num_rotated(spec: SiteSpec) -> int:
    """Returns the number of operand sets whose rotation keeps them out of the L2."""
    num_bytes = 2 * spec.m * (spec.k + spec.n)
    return min(max(2, round(_ROTATED_BYTES / num_bytes + 0.5)), _MAX_SETS)
