"""Can the module of a site keep delayed scales where it is called?

It cannot where a transformation of Flax around it hands parameters on but not the
scales, nor where another module calls it by an `apply` of its own.
"""

from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from loka_jax.recipe import Recipe

SCALES = "fp8_scaling"  # of the variable
_BOTH = f"'params', {OVERWRITE_WITH_GRADIENT!r}"


def check_place(module: Any, recipe: Recipe) -> None:
    """Refuses a site whose delayed scales have no place.

    Args:
        module: of the site; a `convert.Host` has a `module`.

    Raises:
        ValueError: naming the site and the remedies, first those in which the model
            stays as it is.
    """
    if module.has_variable(OVERWRITE_WITH_GRADIENT, SCALES):
        return
    path = "/".join(module.path)
    remedy = "take a recipe without a state, such as 'fp8_tensorwise'"
    inner = getattr(module, "module", module)
    if inner is not module:
        remedy = f"skip it, nn.convert(..., skip={path!r}), or {remedy}"
    if inner.path != module.path:
        raise ValueError(
            f"site {path!r} has no place for the delayed scales of its recipe "
            f"{recipe.name!r}, as its caller gives its variables to an `apply` of its "
            f"own: {remedy}."
        )
    lifted = module.is_initializing() and not module.is_mutable_collection(
        OVERWRITE_WITH_GRADIENT
    )
    if lifted:
        raise ValueError(
            f"site {path!r} has no place for the delayed scales of its recipe "
            f"{recipe.name!r}, as a transformation of Flax around it does not hand "
            f"{OVERWRITE_WITH_GRADIENT!r} on: {remedy}. Or name the collection as "
            "'params' is: in variable_axes of nn.scan or nn.vmap, {'params': 0, "
            f"{OVERWRITE_WITH_GRADIENT!r}: 0}}, if each step has parameters of its "
            "own (None for 0 if nn.vmap shares them), and in variable_broadcast="
            f"[{_BOTH}] of nn.scan or linen.RNN if all steps share them."
        )
