"""Launch of the Triton kernels, and the conditions under which they run.

jax-triton has no interpreter and no rules for derivatives or batching: call the kernels
inside a `custom_vjp`, on a GPU, and write each operation in plain JAX as well.
"""

import contextlib
import contextvars
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax

from loka_jax import checked

# The providers of an operation that has a kernel here.
Implementation = Literal["xla", "triton"]

# Kernels are compiled for Hopper on any machine, so that programs can be lowered
# without a GPU.
_COMPUTE_CAPABILITY = 90

_NOT_INSTALLED = "is not installed: pip install 'loka-jax[triton]'"


# What `left_out` yields; None outside of it.
_left_out: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "left_out", default=None
)


@contextlib.contextmanager
def left_out() -> Iterator[list[str]]:
    """Leaves operations that may choose a provider to XLA while they are traced.

    Yields:
        a list, which grows by an entry for each one that a kernel serves.
    """
    token = _left_out.set(entries := [])
    try:
        yield entries
    finally:
        _left_out.reset(token)


def is_left_out() -> bool:
    """Returns True while operations are left to XLA."""
    return _left_out.get() is not None


def why_not_here() -> str | None:
    """Returns why no kernel of this provider runs on this machine, or None."""
    missing = why_not_installed()
    if missing is not None:
        return missing
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        return f"no Hopper GPU: the device is {device.device_kind!r}"
    return None


def chosen(
    implementation: Implementation | None,
    why_not: str | None,
    family: str,
    *families: str,
) -> Implementation:
    """Returns the provider of an operation: the requested one, else Triton if it can.

    Args:
        family, families: of the kernels that would run, see `measure.families`. If the
            check of one fails on this device, none does.

    Raises:
        ValueError: if there is no such provider, or Triton was requested and cannot
            run.
    """
    if implementation is None:
        if (entries := _left_out.get()) is not None:
            entries += [] if why_not else ["triton"]
            return "xla"
        if why_not or why_not_here() or checked.why_wrong(family, *families):
            return "xla"
        return "triton"
    if implementation not in get_args(Implementation):
        raise ValueError(f"{implementation=} must be 'xla', 'triton' or None.")
    if implementation == "xla":
        return implementation
    reason = why_not or why_not_installed() or checked.why_wrong(family, *families)
    if reason is not None:
        raise ValueError(f"{implementation=} cannot run: {reason}.")
    return implementation


def require_triton() -> None:
    """Raises an ImportError with the remedy if the extra `triton` is missing."""
    missing = why_not_installed()
    if missing is not None:
        raise ImportError(missing)


def launch(
    kernel: Any,
    *arrays: jax.Array | int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    num_warps: int,
    num_stages: int,
    constants: dict[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Returns the outputs of `kernel`, compiled for Hopper.

    Args:
        kernel: a function compiled by `triton.jit`. Its parameters are pointers to
            `arrays`, pointers to the outputs, and the constants by name.
        arrays: the inputs; integers are passed by value.
        constants: compile-time constants. Sizes belong here: Triton vectorizes loads
            only where it can prove that sizes are multiples of 16.
        aliases: index of an input written in place -> index of its output.
    """
    from loka_jax.triton import typed_call

    return typed_call.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=tuple(outputs),
        input_output_aliases=dict(aliases or {}),
        grid=(grid,),
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=_COMPUTE_CAPABILITY,
        **constants,
    )


def power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def why_not_installed() -> str | None:
    """Returns the name of a missing package with the remedy, or None."""
    for package, name in (("jax_triton", "jax-triton"), ("triton", "triton")):
        if importlib.util.find_spec(package) is None:
            return f"{name} {_NOT_INSTALLED}"
    return None
