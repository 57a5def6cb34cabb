"""The passes of a site that are timed, as functions of arrays with their arguments.

training    forward and backward
inference   forward, its weight prepared once (`loka_jax.serving`)

Each alone, and as part of a chain of sites: lhs comes in FP8 (" in"), the activations
go out in FP8 (" out"), or both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8, scaling
from loka_jax.fp8 import E4M3
from loka_jax.measure.timing import Case
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.probe.capture import Operands as Drawn
from loka_jax.recipe import Recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.serving import fold
from loka_jax.site import Choice, SiteSpec

# lhs and g in bfloat16, rhs in float32; lhs in FP8 too where another site hands it on.
type Operands = tuple[Array | Activations, Array, Array]

_ROTATED_BYTES = 120e6  # twice the L2 of an H200
_MAX_SETS = 16


class SiteRun(NamedTuple):
    """A site, a choice for it, the scaling state it runs with, and the device."""

    spec: SiteSpec
    choice: Choice
    state: DelayedScaling | None
    device: Device

    def __call__(self, lhs: Array | Activations, rhs: Array) -> Array | Activations:
        """Returns the activations, with parameters as they are initialized."""
        fp8_in = lhs.scaling if isinstance(lhs, Activations) else None
        spec = dataclasses.replace(self.spec, fp8_in=fp8_in)
        ones, zeros = jnp.ones((spec.n,)), jnp.zeros((spec.n,))
        arrays = SiteArrays(
            lhs,
            rhs,
            bias=ones if spec.use_bias else None,
            gamma=ones if spec.has_affine else None,
            beta=zeros if spec.norm == "layer" else None,
        )
        return run_site(resolve(spec, self.choice, self.device), arrays, self.state)


def site_run(
    choice: Choice,
    spec: SiteSpec,
    operands: Operands,
    device: Device | None = None,
) -> SiteRun:
    """Returns a site as it runs once the delayed scales are initialized, if any.

    Args:
        choice: of provider and recipe.
        spec: the site.
        operands: their amaxes initialize the scales.
        device: that kernels are planned for; JAX's default device if None.
    """
    device = device or local_device()
    if not choice.recipe.is_delayed:
        return SiteRun(spec, choice, None, device)
    lhs, rhs, g = operands
    state = _initialized(choice.recipe, (_high_precision(lhs), rhs, g))
    return SiteRun(spec, choice.with_initialized_scales(), state, device)


@functools.partial(jax.jit, static_argnums=0)
def _initialized(recipe: Recipe, operands: tuple[Array, Array, Array]):
    return scaling_state(recipe, operand_amaxes(operands))


def training(
    choice: Choice,
    spec: SiteSpec,
    sets: Sequence[Operands],
    device: Device | None = None,
) -> Case:
    """Returns the pass from (lhs, rhs, g) to y and the gradients of lhs and rhs."""
    run = site_run(choice, spec, sets[0], device)
    return Case(functools.partial(train_site, run), sets)


def inference(
    choice: Choice,
    spec: SiteSpec,
    sets: Sequence[Operands],
    device: Device | None = None,
) -> Case:
    """Returns the pass from lhs, with the first set's rhs, to y.

    In a chain of inferences y in the compute dtype is not read, and not computed.
    """
    run = site_run(choice, spec, sets[0], device)

    def infer(rhs, lhs):
        y = run(lhs, rhs)
        return y.fp8 if isinstance(y, Activations) else y

    lhs, rhs, _ = sets[0]
    folded = fold(infer, rhs, lhs)
    return Case(folded.function, [(folded.ready, lhs) for lhs, _, _ in sets])


def in_chains(
    choice: Choice,
    spec: SiteSpec,
    sets: Sequence[Operands],
    device: Device | None = None,
) -> dict[str, Case]:
    """Returns the passes as parts of a chain, by their names in a table."""
    to_fp8 = dataclasses.replace(spec, out="fp8")
    forms = [(" out", to_fp8, sets)]
    if resolve(spec, choice, device or local_device()).reads_fp8:
        in_fp8 = [(_in_fp8(spec, lhs), rhs, g) for lhs, rhs, g in sets]
        forms += [(" in", spec, in_fp8), (" in out", to_fp8, in_fp8)]
    return {
        f"{name}{form}": make(choice, spec_of_form, operands, device)
        for name, make in (("training", training), ("inference", inference))
        for form, spec_of_form, operands in forms
    }


def train_site(run: Callable, lhs: Array | Activations, rhs: Array, g: Array):
    """Returns the output of a function of lhs and rhs, and both gradients."""

    def from_arrays(x: Array, rhs: Array):
        rows = dataclasses.replace(lhs, y=x) if isinstance(lhs, Activations) else x
        out = run(rows, rhs)
        return (out.y, out.fp8) if isinstance(out, Activations) else (out, None)

    y, pull, y_fp8 = jax.vjp(from_arrays, _high_precision(lhs), rhs, has_aux=True)
    gradients = pull(g)
    return (y, gradients) if y_fp8 is None else (y, gradients, y_fp8)


def scaling_state(recipe: Recipe, amaxes: Float[Array, "3"]) -> DelayedScaling | None:
    """Returns the state of a site after a step with these amaxes of lhs, rhs and g."""
    if not recipe.is_delayed:
        return None
    return scaling.update_delayed(scaling.init_delayed(recipe), amaxes, recipe)


def operand_amaxes(operands: tuple[Array, Array, Array]) -> Float[Array, "3"]:
    """Returns the amaxes of lhs, rhs and g."""
    return jnp.stack([fp8.amax(x) for x in operands])


def num_rotated(spec: SiteSpec) -> int:
    """Returns the number of operand sets whose rotation keeps them out of the L2."""
    num_bytes = 2 * spec.m * (spec.k + spec.n)
    return min(max(2, round(_ROTATED_BYTES / num_bytes + 0.5)), _MAX_SETS)


def as_read(drawn: Drawn) -> tuple[Array, Array, Array]:
    """Returns operands in the dtypes in which a site reads them."""
    lhs, rhs, g = drawn
    return lhs.astype(jnp.bfloat16), rhs, g.astype(jnp.bfloat16)


def _in_fp8(spec: SiteSpec, lhs: Array | Activations) -> Activations:
    """Returns rows in the form in which the previous site hands them on."""
    lhs = _high_precision(lhs)
    if spec.fp8_out == "rowwise":
        return Activations(lhs, fp8.quantize(lhs, E4M3, axes=(1,)))
    scale_inv = fp8.compute_scale_inv(fp8.amax(lhs), E4M3)
    return Activations(lhs, fp8.cast(lhs, scale_inv, E4M3))


def _high_precision(lhs: Array | Activations) -> Array:
    return lhs.y if isinstance(lhs, Activations) else lhs
