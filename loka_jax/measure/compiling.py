"""Compiles many small programs at a time, and keeps the errors of those that fail."""

import concurrent.futures
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import compat
from loka_jax.cache_folder import cache_folder

# Kernels of a command buffer are not profiled one by one.
NO_CAPTURE: dict[str, str] = {"xla_gpu_enable_command_buffer": ""}
# For programs that are not timed: leaves out the search for the fastest kernels, which
# is most of a compilation.
UNTUNED: dict[str, str] = {"xla_gpu_autotune_level": "0"}
_THREADS = 8
_KEPT_BYTES = 4 * 2**30  # of compiled programs, the newest


def untuned_here() -> dict[str, str | bool]:
    """Returns the options for a program that runs too few times to be tuned.

    Its products are cuBLAS's, which chooses kernels by heuristics. Triton's, in tiles
    that no search chose, were two thirds of the time of a look.
    """
    if jax.default_backend() != "gpu":
        return {}
    return {**UNTUNED, "xla_gpu_enable_triton_gemm": False}


class Lowered(NamedTuple):
    """What `jax.jit(...).lower` returned or raised, and options of the compiler."""

    program: Any
    options: Mapping[str, str]

    @property
    def is_tuned(self) -> bool:
        """True if the compiler runs kernels on the GPU, to find the fastest."""
        return not UNTUNED.items() <= self.options.items()

    def untuned(self) -> "Lowered":
        """Returns the program, to be compiled without a search for the fastest."""
        return self._replace(options={**self.options, **UNTUNED})


def compile_all(
    programs: Mapping[str, tuple[Callable[..., Any], tuple]],
    options: Mapping[str, str] = NO_CAPTURE,
) -> dict[str, Any]:
    """Returns compiled functions by name, or the exception where compilation failed.

    They take the leaves of their arguments, see `leaves`.
    """
    return compile_lowered(
        {
            name: lower(function, abstract(arguments), options)
            for name, (function, arguments) in programs.items()
        }
    )


def keep_compiled() -> None:
    """Has JAX keep programs for a GPU in the user's cache, and what it tuned them by.

    A folder that the user has named for them stays.
    """
    is_set = jax.config.jax_compilation_cache_dir is not None
    if is_set or jax.default_backend() != "gpu":
        return
    compat.name_kernels_alike()
    jax.config.update("jax_compilation_cache_max_size", _KEPT_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("programs")))


class Ahead:
    """A jitted function that can be compiled in a thread before it is called.

    Arguments of other types than those that it was compiled for are compiled when they
    come, as by `jax.jit`.
    """

    def __init__(self, function: Any):
        """Takes what `jax.jit` returned, or has such a call and `lower`."""
        self._function = function
        self._compiling: concurrent.futures.Future | None = None
        self._compiled: Any = None
        self.has_run = False

    @property
    def is_begun(self) -> bool:
        """True if it has run, or a job compiles it."""
        return self.has_run or self._compiling is not None

    def ahead(self, *arguments: Any) -> Callable[[], None]:
        """Returns a job that compiles the function, by the types of its arguments.

        The first call waits for the job, and raises what that has met. Arrays that are
        donated meanwhile keep their types.
        """
        return self._job(lambda: self.lower(*arguments).compile())

    def lowered(self, *arguments: Any) -> Callable[[], None]:
        """Returns a job that compiles the function, which this call has lowered."""
        try:
            return self._job(self.lower(*arguments).compile)
        except Exception as error:  # a kernel's compiler may raise any kind
            return self._job(functools.partial(_raise, error))

    def _job(self, compiled: Callable[[], Any]) -> Callable[[], None]:
        self._compiling = future = concurrent.futures.Future()

        def compile_it():
            try:
                future.set_result(compiled())
            except BaseException as error:  # a compiler may raise any kind
                future.set_exception(error)

        return compile_it

    def __call__(self, *arguments: Any) -> Any:
        """Returns the function's results."""
        if self._compiling is not None:
            self._compiled, self._compiling = self._compiling.result(), None
        try:
            out = (self._compiled or self._function)(*arguments)
        except TypeError:  # raised for other types, before it runs
            if self._compiled is None:
                raise
            out = self._function(*arguments)
        self.has_run = True
        return out

    def lower(self, *arguments: Any) -> Any:
        """Returns the function lowered for such arguments."""
        return self._function.lower(*arguments)


def _raise(error: Exception) -> None:
    raise error


class Abstract(NamedTuple):
    """A tuple of arguments as shapes, which `Fp8Array` refuses in place of arrays."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    structure: Any


def abstract(arguments: tuple) -> Abstract:
    """Returns arguments without their values."""
    flat, structure = jax.tree.flatten(arguments)
    shapes = (jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in flat)
    return Abstract(tuple(shapes), structure)


def evaluated(function: Callable[..., tuple], arguments: Abstract) -> Abstract:
    """Returns the results of a function, which are a tuple, without values."""
    structure: Any = None

    def run(*leaves):
        nonlocal structure
        results = function(*jax.tree.unflatten(arguments.structure, leaves))
        flat, structure = jax.tree.flatten(results)
        return flat

    flat = jax.eval_shape(run, *arguments.leaves)
    return Abstract(tuple(flat), structure)


def lower(
    function: Callable[..., Any],
    arguments: Abstract,
    options: Mapping[str, str] = NO_CAPTURE,
) -> Lowered:
    """Returns a lowered function of the leaves of its arguments; uses no GPU.

    Not to be called while this process compiles: a Mosaic kernel that was lowered
    beside a compilation has ended the process.
    """

    def run(*leaves):
        return function(*jax.tree.unflatten(arguments.structure, leaves))

    try:
        program = jax.jit(run).lower(*arguments.leaves)
    except Exception as error:  # a candidate may not run here
        program = error
    return Lowered(program, options)


def compile_lowered(lowered: Mapping[str, Lowered]) -> dict[str, Any]:
    """Returns compiled functions by name, or the exception where one failed."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        compiled = pool.map(_compiled, lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def leaves(arguments: tuple) -> tuple:
    """Returns the arrays in a function's arguments, as its compiled form takes them."""
    return tuple(jax.tree.leaves(arguments))


def _compiled(lowered: Lowered) -> Any:
    """Returns a compiled program, or the exception that it or its lowering raised."""
    program, options = lowered
    if isinstance(program, Exception):
        return program
    try:
        return program.compile(dict(options))
    except Exception as error:  # a candidate may not compile here
        return error
