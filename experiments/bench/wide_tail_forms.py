"""The ways to run tails of wide products that `wide_tail.py` times: XLA's and Triton's.

All read the same operands: products in bfloat16 whose two scales were not applied, or,
where it says so, z and x0 in FP8.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import fp8, triton, xla
from loka_jax.fp8 import E4M3
from loka_jax.measure.compiling import NO_CAPTURE
from loka_jax.normed import Epilogue, NormName
from loka_jax.tails import Forms, Scale, Scaled
from loka_jax.triton import cross_tail as triton_cross
from loka_jax.triton import joined_cast as triton_joined
from loka_jax.triton import norm_tail as triton_norm
from loka_jax.triton.tail import TuningConfig

_BF16 = Forms()
_FP8 = Forms(fp8=E4M3)
_BOTH = Forms(fp8=E4M3, transposed=True)
_ALL = Forms(fp8=E4M3, transposed=True, amax=True)
_HANDED = Forms(bf16=False, fp8=E4M3, transposed=True)  # under a bound: no amax
_HANDED_ONCE = Forms(bf16=False, fp8=E4M3)
_MEASURED = Forms(bf16=False, fp8=E4M3, transposed=True, amax=True)
_FIRST = 128  # columns of the first of two arrays to be joined
_EPILOGUE = Epilogue("block", "hard_swish")
_NO_NORM = Epilogue("none")
_ROWS = Epilogue("rms")
_ROW_CONFIGS = (
    triton_norm.ROW_DEFAULT,
    triton_norm.PLAIN_ROWS_TRANSPOSED,
    triton_norm.PLAIN_ROWS,
    TuningConfig(64, 256, 8),
    TuningConfig(8, 2048, 8),
)

_SUMMANDS = (1, 2, 3)
_CROSS = ("zs", "x0", "bias", "scale_inv")
_CROSS_FP8 = [(f"z8 {i}", "x08", "bias", "scale_inv") for i in _SUMMANDS]
_BACK = ("ds", "x0", "scale_inv")
_BACK_FP8 = [(f"d8 {i}", "x08", "scale_inv") for i in _SUMMANDS]
_JOIN = ("first", "second", "scale_inv")
_NORM = ("z", "none", "scale_inv")
_NORM_R = ("z", "r", "scale_inv")
_NORM_BACK = ("d", "none", "residuals", "scale_inv")
_ROWS_BACK = ("d", "none", "residuals of rows", "scale_inv")


class Form(NamedTuple):
    """One way to run a tail or a product.

    Attributes:
        name: in the result.
        run: from the operands to the results; fit for `jax.jit`.
        reads: names of the operands.
        kernel: what Triton's forms with several configs have in common.
        config: of a Triton kernel.
        reference: XLA's form with the same results; None if it is not checked.
        why_not: why it does not run here, or None if it does.
        options: of the compiler.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    kernel: str = ""
    config: TuningConfig | None = None
    reference: Callable[..., Any] | None = None
    why_not: str | None = None
    options: tuple[tuple[str, Any], ...] = tuple(NO_CAPTURE.items())

    def arguments(self, operands: dict[str, Any]) -> tuple:
        """Returns the operands that it reads."""
        return tuple(operands[name] for name in self.reads)


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_operands(m: int, n: int) -> dict[str, Any]:
    """Returns random operands of all forms."""
    # The generator that is quick on a GPU.
    keys = iter(jax.random.split(jax.random.key(m + 7 * n, impl="rbg"), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    half = Scale.of(jnp.asarray(0.5, jnp.float32))
    operands: dict[str, Any] = {
        name: Scaled(4 * normal(m, n), (half, half)) for name in ("z", "d")
    }
    operands |= {name: normal(m, n) for name in ("x0", "r")}
    x0 = operands["x0"]
    x08 = fp8.quantize(x0)
    operands |= {"zs": [operands["z"]], "ds": [operands["d"]]}
    for name in ("z8", "d8"):
        summands = []
        for i in _SUMMANDS:
            x = fp8.quantize(normal(m, n))
            summands.append(Scaled(x.data, (Scale.of(x.scale_inv), half)))
            operands[f"{name} {i}"] = [*summands]
    z = Scaled(normal(m, n))
    kept = xla.norm_tail(z, epilogue=_EPILOGUE, want=_BF16)
    kept_rows = xla.norm_tail(z, epilogue=_ROWS, want=_BF16)
    return operands | {
        "x0": Scaled(x0),
        "x08": Scaled(x08.data, (Scale.of(x08.scale_inv),)),
        "first": x0[:, :_FIRST],
        "second": x0[:, _FIRST:],
        "bias": jax.random.normal(next(keys), (n,)),
        "residuals": kept.residuals,
        "residuals of rows": kept_rows.residuals,
        "scale_inv": Scale.of(jnp.asarray(2.0**-5, jnp.float32)),
        "none": None,
    }


def xla_forms() -> list[Form]:
    """Returns XLA's forms, with more and more results."""

    def form(name, operation, want, reads):
        return Form(f"xla {name}", functools.partial(operation, xla, want), reads)

    return [
        form("cross: bf16", _cross, _BF16, _CROSS),
        form("cross: fp8, fp8^T, amax", _cross, _MEASURED, _CROSS),
        *(form(f"{x[0]} of cross: bf16", _cross, _BF16, x) for x in _CROSS_FP8),
        form("cross back: bf16", _back, _BF16, _BACK),
        *(form(f"{x[0]} of cross back: bf16", _back, _BF16, x) for x in _BACK_FP8),
        form("join: fp8, fp8^T, amax", _join, _MEASURED, _JOIN),
        form("norm: bf16", _norm, _BF16, _NORM),
        form("norm: fp8, fp8^T", _norm, _HANDED, _NORM),
        form("norm of residual: fp8, fp8^T", _norm, _HANDED, _NORM_R),
        form("norm back: bf16", _norm_back, _BF16, _NORM_BACK),
        form("norm back: fp8, fp8^T", _norm_back, _HANDED, _NORM_BACK),
        form("norm back: fp8, fp8^T, amax", _norm_back, _MEASURED, _NORM_BACK),
        form("norm of rows: fp8, fp8^T", _rows, _HANDED, _NORM),
        form("norm of rows back: bf16", _rows_back, _BF16, _ROWS_BACK),
        form("cast: fp8, fp8^T, amax", _cast, _MEASURED, ("z", "scale_inv")),
    ]


def triton_forms(m: int, n: int, tune: bool) -> list[Form]:
    """Returns Triton's kernels with all results, with every config or the default."""
    cross, back = triton_cross.DEFAULT, triton_cross.NARROW_DEFAULT
    norm, cast = triton_norm.DEFAULT, triton_norm.NO_NORM_DEFAULT
    kernels = (
        ("cross", _cross, _MEASURED, _CROSS, cross),
        *((f"{x[0]} of cross", _cross, _MEASURED, x, cross) for x in _CROSS_FP8),
        *((f"{x[0]} of cross back", _back, _MEASURED, x, back) for x in _BACK_FP8),
        ("join", _join, _MEASURED, _JOIN, triton_joined.DEFAULT),
        ("norm", _norm, _HANDED, _NORM, norm),
        ("norm back", _norm_back, _MEASURED, _NORM_BACK, norm),
        ("norm of rows", _rows, _HANDED, _NORM, triton_norm.PLAIN_ROWS_TRANSPOSED),
        ("norm of rows back", _rows_back, _BF16, _ROWS_BACK, triton_norm.PLAIN_ROWS),
        ("cast", _cast, _MEASURED, ("z", "scale_inv"), cast),
    )
    return [
        _triton(f"{name} {_text(config)}", operation, want, reads, (m, n), config, name)
        for name, operation, want, reads, default in kernels
        for config in (_configs(operation) if tune else (default,))
    ]


def triton_parts(m: int, n: int, best: dict[str, TuningConfig]) -> list[Form]:
    """Returns Triton's kernels with fewer results or operands, with these configs."""
    parts = (
        ("cross", ": bf16", _cross, _BF16, _CROSS),
        ("z8 3 of cross", ": fp8", _cross, _HANDED_ONCE, _CROSS_FP8[-1]),
        ("d8 3 of cross back", ": fp8, fp8^T", _back, _HANDED, _BACK_FP8[-1]),
        ("join", ": fp8", _join, _HANDED_ONCE, _JOIN),
        ("norm", " of residual", _norm, _HANDED, _NORM_R),
        ("norm back", ": fp8, fp8^T", _norm_back, _HANDED, _NORM_BACK),
    )
    return [
        _triton(f"{kernel}{rest}", operation, want, reads, (m, n), best[kernel])
        for kernel, rest, operation, want, reads in parts
        if kernel in best
    ]


def _triton(name, operation, want, reads, shape, config, kernel="") -> Form:
    run = functools.partial(operation, _Triton(config), want)
    why_not = triton.why_not_here() or triton_norm.why_not(
        *shape,
        norm=_norm_of(operation),
        config=config,
    )
    reference = _by_xla(operation, want)
    return Form(f"triton {name}", run, reads, kernel, config, reference, why_not)


@functools.cache  # one function, and so one compilation, for all configs
def _by_xla(operation: Callable[..., Any], want: Forms) -> Callable[..., Any]:
    return functools.partial(operation, xla, want)


def _configs(operation: Callable[..., Any]) -> tuple[TuningConfig, ...]:
    by_norm = {"block": triton_norm.CONFIGS, "rms": _ROW_CONFIGS}
    return by_norm.get(_norm_of(operation), triton_cross.CONFIGS)


def _norm_of(operation: Callable[..., Any]) -> NormName:
    if operation in (_norm, _norm_back):
        return "block"
    return "rms" if operation in (_rows, _rows_back) else "none"


class _Triton:
    """Triton's operations with a config; tails under the names of XLA's."""

    def __init__(self, config: TuningConfig):
        modules = {
            triton_cross: ("cross_tail",),
            triton_joined: ("joined_cast",),
            triton_norm: ("norm_tail", "norm_tail_backward"),
        }
        for module, names in modules.items():
            for name in names:
                run = functools.partial(getattr(module, name), config=config)
                setattr(self, name, run)


def _text(config: TuningConfig) -> str:
    return f"{config.block_m}x{config.block_n}, {config.num_warps} warps"


def _scale(want: Forms, scale_inv):
    return None if want.fp8 is None else scale_inv


def _cross(provider, want, zs, x0, bias, scale_inv):
    scale_inv = _scale(want, scale_inv)
    return provider.cross_tail(zs, x0, bias, want=want, y_scale_inv=scale_inv)


def _back(provider, want, ds, x0, scale_inv):
    options = dict(want=want, y_scale_inv=_scale(want, scale_inv), has_row_sum=True)
    return provider.cross_tail(ds, x0, **options)


def _join(provider, want, first, second, scale_inv):
    return provider.joined_cast(first, second, want=want, scale_inv=scale_inv)


def _norm(provider, want, z, r, scale_inv, epilogue=_EPILOGUE):
    scale_inv = _scale(want, scale_inv)
    return provider.norm_tail(z, r, epilogue=epilogue, want=want, y_scale_inv=scale_inv)


def _norm_back(provider, want, d, r, residuals, scale_inv, epilogue=_EPILOGUE):
    scale_inv = _scale(want, scale_inv)
    return provider.norm_tail_backward(
        d, r, residuals, epilogue=epilogue, want=want, dz_scale_inv=scale_inv
    )


def _rows(provider, want, z, r, scale_inv):
    return _norm(provider, want, z, r, scale_inv, epilogue=_ROWS)


def _rows_back(provider, want, d, r, residuals, scale_inv):
    return _norm_back(provider, want, d, r, residuals, scale_inv, epilogue=_ROWS)


def _cast(provider, want, z, scale_inv):
    return provider.norm_tail(
        z, epilogue=_NO_NORM, want=want, y_scale_inv=scale_inv, xhat=None
    )
