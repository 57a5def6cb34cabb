"""TWEO's loss term: how large the outputs of a model's blocks are.

    penalty = mean over blocks of  mean((|A| / 3)^4)       A: what a block returns

A block is a module of modules within the model: a layer, its attention, an MLP; a dense
layer with its norm is none. Its arrays of fewer columns than FP8 products read, such as
logits, do not count. Nothing is computed unless it is asked for.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.fp8 import SIZE_MULTIPLE
from loka_jax.nn.context import current, site_context

BLOCKS = "blocks"  # the collection of penalties, one of each call of a block
_SIZE, _POWER = 3.0, 4
_CONTAINERS = tuple, list, dict  # not what derives from them, such as weights of groups


@contextlib.contextmanager
def seeing_blocks() -> Iterator[None]:
    """Lets the blocks of a model leave their penalties, see `penalty`.

    To be entered around its `apply` with `mutable=[BLOCKS]`.

    References:
        TWEO, arXiv 2511.23225.
    """
    with site_context(sees_blocks=True), linen.intercept_methods(_leave_penalty):
        yield


def sees_blocks() -> bool:
    """Returns whether blocks that are called here leave their penalties."""
    return current().sees_blocks


def penalty(blocks: Any) -> Float[Array, ""]:
    """Returns the mean of the penalties in a collection BLOCKS.

    Raises:
        ValueError: if there is none.
    """
    leaves = jax.tree.leaves(blocks)
    if not leaves:
        raise ValueError(
            "the model has no blocks, modules of other modules, whose outputs "
            "--optim.tweo could keep small: leave it out."
        )
    return jnp.mean(jnp.concatenate([x.reshape(-1) for x in leaves]))


def penalties_of(output: Any) -> list[Float[Array, ""]]:
    """Returns the penalty of each array that a block returns."""
    leaves = jax.tree.leaves(output, is_leaf=lambda x: type(x) not in _CONTAINERS)
    return [
        jnp.mean((jnp.abs(x.astype(jnp.float32)) / _SIZE) ** _POWER)
        for x in leaves
        if _is_wide(x)
    ]


def _is_wide(x: Any) -> bool:
    if not isinstance(x, jax.Array) or x.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    return x.ndim > 1 and x.size > 0 and x.shape[-1] >= SIZE_MULTIPLE


def _leave_penalty(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    output, module = call(*args, **kwargs), context.module
    if context.method_name != "__call__" or not _is_block(module):
        return output
    for found in penalties_of(output):
        if not module.sow(BLOCKS, "penalty", found):
            raise ValueError(
                f"--optim.tweo cannot see what {'/'.join(module.path)} returns: let "
                f"the nn.scan or nn.vmap around it have variable_axes="
                f"{{{BLOCKS!r}: 0}}."
            )
    return output


def _is_block(module: linen.Module) -> bool:
    if module.scope is None or not module.path:
        return False
    own = module.variables.get("params", {})
    has_modules = any(isinstance(x, Mapping) for x in own.values())
    return has_modules and "kernel" not in own
