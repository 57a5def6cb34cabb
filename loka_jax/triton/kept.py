"""What Triton made of kernels, kept in the user's cache from process to process.

jax-triton compiles every kernel anew in each process, a quarter of a second each; a
model has some ten to thirty. The key is all that the compiler reads: Triton's
intermediate form of the kernel with its sizes, the options and the versions.
"""

import dataclasses
import functools
import hashlib
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

from loka_jax import jsonfile
from loka_jax.cache_folder import cache_folder


@functools.cache
def keep() -> None:
    """Lets jax-triton find kernels that an earlier process compiled."""
    # An optional extra.
    from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

    make = triton_lib.compile_ttir_to_ptx_inplace
    of = functools.partial(_kept, make, triton_lib.CompilationResult)
    triton_lib.compile_ttir_to_ptx_inplace = of


def _kept(
    make: Callable[..., Any], result: type, module: Any, backend: Any, *rest: Any
) -> Any:
    """Returns what `make` returns, from the cache if it is there.

    Args:
        make: compiles a module for a backend and further arguments.
        result: the dataclass that it returns.
    """
    path = _path(str(module), rest)
    try:
        return jsonfile.typed(jsonfile.read(path), result)
    except (OSError, ValueError):
        pass  # not there, or damaged: it is made again
    made = make(module, backend, *rest)
    try:
        jsonfile.write(path, dataclasses.asdict(made))
    except OSError:
        pass  # no space: the next process makes it again
    return made


def _path(text: str, rest: tuple[Any, ...]) -> pathlib.Path:
    key = "\n".join([text, *map(repr, rest), *_versions()])
    digest = hashlib.sha256(key.encode()).hexdigest()
    return cache_folder("triton") / f"{digest[:32]}.json"


def _versions() -> list[str]:
    names = "triton", "jax_triton"
    return [importlib.import_module(name).__version__ for name in names]
