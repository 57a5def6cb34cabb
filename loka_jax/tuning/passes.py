"""The passes of a site that are timed, as functions of arrays with their arguments.

training    forward and backward
inference   forward, its weight made ready once (`loka_jax.serving`)

Each alone, and as part of a row of sites: lhs comes in FP8 (" in"), what the site makes
goes out in FP8 (" out"), or both.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import fp8
from loka_jax.dispatch.candidates import SiteKey
from loka_jax.dispatch.chains import hands_on
from loka_jax.fp8 import E4M3
from loka_jax.nn import Activations
from loka_jax.ops.plan import Out, hand_over
from loka_jax.probe.timing import Case
from loka_jax.recipe import get_recipe
from loka_jax.serving import fold
from loka_jax.site import Choice
from loka_jax.survey.candidates import scaling_state
from loka_jax.survey.times import operand_amaxes, run_site, train_site

# lhs and g in bfloat16, rhs in float32; lhs in FP8 too where a site hands it on.
type Operands = tuple[Array | Activations, Array, Array]

_FLOAT32 = Choice("xla", get_recipe("f32"))


def training(
    choice: Choice, site: SiteKey, sets: Sequence[Operands], out: Out = "compute"
) -> Case:
    """Returns the pass from (lhs, rhs, g) to y and the gradients of lhs and rhs."""
    run = _site(choice, site, sets[0], out)
    return Case(functools.partial(train_site, run), sets)


def inference(
    choice: Choice, site: SiteKey, sets: Sequence[Operands], out: Out = "compute"
) -> Case:
    """Returns the pass from lhs, with the first set's rhs, to y.

    In a row of inferences nobody reads the wide form, and it is not made.
    """
    run = _site(choice, site, sets[0], out)

    def infer(rhs, lhs):
        y = run(lhs, rhs)
        return y.fp8 if isinstance(y, Activations) else y

    lhs, rhs, _ = sets[0]
    folded = fold(infer, rhs, lhs)
    return Case(folded.function, [(folded.ready, lhs) for lhs, _, _ in sets])


def exact(site: SiteKey, operands: Operands) -> tuple[Callable, tuple]:
    """Returns training in float32 by XLA, and its arguments."""
    lhs, rhs, g = operands
    operands = (_wide(lhs).astype(jnp.float32), rhs, g.astype(jnp.float32))
    return training(_FLOAT32, site, [operands]).function, operands


def in_rows(choice: Choice, site: SiteKey, sets: Sequence[Operands]) -> dict[str, Case]:
    """Returns the passes as parts of a row, by what a table calls them."""
    forms: list[tuple[str, Sequence[Operands], Out]] = [(" out", sets, "fp8")]
    if hands_on(choice, choice):
        handed = [(_hand_over(site, lhs), rhs, g) for lhs, rhs, g in sets]
        forms.append((" in", handed, "compute"))
        forms.append((" in out", handed, "fp8"))
    return {
        f"{what}{form}": make(choice, site, of_form, out)
        for what, make in (("training", training), ("inference", inference))
        for form, of_form, out in forms
    }


def _site(choice: Choice, site: SiteKey, operands: Operands, out: Out) -> Callable:
    recipe, state = choice.recipe, None
    lhs, rhs, g = operands
    if recipe.is_delayed:
        state = scaling_state(recipe, operand_amaxes((_wide(lhs), rhs, g)))
        recipe = (
            choice.with_initialized_scales().recipe
        )  # as all steps but the first are
    return functools.partial(run_site, site, recipe, state, choice.provider, out=out)


def _hand_over(site: SiteKey, lhs: Array | Activations) -> Activations:
    """Returns rows as a site before this one hands them on."""
    lhs = _wide(lhs)
    if hand_over(site.norm) == "rowwise":
        return Activations(lhs, fp8.quantize(lhs, E4M3, axes=(1,)))
    scale_inv = fp8.compute_scale_inv(fp8.amax(lhs), E4M3)
    return Activations(lhs, fp8.cast(lhs, scale_inv, E4M3))


def _wide(lhs: Array | Activations) -> Array:
    return lhs.y if isinstance(lhs, Activations) else lhs
