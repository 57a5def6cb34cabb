"""Where Triton kernels can run, and how all of them are launched.

jax-triton has no interpreter and no rules for derivatives or batching: the kernels
serve inside a `custom_vjp`, on a GPU, and a twin in plain JAX must stand beside each.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

# Who runs an operation that has a kernel here and a twin in plain JAX.
Implementation = Literal["xla", "triton"]

# Kernels are compiled for Hopper whatever machine lowers them, so that a program can
# be lowered, and its kernels compiled, where there is no GPU.
_COMPUTE_CAPABILITY = 90

_NOT_INSTALLED = "is not installed: pip install 'loka-jax[triton]'"


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
    implementation: Implementation | None, why_not: str | None
) -> Implementation:
    """Returns who runs an operation: what was asked for, or Triton where it can.

    Args:
        implementation: None leaves it to this function.
        why_not: why the kernel does not serve the operands, or None.

    Raises:
        ValueError: if Triton was asked for and cannot run.
    """
    if implementation is None:
        return "xla" if why_not or why_not_here() else "triton"
    reason = why_not or why_not_installed()
    if implementation == "triton" and reason is not None:
        raise ValueError(f"{implementation=} cannot run: {reason}.")
    return implementation


def require_triton() -> None:
    """Raises an ImportError that says what to install, if the extra is missing."""
    missing = why_not_installed()
    if missing is not None:
        raise ImportError(missing)


def launch(
    kernel: Any,
    *arrays: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    num_warps: int,
    num_stages: int,
    constants: dict[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Returns what `kernel` writes, compiled for Hopper.

    Args:
        kernel: a function compiled by `triton.jit`. Its parameters are pointers to
            `arrays`, pointers to the outputs, and the constants by name.
        arrays: the inputs.
        outputs: shapes and dtypes of what is written.
        grid: the number of programs.
        num_warps: warps of a program.
        num_stages: depth of the pipeline of loads in loops with products.
        constants: what is known when compiling. Sizes belong here: only of constants
            does Triton see that they are multiples of 16, and so widens loads.
        aliases: for an input that is written in place, the output that it becomes.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]  # an optional extra

    return jax_triton.triton_call(
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
    """Returns the least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def why_not_installed() -> str | None:
    """Returns which package is missing and the remedy, or None."""
    for package, name in (("jax_triton", "jax-triton"), ("triton", "triton")):
        if importlib.util.find_spec(package) is None:
            return f"{name} {_NOT_INSTALLED}"
    return None
