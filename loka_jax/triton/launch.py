"""Where Triton kernels can run, and how all of them are launched.

jax-triton has no interpreter and no rules for derivatives or batching: the kernels
serve inside a `custom_vjp`, on a GPU, and a twin in plain JAX must stand beside each.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax

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
    """
    import jax_triton  # pyright: ignore[reportMissingImports]  # an optional extra

    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=tuple(outputs),
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
