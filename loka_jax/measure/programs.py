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
from jaxtyping import Array, Float

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
from loka_jax.normed import NormVectors
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.scaling import DelayedScaling
from loka_jax.serving import fold
from loka_jax.site import Choice, SiteSpec

_ROTATED_BYTES = 120e6  # twice the L2 of an H200
_MAX_SETS = 16


class Inputs(NamedTuple):
    """What a pass takes, besides the gradient of its result."""

    lhs: Float[Array, "m k"]
    lhs_fp8: Fp8Array | None
    rhs: Float[Array, "k n"]
    vectors: NormVectors
    state: DelayedScaling | None

    def split(self) -> tuple["Inputs", tuple]:
        """Returns what is there before inference, and the rows."""
        return self._replace(lhs=None, lhs_fp8=None), (self.lhs, self.lhs_fp8)


class Trained(NamedTuple):
    """What the training pass returns: "y", "dlhs", "drhs" and so on, the next state."""

    results: Mapping[str, Array]
    y_fp8: Fp8Array | None
    state: DelayedScaling | None


class Passes:
    """The passes of a candidate.

    `inference` is there once `prepare` was traced, which splits the program.
    """

    def __init__(self, plan: KernelPlan):
        """Takes the plan of the candidate."""
        self._plan = plan
        self._inference: Callable[..., Any] | None = None

    def forward(self, inputs: Inputs) -> Array | Activations:
        """Returns the activations."""
        lhs = inputs.lhs
        if inputs.lhs_fp8 is not None:
            lhs = Activations(inputs.lhs, inputs.lhs_fp8)
        arrays = SiteArrays(lhs, inputs.rhs, *inputs.vectors)
        return run_site(self._plan, arrays, inputs.state)

    def training(self, inputs: Inputs, g: Float[Array, "m n"]) -> Trained:
        """Returns the activations, all gradients, and the next state."""

        def forward(differentiated: Inputs):
            out = self.forward(differentiated._replace(lhs_fp8=inputs.lhs_fp8))
            return (out.y, out.fp8) if isinstance(out, Activations) else (out, None)

        differentiated = inputs._replace(lhs_fp8=None)
        y, pull, y_fp8 = jax.vjp(forward, differentiated, has_aux=True)
        (gradients,) = pull(g)
        results = {"y": y, "dlhs": gradients.lhs, "drhs": gradients.rhs}
        for name, gradient in gradients.vectors._asdict().items():
            if gradient is not None:
                results[f"d{name}"] = gradient
        return Trained(results, y_fp8, gradients.state)

    def prepare(self, weights: Inputs, *lhs: Any) -> list[Array]:
        """Returns what inference needs of the weights; of `lhs` only its types."""
        folded = fold(self._infer, weights, *lhs)
        self._inference = folded.function
        return folded.ready

    def inference(self, ready: list[Array], *lhs: Any) -> Array | Fp8Array:
        """Returns the activations, in FP8 if these leave."""
        assert self._inference is not None
        return self._inference(ready, *lhs)

    def _infer(self, weights: Inputs, lhs, lhs_fp8) -> Array | Fp8Array:
        out = self.forward(weights._replace(lhs=lhs, lhs_fp8=lhs_fp8))
        return out.fp8 if isinstance(out, Activations) else out


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

    def to_train(trial: Trial, stored, inputs: Inputs):
        return inputs, trial.g

    def to_prepare(trial, stored, inputs: Inputs):
        weights, lhs = inputs.split()
        return weights, *lhs

    def to_infer(trial, stored, inputs: Inputs):
        weights, lhs = inputs.split()
        return passes.prepare(weights, *lhs), *lhs

    by_name: dict[str, Program] = {
        "draw": (draw_one, aimed, UNTUNED),
        "begin": (begin_one, drawn, UNTUNED),
        "training": (passes.training, evaluated(to_train, begun), NO_CAPTURE),
        "prepare": (passes.prepare, evaluated(to_prepare, begun), NO_CAPTURE),
        "inference": (passes.inference, evaluated(to_infer, begun), NO_CAPTURE),
    }
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


def operand_sets(compiled: Mapping[str, Any], count: int) -> dict[str, list[tuple]]:
    """Returns what compiled passes take of ordinary operands, by pass and set.

    Delayed scales are those of the first set. Inference takes what "prepare" returns,
    and is left out without it.
    """
    arguments = (arguments_of_draw("ordinary", seed) for seed in range(count))
    trials = [compiled["draw"](*leaves(x)) for x in arguments]
    _, _, first = compiled["begin"](*leaves((trials[0],)))
    sets = [Inputs(x.lhs, x.lhs_fp8, x.rhs, x.vectors, first.state) for x in trials]
    pairs = zip(sets, trials, strict=True)
    taken = {"training": [leaves((inputs, trial.g)) for inputs, trial in pairs]}
    if "prepare" in compiled:
        weights, lhs = sets[0].split()
        ready = compiled["prepare"](*leaves((weights, *lhs)))
        taken["inference"] = [leaves((ready, *inputs.split()[1])) for inputs in sets]
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
