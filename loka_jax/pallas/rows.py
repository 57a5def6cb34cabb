"""How the kernels that work by rows cut matrices into tiles, and launch.

Rows lie in registers the way they lie in memory: 8 neighbouring columns a lane (4 where
a row is too narrow), and 8, 16 or 32 neighbouring lanes a row. So accesses are 16 bytes
a lane without gaps, and the sums of a row stay within a warp. Wide rows are folded: a
quarter for each warp of a warpgroup, seen as a row of its own until the sums are added.

Tiles of rows are cut into pieces of at most 256 columns, for TMA. Each warpgroup has
tiles of its own; `row_tiles` is its side.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from loka_jax.normed import NormName
from loka_jax.pallas import tiles

WARPS = 4  # of a warpgroup
MAX_COLUMNS = 4096  # a row of more does not fit in the registers
FOLD_MULTIPLE = 512  # of columns, for folded rows without gaps between lanes
EXCHANGES = 3  # of a tile's folded rows: up to two sums, then the largest magnitude
_MULTIPLE = 128  # of columns, for rows in one warp without gaps
_SMEM_RESERVE = 3 * 1024  # for barriers and exchanges, and starts at multiples of 1 KiB


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        lanes: lanes that share a row: 8, 16, 32, or 128 (folded over all warps of a
            warpgroup, for multiples of 512 columns, not for block norms).
        rows: rows of a tile that each lane has a part of.
        stages: tiles in the ring in shared memory; 0 loads from global memory.
        warpgroups: to a CTA, each with tiles and a ring of its own. The more there are
            the fewer registers the compiler gives each. There is one CTA to an SM.
        resident: keep the parameters of columns in registers over all tiles of a CTA.
    """

    lanes: int = 32
    rows: int = 1
    stages: int = 3
    warpgroups: int = 4
    resident: bool = True


def why_not(m: int, n: int, *, widest_unfolded: int) -> str | None:
    """Returns why no settings serve m rows of n columns, or None if some may.

    Args:
        m: rows.
        n: columns.
        widest_unfolded: columns beyond which a row must be folded.
    """
    if m == 0 or m % tiles.ROWS:
        return f"m={m} is not a positive multiple of {tiles.ROWS}"
    if not 0 < n <= MAX_COLUMNS or n % _MULTIPLE:
        return f"n={n} is not a positive multiple of {_MULTIPLE} up to {MAX_COLUMNS}"
    if n > widest_unfolded and n % FOLD_MULTIPLE:
        return f"n={n} is not a multiple of {FOLD_MULTIPLE}, as above {widest_unfolded}"
    return None


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How m rows of n columns are cut into tiles and pieces, and held in registers.

    A folded matrix has each row as `fold` rows of `n / fold` columns; without folding
    it is the matrix itself. A tile in registers is a list of its pieces.

    Attributes:
        m, n: rows and columns.
        settings: of the launch.
    """

    m: int
    n: int
    settings: Settings

    @property
    def fold(self) -> int:
        """Warps that share a row."""
        return max(1, self.settings.lanes // 32)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return 32 * WARPS // self.settings.lanes * self.settings.rows

    @property
    def rows(self) -> int:
        """Rows of a folded tile."""
        return self.tile_rows * self.fold

    @property
    def columns(self) -> int:
        """Columns of a folded matrix."""
        return self.n // self.fold

    @property
    def width(self) -> int:
        """Columns of a piece."""
        return math.gcd(self.columns, tiles.TMA_SIDE)

    @property
    def pieces(self) -> list:
        """Columns of each piece."""
        return [pl.ds(i, self.width) for i in range(0, self.columns, self.width)]

    @property
    def ctas(self) -> int:
        """CTAs of a launch: one to an SM, and no more than have tiles."""
        cta_rows = self.tile_rows * self.settings.warpgroups
        return min(-(-self.m // cta_rows), tiles.SMS)

    @property
    def warps(self) -> int:
        """Warps of a launch."""
        return self.ctas * self.settings.warpgroups * WARPS

    @property
    def registers(self) -> Any:
        """Layout of a piece: rows over warps and lane groups, columns over lanes."""
        lanes = min(32, self.settings.lanes)
        groups = 32 // lanes
        vector = 8 if self.width % (8 * lanes) == 0 else 4
        width = lanes * vector
        if groups == 1:
            tiling = plgpu.Tiling(((WARPS, width), (vector,)))
            return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)
        tiling = plgpu.Tiling(((WARPS * groups, width), (groups, width), (vector,)))
        return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)

    def why_not(
        self, norm: NormName, *, element_bytes: int, extra_bytes: int = 0
    ) -> str | None:
        """Returns why the settings do not serve this shape, or None if they do.

        Args:
            norm: of the rows.
            element_bytes: of the ring for each element of a tile.
            extra_bytes: of shared memory for each warpgroup besides its ring.
        """
        settings, n = self.settings, self.n
        if self.fold > 1:
            if settings.rows > 1 or norm == "block":
                return f"{settings} is for single rows without blocks"
            if n % FOLD_MULTIPLE:
                return f"n={n} is not a multiple of {FOLD_MULTIPLE} for {settings}"
        if self.m % self.tile_rows:
            rows = f"{self.tile_rows} rows of a tile"
            return f"m={self.m} is not a multiple of the {rows}"
        ring = settings.stages * self.tile_rows * n * element_bytes
        smem = settings.warpgroups * (ring + extra_bytes)
        if smem + _SMEM_RESERVE > tiles.SMEM_BYTES:
            return f"n={n} takes {smem} bytes of shared memory for {settings}"
        return None

    def matrix_type(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Returns the type of a folded matrix."""
        return jax.ShapeDtypeStruct((self.m * self.fold, self.columns), dtype)

    def fold_matrix(self, x: jax.Array) -> jax.Array:
        """Returns the folded matrix."""
        return x.reshape(-1, self.columns)

    def fold_vector(self, x: jax.Array | None) -> jax.Array | None:
        """Returns what has one value a column, as rows if rows are folded."""
        if x is None or self.fold == 1:
            return x
        return x.reshape(self.fold, self.columns)

    def scratch(self, dtypes: Sequence[DTypeLike]) -> dict[str, Any]:
        """Returns the memory a `Walk` over matrices of these dtypes takes."""
        scratch = {}
        warpgroups = self.settings.warpgroups
        slots, pieces = self.settings.stages * warpgroups, len(self.pieces)
        if slots:
            ring = (slots, pieces, self.rows, self.width)
            arrivals = len(dtypes) * pieces
            scratch["ring"] = [plgpu.SMEM(ring, dtype) for dtype in dtypes]
            scratch["full"] = plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals)
        if self.fold > 1:
            exchange = (warpgroups, 2, EXCHANGES, self.fold)
            scratch["exchange"] = plgpu.SMEM(exchange, jnp.float32)
        return scratch

    def launch[Results](
        self,
        body: Callable[..., None],
        inputs: Any,
        results: Results,
        scratch: dict[str, Any],
        interpret: Any,
    ) -> Results:
        """Returns what a kernel writes, arrays in the place of the types in `results`.

        Args:
            body: takes references in the place of inputs and results, and the scratch
                by name.
            inputs: a tree of arrays; None for what is absent.
            results: a tree of types; None for what is not written.
            scratch: types of the memory the body takes besides.
            interpret: how to interpret the kernel; None to run it.
        """
        structure = jax.tree.structure((inputs, results))

        def kernel(*refs, **scratch):
            body(*jax.tree.unflatten(structure, refs), **scratch)

        out = plgpu.kernel(
            kernel,
            out_type=jax.tree.leaves(results),
            scratch_types=scratch,
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=self.settings.warpgroups,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*jax.tree.leaves(inputs))
        return jax.tree.unflatten(jax.tree.structure(results), out)
