"""Is a candidate right? `why_wrong` runs it and compares it with the reference.

Right means: every result is the float32 product of the same quantized operands, but for
rounding, in each row and in each tile. Whether FP8 is good enough is another question,
which `measure.site_errors` answers.

The candidate runs as it is used, by the programs that are timed. All sets of operands
run through the same ones, which are lowered, compiled and run apart.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.measure.check_casts import Rounding
from loka_jax.measure.check_operands import AIMS, Trial
from loka_jax.measure.check_reference import (
    Expected,
    Numerics,
    expect,
    in_fp8,
    next_scales,
)
from loka_jax.measure.check_scores import INFERENCE, Scores, scores, worst_finding
from loka_jax.measure.compiling import (
    UNTUNED,
    Lowered,
    compile_lowered,
    evaluated,
    leaves,
    lower,
)
from loka_jax.measure.programs import (
    State,
    Trained,
    arguments_of_draw,
    planned,
    programs_of,
    to_prepare,
)
from loka_jax.normed import NormVectors, norm_features
from loka_jax.ops.device import Device
from loka_jax.recipe import OPERANDS
from loka_jax.scaling import DelayedScaling
from loka_jax.site import Choice, SiteSpec
from loka_jax.terminal import one_line

# A fused kernel's row scales are no smaller, so that half precision holds the inverse.
_LEAST_ROW_SCALE = 2.0**-14
# By how much of itself rounding may move the amax of a gradient: a code of E4M3.
_AMAX_DOUBT = 2.0**-4
# Of the perturbations that stand for rounding, before none.
_SEEDS, _STRENGTHS = (1, 2, 0), (1.0, 1.0, 0.0)

NO_MEMORY = "was not checked, as the GPU had too little memory left"
# XLA's words; shared memory that a kernel has too little of has others.
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory"


class Outcome(NamedTuple):
    """What a candidate returns in training and in inference."""

    trained: Trained
    inferred: Array | Fp8Array

    @property
    def in_fp8(self) -> dict[str, Fp8Array]:
        """The activations in FP8, by name."""
        found = {"y_fp8": self.trained.y_fp8, f"{INFERENCE}y_fp8": self.inferred}
        return {name: x for name, x in found.items() if isinstance(x, Fp8Array)}


class Check(NamedTuple):
    """The check of a candidate: its lowered programs, or why there are none."""

    numerics: Numerics | None
    programs: Mapping[str, Lowered]
    refusal: str | None = None

    def why_wrong(self, compiled: Mapping[str, Any]) -> str | None:
        """Returns what is wrong with a candidate's results; None if they are right."""
        reason = self.why_not_compiled(compiled)
        if reason is not None:
            return reason
        try:
            for seed, name in enumerate(AIMS):
                trial = compiled["draw"](*leaves(arguments_of_draw(name, seed)))
                reason = self._why_wrong_on(compiled, trial)
                if reason is not None:
                    return f"{reason}, on {name} operands"
        except jax.errors.JaxRuntimeError as error:
            # Not the candidate's fault: references in float32 take most.
            if EXHAUSTED not in str(error):
                raise
            return NO_MEMORY
        return None

    def why_not_compiled(self, compiled: Mapping[str, Any]) -> str | None:
        """Returns why there is not every program; None if there is."""
        if self.refusal is not None:
            return self.refusal
        errors = (x for x in compiled.values() if isinstance(x, Exception))
        return next((f"does not compile: {one_line(x)}" for x in errors), None)

    def _why_wrong_on(self, compiled: Mapping[str, Any], trial: Trial) -> str | None:
        assert self.numerics is not None

        def run(name: str, *arguments: Any) -> Any:
            return compiled[name](*leaves(arguments))

        trial, stored, state = run("begin", trial)
        try:
            outcome = jax.block_until_ready(_outcome(run, trial, state))
        except Exception as error:  # of any kind: the caller gets it as a reason
            if EXHAUSTED in str(error):
                raise
            return f"does not run: {one_line(error)}"
        reason = _why_misshapen(self.numerics.spec, outcome, trial)
        if reason is not None:
            return reason
        are_right, by_result = jax.device_get(run("judge", trial, stored, outcome))
        for wrong in (what for what, is_right in are_right.items() if not is_right):
            return wrong
        shapes = {name: trial.g.shape for name in by_result}
        shapes |= {name: x.shape for name, x in outcome.trained.results.items()}
        worst = worst_finding(by_result, shapes)
        return str(worst) if worst.excess > 1 else None


def why_wrong(
    spec: SiteSpec, choice: Choice, device: Device | None = None
) -> str | None:
    """Returns what is wrong with a candidate's results, or None if they are right."""
    check = lower_check(spec, choice, device)
    return check.why_wrong(compile_lowered(check.programs))


def lower_check(spec: SiteSpec, choice: Choice, device: Device | None = None) -> Check:
    """Returns the check of a candidate, to be compiled and run; see `why_wrong`."""
    plan = planned(spec, choice, device)
    if plan.why_not is not None:
        return Check(None, {}, f"does not run: {plan.why_not}")
    try:
        numerics, passes, begun, programs = programs_of(plan)

        def run(name: str, *arguments: Any) -> Any:
            return getattr(passes, name)(*arguments)

        def judged(trial: Trial, stored, state):
            return trial, stored, _outcome(run, trial, state)

        arguments = evaluated(judged, begun)
    except Exception as error:  # of any kind: the caller gets it as a reason
        return Check(None, {}, f"does not compile: {one_line(error)}")
    programs["judge"] = functools.partial(_judge, numerics), arguments, UNTUNED
    return Check(numerics, {name: lower(*x) for name, x in programs.items()})


def _outcome(run: Callable[..., Any], trial: Trial, state: State) -> Outcome:
    """Returns what the passes return, which `run` runs by their names."""
    trained = run("training", trial, state)
    ready = run("prepare", *to_prepare(trial, state))
    return Outcome(trained, run("inference", ready, trial.lhs, trial.lhs_fp8))


def _why_misshapen(spec: SiteSpec, outcome: Outcome, trial: Trial) -> str | None:
    """Returns which result has a wrong shape, if any."""
    inferred = outcome.inferred
    shape = inferred.data.shape if isinstance(inferred, Fp8Array) else inferred.shape
    if shape != trial.g.shape:
        return f"{INFERENCE}y has shape {shape}, not {trial.g.shape}"
    expected = (spec.m, 1) if spec.fp8_out == "rowwise" else ()
    for name, out in outcome.in_fp8.items():
        if out.scale_inv.shape != expected:
            return f"{name}: scale_inv has shape {out.scale_inv.shape}, not {expected}"
    return None


def _judge(
    numerics: Numerics, trial: Trial, stored, outcome: Outcome
) -> tuple[dict[str, Bool[Array, ""]], dict[str, dict[str, Scores]]]:
    """Returns whether scales are right, by what is wrong else, and `scores`."""
    exact, perturbed = _references(numerics, trial, stored)
    results = dict(outcome.trained.results)
    are_right = _are_amaxes_right(numerics, exact.amaxes, outcome.trained.state)
    what = "scale_inv is not the amax of the activations, or their bound, over 448"
    if not isinstance(outcome.inferred, Fp8Array):
        results[f"{INFERENCE}y"] = outcome.inferred
    for name, out in outcome.in_fp8.items():
        y = exact.results["y"]
        is_right = _are_scales_right(numerics.spec, out, y, trial.vectors)
        are_right[f"{name}: {what}"] = is_right
        results[name] = out.data.astype(jnp.float32) * out.scale_inv
        exact = in_fp8(name, exact, out.scale_inv)
        perturbed = [in_fp8(name, x, out.scale_inv) for x in perturbed]
    others = [reference.results for reference in perturbed]
    return are_right, scores(results, exact, others)


def _references(
    numerics: Numerics, trial: Trial, stored
) -> tuple[Expected, list[Expected]]:
    """Returns the reference, and its results as rounding may perturb them.

    Of what results are made of only the reference's own is held, the last one's: it
    takes more memory than they do.
    """
    rounding = Rounding(jnp.uint32(_SEEDS), jnp.float32(_STRENGTHS))
    of_rounding = functools.partial(expect, numerics, trial, stored)

    def following(_, rounding: Rounding):
        expected = of_rounding(rounding)
        return expected._replace(results={}), expected.results

    shapes = jax.eval_shape(of_rounding, jax.tree.map(lambda x: x[0], rounding))
    empty = jax.tree.map(jnp.zeros_like, shapes._replace(results={}))
    # One after another in one loop: the reference is compiled once.
    last, results = jax.lax.scan(following, empty, rounding)
    *perturbed, exact = (
        last._replace(results=jax.tree.map(lambda x, i=i: x[i], results))
        for i in range(len(_SEEDS))
    )
    return exact, perturbed


def _are_amaxes_right(
    numerics: Numerics, amaxes: Float[Array, "3"], state: DelayedScaling | None
) -> dict[str, Bool[Array, ""]]:
    """Returns whether the newest factors of a state are those of the amaxes."""
    if state is None:
        return {}
    found = dict(zip(OPERANDS, state.history[:, 0], strict=True))
    # Scales are powers of two, and what was rounded may lie on the other side of one.
    doubts = jnp.float32([0.0, 0.0, _AMAX_DOUBT])
    least = next_scales(numerics, amaxes * (1 - doubts))
    most = next_scales(numerics, amaxes * (1 + doubts))
    return {
        f"{x}: the next scale is not that of this step's amax": (
            (least[x] <= found[x]) & (found[x] <= most[x])
        )
        for x in least
    }


def _are_scales_right(
    spec: SiteSpec, out: Fp8Array, y: Float[Array, "m n"], vectors: NormVectors
) -> Bool[Array, ""]:
    """Returns whether activations leave in FP8 under the scales that they need."""
    if spec.fp8_out == "tensorwise":
        _, gamma, beta = (0.0 if v is None else jnp.abs(v) for v in vectors)
        gamma = 1.0 if vectors.gamma is None else gamma
        bound = norm_features(spec.norm, spec.n) ** 0.5 * gamma + beta
        least = most = jnp.max(bound) / fp8_max(E4M3)
    else:
        least = jnp.max(jnp.abs(y), axis=1, keepdims=True) / fp8_max(E4M3)
        most = jnp.maximum(2 * least, _LEAST_ROW_SCALE)
    ratios = (0.95 * least <= out.scale_inv) & (out.scale_inv <= 1.05 * most)
    return jnp.all(ratios)
