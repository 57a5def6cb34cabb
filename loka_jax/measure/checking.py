"""Is a candidate right? `why_wrong` runs it and compares it with the reference.

Right means: every result is the float32 product of the same quantized operands, but for
rounding, in each row and in each tile. Whether FP8 is good enough is another question,
which `measure.site_errors` answers.

The candidate runs as it is used: the training pass with its gradients, and inference
with its weight prepared, in the form of chain that the spec names. Few programs are
compiled: arrays are arguments, so that all sets of operands run through the same ones.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.measure.check_casts import Rounding
from loka_jax.measure.check_operands import AIMS, Trial, draw
from loka_jax.measure.check_reference import Numerics, expect, in_fp8, settle
from loka_jax.measure.check_scores import INFERENCE, scores
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.normed import NormVectors, norm_features
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.scaling import DelayedScaling
from loka_jax.serving import fold
from loka_jax.site import Choice, SiteSpec
from loka_jax.terminal import one_line

EPSILON = 1e-6
# A fused kernel's row scales are no smaller, so that half precision holds the inverse.
_LEAST_ROW_SCALE = 2.0**-14
_SEEDS = (1, 2)  # of the perturbations that stand for rounding


class Passes(NamedTuple):
    """The compiled passes of a candidate."""

    training: Any
    prepare: Any
    inference: Any


class Inputs(NamedTuple):
    """What a pass takes, besides the gradient of its result."""

    lhs: Float[Array, "m k"]
    lhs_fp8: Fp8Array | None
    rhs: Float[Array, "k n"]
    vectors: NormVectors
    state: DelayedScaling | None


def why_wrong(
    spec: SiteSpec,
    choice: Choice,
    device: Device | None = None,
    *,
    epsilon: float = EPSILON,
) -> str | None:
    """Returns what is wrong with a candidate's results, or None if they are right.

    Args:
        spec: the site, its exact rows and its form in a chain included.
        choice: of provider and recipe.
        device: that kernels are planned for; JAX's default device if None.
        epsilon: added to the variance or mean square.
    """
    choice = choice.with_initialized_scales() if choice.recipe.is_delayed else choice
    plan = resolve(spec, choice, device or local_device())
    if plan.why_not is not None:
        return f"does not run: {plan.why_not}"
    numerics = Numerics.of(plan, epsilon)
    passes = None
    for seed, (name, aim) in enumerate(AIMS.items()):
        trial = draw(numerics.spec, numerics.compute_dtype.name, aim, seed)
        trial, stored = settle(numerics, trial)
        inputs = _inputs(plan, trial, stored)
        passes = passes or _compile(plan, inputs, trial.g, epsilon)
        if isinstance(passes, str):
            return passes
        reason = _why_wrong_on(passes, numerics, trial, stored, inputs)
        if reason is not None:
            return f"{reason}, on {name} operands"
    return None


def chain_spec(spec: SiteSpec, choice: Choice) -> SiteSpec:
    """Returns the site as part of a chain: FP8 comes in, if it is read, and leaves."""
    reads_fp8 = resolve(spec, choice, local_device()).reads_fp8
    fp8_in = spec.fp8_out if reads_fp8 else None
    return dataclasses.replace(spec, fp8_in=fp8_in, out="fp8")


def _inputs(plan: KernelPlan, trial: Trial, stored: Float[Array, "3"]) -> Inputs:
    """Returns what the passes take."""
    recipe, state = plan.choice.recipe, None
    if recipe.is_delayed:
        # The history matters to the next step only.
        history = jnp.ones((len(stored), recipe.amax_history_length))
        table = jnp.concatenate([stored[:, None], history], axis=1)
        state = DelayedScaling(table.astype(jnp.float32))
    return Inputs(trial.lhs, trial.lhs_fp8, trial.rhs, trial.vectors, state)


def _compile(
    plan: KernelPlan, inputs: Inputs, g: Array, epsilon: float
) -> Passes | str:
    """Returns the passes of a candidate, or why they do not compile."""
    run = functools.partial(_run, plan, epsilon)
    weights, lhs = _split(inputs)
    later: Any = None

    def prepare(weights):
        nonlocal later
        folded = fold(functools.partial(_infer, run), weights, *lhs)
        later = folded.function
        return folded.ready

    try:
        ready = jax.eval_shape(prepare, weights)
    except Exception as error:  # of any kind: the caller gets it as a reason
        return f"does not compile: {one_line(error)}"
    programs = {
        "training": (functools.partial(_train, run), (inputs, g)),
        "prepare": (prepare, (weights,)),
        "inference": (later, (ready, *lhs)),
    }
    compiled = compile_all(programs)
    for program in compiled.values():
        if isinstance(program, Exception):
            return f"does not compile: {one_line(program)}"
    return Passes(**compiled)


def _run(plan: KernelPlan, epsilon: float, inputs: Inputs) -> Array | Activations:
    """Returns the activations of a site."""
    lhs = inputs.lhs
    if inputs.lhs_fp8 is not None:
        lhs = Activations(inputs.lhs, inputs.lhs_fp8)
    arrays = SiteArrays(lhs, inputs.rhs, *inputs.vectors)
    return run_site(plan, arrays, inputs.state, epsilon=epsilon)


def _train(run, inputs: Inputs, g: Array) -> tuple[dict[str, Array], Fp8Array | None]:
    """Returns results by name, and the activations in FP8 if these leave too."""

    def forward(inputs: Inputs):
        out = run(inputs)
        return (out.y, out.fp8) if isinstance(out, Activations) else (out, None)

    differentiable = inputs._replace(lhs_fp8=None, state=None)
    y, pull, y_fp8 = jax.vjp(
        lambda x: forward(x._replace(lhs_fp8=inputs.lhs_fp8, state=inputs.state)),
        differentiable,
        has_aux=True,
    )
    (gradients,) = pull(g)
    results = {"y": y, "dlhs": gradients.lhs, "drhs": gradients.rhs}
    for name, gradient in gradients.vectors._asdict().items():
        if gradient is not None:
            results[f"d{name}"] = gradient
    return results, y_fp8


def _split(inputs: Inputs) -> tuple[Inputs, tuple]:
    """Returns what is known before inference, and the rows."""
    return inputs._replace(lhs=None, lhs_fp8=None), (inputs.lhs, inputs.lhs_fp8)


def _infer(run, weights: Inputs, lhs: Array, lhs_fp8: Fp8Array | None):
    """Returns the activations, in FP8 if these leave."""
    out = run(weights._replace(lhs=lhs, lhs_fp8=lhs_fp8))
    return out.fp8 if isinstance(out, Activations) else out


def _why_wrong_on(
    passes: Passes, numerics: Numerics, trial: Trial, stored, inputs: Inputs
) -> str | None:
    """Returns what is wrong with the results on some operands."""
    weights, lhs = _split(inputs)
    try:
        results, y_fp8 = passes.training(*leaves((inputs, trial.g)))
        ready = passes.prepare(*leaves((weights,)))
        inferred = passes.inference(*leaves((ready, *lhs)))
        jax.block_until_ready((results, y_fp8, inferred))
    except Exception as error:  # of any kind: the caller gets it as a reason
        return f"does not run: {one_line(error)}"
    shape = inferred.data.shape if isinstance(inferred, Fp8Array) else inferred.shape
    if shape != trial.g.shape:
        return f"{INFERENCE}y has shape {shape}, not {trial.g.shape}"
    reference = functools.partial(expect, numerics, trial, stored)
    exact = reference(Rounding(jnp.uint32(0), jnp.float32(0)))
    perturbed = [reference(Rounding(jnp.uint32(s), jnp.float32(1))) for s in _SEEDS]
    found, in_e4m3 = dict(results), {"y_fp8": y_fp8}
    name = f"{INFERENCE}y"
    if isinstance(inferred, Fp8Array):
        in_e4m3[f"{name}_fp8"] = inferred
    else:
        found[name] = inferred
    for name, out in in_e4m3.items():
        if out is None:
            continue
        why = _why_wrong_scales(numerics.spec, out, exact.results["y"], trial.vectors)
        if why is not None:
            return f"{name}: {why}"
        found[name] = out.data.astype(jnp.float32) * out.scale_inv
        exact = in_fp8(name, exact, out.scale_inv)
        perturbed = [in_fp8(name, x, out.scale_inv) for x in perturbed]
    worst, *_ = scores(found, exact, perturbed)
    return str(worst) if worst.score.excess > 1 else None


def _why_wrong_scales(
    spec: SiteSpec, out: Fp8Array, y: Float[Array, "m n"], vectors: NormVectors
) -> str | None:
    """Returns what is wrong with the scales of activations that leave in FP8."""
    shape = (spec.m, 1) if spec.fp8_out == "rowwise" else ()
    if out.scale_inv.shape != shape:
        return f"scale_inv has shape {out.scale_inv.shape}, not {shape}"
    if spec.fp8_out == "tensorwise":
        _, gamma, beta = (0.0 if v is None else jnp.abs(v) for v in vectors)
        gamma = 1.0 if vectors.gamma is None else gamma
        bound = norm_features(spec.norm, spec.n) ** 0.5 * gamma + beta
        least = most = float(jnp.max(bound)) / fp8_max(E4M3)
    else:
        least = jnp.max(jnp.abs(y), axis=1, keepdims=True) / fp8_max(E4M3)
        most = jnp.maximum(2 * least, _LEAST_ROW_SCALE)
    ratios = (0.95 * least <= out.scale_inv) & (out.scale_inv <= 1.05 * most)
    if bool(jnp.all(ratios)):
        return None
    return "scale_inv is not the amax of the activations, or their bound, over 448"
