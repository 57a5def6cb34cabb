"""The tails of `loka_jax.tails` by Triton, each in one pass over its matrices.

A program reads tiles of block_m rows by block_n columns of each operand, computes in
float32, and writes every form of the result: also its FP8 transpose, which passes
through shared memory. Matrices may have any size. Operands may be padded, and results
are written with zeros past their end: padding costs no pass of its own. Loads and
stores take 16 bytes at a time where columns are multiples of 16.

Columns that share a statistic of a norm are in one tile where that holds them. Else a
kernel before reads the rows for their statistics.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    NO_VECTORS,
    Epilogue,
    NormVectors,
    norm_features,
    xhat_scale_inv,
)
from loka_jax.tails import (
    CrossTail,
    Dropout,
    Forms,
    NormTailGradients,
    Outer,
    Scaled,
    TailResiduals,
    Written,
)
from loka_jax.triton.launch import power_of_two, require_triton
from loka_jax.triton.trees import launch_tree, static

_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
_MIN_COLUMNS = 16


class Tile(NamedTuple):
    """The tunable parameters of a tail: rows, columns (powers of two), and warps."""

    block_m: int
    block_n: int
    num_warps: int

    def counts(self, m: int, n: int) -> tuple[int, int]:
        """Returns how many tiles cover the rows and the columns of a matrix."""
        return math.ceil(m / self.block_m), math.ceil(n / self.block_n)


# The fastest of a cross layer, and where its last tiles would not be full.
CROSS, CROSS_NARROW = Tile(64, 128, 4), Tile(64, 64, 4)
GRADIENT, GRADIENT_NARROW = Tile(32, 128, 4), Tile(32, 64, 2)
# The fastest on an H200 at 65,536 x 3,456, either way with a norm, of a cast without.
BLOCK, NO_NORM = Tile(32, 256, 8), Tile(64, 128, 4)
# Of whole rows, and of the kernel that computes their statistics: the fastest on an
# H200 at 8,192 x 3,072.
ROWS, STATISTICS = Tile(64, 64, 4), {"layer": Tile(4, 256, 4), "rms": Tile(8, 256, 4)}


def why_not(m: int, n: int, *operands: Scaled | Array | None) -> str | None:
    """Returns why (m, n) matrices are not served, or None if they are."""
    for name, size in (("m", m), ("n", n)):
        if size <= 0:
            return f"{name}={size} is not positive"
    for operand in operands:
        data = operand.data if isinstance(operand, Scaled) else operand
        if data is not None and data.dtype.name not in _DTYPES:
            return f"{data.dtype.name} is none of {', '.join(_DTYPES)}"
    return None


def norm_tail(
    summands: Sequence[Scaled],
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    epilogue: Epilogue,
    want: Forms,
    xhat: DTypeLike | None = E4M3,
    tile: Tile | None = None,
) -> tuple[Written, TailResiduals | None]:
    """Returns what `xla.norm_tail` does; arguments are as there.

    Raises:
        ValueError: if these operands are not served (see `why_not`), or gamma or beta
            are given to a norm without them.
        ImportError: if jax-triton is not installed.
    """
    run = _Run.of("norm_tail", summands[0].data, want, *summands)
    is_kept, is_norm = xhat is not None, epilogue.norm != "none"
    dtype = jnp.bfloat16 if xhat is None or not is_norm else xhat
    of = _norm_constants(epilogue, run.n, vectors, dtype)
    blocks = -(-run.n // of["features"])
    rstd_shape = (blocks, run.m) if blocks > 1 else (run.m,)
    from loka_jax.triton import norm_tail_kernel  # not above: it imports Triton

    tile = _tile(tile, epilogue, run.n)
    given: dict[str, Any] = dict(summands=tuple(summands), vectors=vectors)
    given |= dict(dropout=dropout, scale_inv=want.scale_inv, mean=None, rate=None)
    if is_apart := _is_apart(epilogue, run.n, tile):
        moments = norm_tail_kernel.norm_moments_kernel
        given |= run.of_rows(moments, given, "mean", "rate", **of)
    has_rstd = is_kept and is_norm and not is_apart
    keeps_product = is_kept and epilogue.keeps_product(len(summands))
    has_xhat = is_kept and (is_norm or not keeps_product)
    out = dict(
        y=run.types(tile),
        xhat=_type(run.out_shape, dtype) if has_xhat else None,
        rstd=_type(rstd_shape) if has_rstd else None,
    )
    out = run(norm_tail_kernel.norm_tail_kernel, tile, given, out, **of)
    rstd = given["rate"] if is_apart else out.rstd
    if not is_kept:
        return run.written(out.y), None
    product = summands[0] if keeps_product else None
    factor = summands[1] if epilogue.multiplies else None
    return run.written(out.y), TailResiduals(out.xhat, rstd, product, factor)


def norm_tail_backward(
    gradients: Sequence[Scaled],
    residuals: TailResiduals,
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    epilogue: Epilogue,
    want: Forms,
    tile: Tile | None = None,
) -> NormTailGradients:
    """Returns what `xla.norm_tail_backward` does; arguments are as there.

    Deterministic. Raises what `norm_tail` does.
    """
    xhat, rstd, product, factor = residuals
    operands = (*gradients, xhat, product, factor)
    run = _Run.of("norm_tail_backward", gradients[0].data, want, *operands)
    dtype = jnp.bfloat16 if xhat is None else xhat.dtype
    of = _norm_constants(epilogue, run.n, vectors, dtype)
    tile = _tile(tile, epilogue, run.n)
    programs, _ = tile.counts(run.m, 1)
    from loka_jax.triton import norm_tail_kernel

    sums = jax.tree.map(lambda _: _type((programs, run.n)), vectors)
    given = dict(gradients=tuple(gradients), xhat=xhat, rstd=rstd, vectors=vectors)
    given |= dict(dropout=dropout, scale_inv=want.scale_inv, centre=None, along=None)
    given |= dict(product=product, factor=factor)
    if _is_apart(epilogue, run.n, tile):
        projections = norm_tail_kernel.norm_projections_kernel
        given |= run.of_rows(projections, given, "centre", "along", **of)
    kernel = norm_tail_kernel.norm_tail_backward_kernel
    has_residual = epilogue.order in ("act_sum_norm", "norm_act_mul")
    residual = _type(run.out_shape, jnp.bfloat16) if has_residual else None
    out = dict(dz=run.types(tile), sums=sums, residual=residual)
    out = run(kernel, tile, given, out, **of)
    of_vectors = jax.tree.map(lambda parts: jnp.sum(parts, axis=0), out.sums)
    return NormTailGradients(run.written(out.dz), of_vectors, out.residual)


def cross_tail(
    summands: Sequence[Scaled | Outer],
    x0: Scaled,
    bias: Float[Array, "n"] | None = None,
    head: Float[Array, "n"] | None = None,
    *,
    want: Forms,
    has_row_sum: bool = False,
    tile: Tile | None = None,
) -> CrossTail:
    """Returns what `xla.cross_tail` does; arguments are as there.

    Deterministic. Raises what `norm_tail` does.
    """
    outer, products = _apart(summands)
    run = _Run.of("cross_tail", x0.data, want, *products, x0)
    is_narrow = has_row_sum or run.n % CROSS.block_n
    tile = tile or (CROSS_NARROW if is_narrow else CROSS)
    tiles_m, tiles_n = tile.counts(run.m, run.n)
    from loka_jax.triton import cross_tail_kernel

    given = dict(outer=outer, summands=products, x0=x0, bias=bias, head=head)
    out = run(
        cross_tail_kernel.cross_tail_kernel,
        tile,
        given | dict(scale_inv=want.scale_inv),
        dict(
            y=run.types(tile),
            row_sums=_type((tiles_m, run.n)) if has_row_sum else None,
            dots=None if head is None else _type((tiles_n, run.m)),
        ),
    )
    return CrossTail(
        y=run.written(out.y),
        row_sum=jnp.sum(out.row_sums, axis=0) if has_row_sum else None,
        dots=None if head is None else jnp.sum(out.dots, axis=0),
    )


def cross_gradient(
    gradients: Sequence[Sequence[Scaled | Outer]],
    products: Sequence[Scaled],
    biases: Sequence[Float[Array, "n"] | None],
    x0: Scaled | None = None,
    *,
    parts: Sequence[jax.ShapeDtypeStruct],
    shape: tuple[int, int],
    tile: Tile | None = None,
) -> tuple[tuple[Float[Array, "m _"], ...], Float[Array, "n"] | None]:
    """Returns what `xla.cross_gradient` does; arguments are as there.

    It reads the products of both passes as they left cuBLASLt, and writes each part of
    x0 its own gradient, one or two: columns past them are not written. Deterministic.
    Raises what `norm_tail` does.
    """
    outer, last = _apart(gradients[-1])
    assert (outer is None) == (x0 is None)
    given = (*(tuple(d) for d in gradients[:-1]), last)
    flat = itertools.chain(*given, products, [x0])
    run = _Run.of("cross_gradient", products[0].data, Forms(shape=shape), *flat)
    tile = tile or (GRADIENT_NARROW if run.n % GRADIENT.block_n else GRADIENT)
    tiles_m, _ = tile.counts(run.m, 1)
    from loka_jax.triton import cross_tail_kernel

    operands = dict(gradients=given, products=tuple(products), biases=tuple(biases))
    out = run(
        cross_tail_kernel.cross_gradient_kernel,
        tile,
        operands | dict(outer=outer, x0=x0),
        dict(
            head_sums=None if outer is None else _type((tiles_m, run.n)),
            parts=tuple(parts),
        ),
    )
    head = None if outer is None else jnp.sum(out.head_sums, axis=0)
    return out.parts, head


def joined_cast(
    *parts: Float[Array, "m _"], want: Forms, tile: Tile | None = None
) -> Written:
    """Returns the columns of all parts, then zeros, in the requested forms.

    As `xla.joined_cast`. The features of a cross network are a vector of the embeddings
    and the dense features. Its products and its tails read them as they are written
    here, so that nothing has to be concatenated. Raises what `norm_tail` does.
    """
    *starts, n = itertools.accumulate((x.shape[1] for x in parts), initial=0)
    want = dataclasses.replace(want, shape=want.shape or (len(parts[0]), n))
    run = _Run.of("joined_cast", parts[0], want, *parts)
    tile = tile or (CROSS_NARROW if run.n % CROSS.block_n else CROSS)
    from loka_jax.triton import cross_tail_kernel

    given = dict(parts=parts, scale_inv=want.scale_inv)
    kernel, out = cross_tail_kernel.joined_cast_kernel, run.types(tile)
    return run.written(run(kernel, tile, given, out, starts=tuple(starts)))


class _Run(NamedTuple):
    """A launch: rows and columns of the matrix that is written, and its forms."""

    m: int
    n: int
    want: Forms

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.want.written_shape((self.m, self.n))

    @classmethod
    def of(cls, name: str, like: Array, want: Forms, *operands: Any) -> "_Run":
        """Returns the launch of a matrix that is computed from one like this.

        Raises:
            ValueError: with the reason, if operands are not served.
            ImportError: with the remedy, if Triton is not installed.
        """
        shape = want.shape_of(like)
        if reason := why_not(*shape, *operands):
            raise ValueError(f"{name}: {reason}.")
        require_triton()
        return cls(*shape, want)

    def types(self, tile: Tile) -> Written:
        """Returns the types of the matrix in all its forms."""
        (m, n), want = self.out_shape, self.want
        fp8 = jnp.bfloat16 if want.fp8 is None else want.fp8
        forms: dict[str, Any] = dict(
            bf16=_type((m, n), jnp.bfloat16) if want.bf16 else None,
            fp8=_type((m, n), fp8) if want.fp8 is not None else None,
            fp8_t=_type((n, m), fp8) if want.transposed else None,
            amaxes=_type((math.prod(tile.counts(m, n)),)) if want.amax else None,
        )
        return Written(**forms)

    def written(self, y: Written) -> Written:
        """Returns a result with the scale of its FP8 forms."""
        assert (y.fp8 is None) == (self.want.scale_inv is None)
        return y._replace(scale_inv=self.want.scale_inv)

    def of_rows(self, kernel: Any, given: dict, *names: str, **of: Any) -> dict:
        """Returns statistics of whole rows by name, each of shape (m,)."""
        tile = STATISTICS[of["norm"]]
        out = {name: _type((self.m,)) for name in names}
        grid, _ = tile.counts(self.m, 1)
        return self(kernel, tile, given, out, grid, **of)._asdict()

    def __call__(
        self, kernel: Any, tile: Tile, given: dict, out: Any, grid: int = 0, **of: Any
    ):
        """Returns the results of a kernel, in the structure of `out`.

        A program writes a tile of the matrix unless their number is given.
        """
        out_m, out_n = self.out_shape
        constants = static(
            **dict(m=self.m, n=self.n, out_m=out_m, out_n=out_n),
            **dict(block_m=tile.block_m, block_n=tile.block_n),
            **of,
        )
        out = static(**out) if isinstance(out, dict) else out
        grid = grid or math.prod(tile.counts(*self.out_shape))
        sizes = dict(grid=grid, num_warps=tile.num_warps)
        return launch_tree(kernel, static(**given), out, constants, **sizes)


def _type(shape: tuple[int, ...], dtype: DTypeLike = jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _apart(
    summands: Sequence[Scaled | Outer],
) -> tuple[Outer | None, tuple[Scaled, ...]]:
    """Returns the outer product among summands, if there is one, and the others."""
    outer = next((x for x in summands if isinstance(x, Outer)), None)
    return outer, tuple(x for x in summands if isinstance(x, Scaled))


def _norm_constants(
    epilogue: Epilogue, n: int, vectors: NormVectors, xhat: DTypeLike
) -> dict[str, Any]:
    """Returns the constants of an epilogue; xhat is kept in a dtype."""
    norm, is_fp8 = epilogue.norm, jnp.dtype(xhat) == jnp.dtype(E4M3)
    if norm in ("none", "block") and (vectors.gamma, vectors.beta) != (None, None):
        raise ValueError(f"norm {norm!r} takes neither gamma nor beta.")
    return dict(
        **dataclasses.asdict(epilogue),
        acts_first=epilogue.acts_first,
        features=norm_features(norm, n),
        xhat_scale=1 / xhat_scale_inv(norm, n) if is_fp8 else 1.0,
    )


def _tile(tile: Tile | None, epilogue: Epilogue, n: int) -> Tile:
    """Returns the tile of a launch, the fastest that is known if none is given."""
    norm = epilogue.norm
    columns = max(power_of_two(norm_features(norm, n)), _MIN_COLUMNS)
    if tile is not None:
        if norm == "block" and tile.block_n != columns:
            raise ValueError(f"{tile} has {tile.block_n} columns, a block {columns}.")
        return tile
    if norm in ("layer", "rms") and columns <= BLOCK.block_n:
        return BLOCK._replace(block_n=columns)
    tile = {"none": NO_NORM, "block": BLOCK}.get(norm, ROWS)
    return tile._replace(block_n=min(columns, tile.block_n))


def _is_apart(epilogue: Epilogue, n: int, tile: Tile) -> bool:
    """Returns True if a tile does not hold the columns that share a statistic."""
    norm = epilogue.norm
    return norm != "none" and norm_features(norm, n) > tile.block_n
