"""Layout and launch of the kernels that work by rows.

Rows lie in registers as they lie in memory: 8 neighbouring columns per lane (4 if a row
is too narrow), and 8, 16 or 32 neighbouring lanes per row. So each lane accesses 16
contiguous bytes, and the sums of a row stay within a warp. Long rows are folded: each
warp of a warpgroup takes a quarter as a row of its own until the sums are added.

Tiles of rows are cut into subtiles of at most 256 columns, for TMA. Each warpgroup has
its own tiles; `row_tiles` holds the code of a warpgroup. Rows beyond the last whole
tile are in a tile of the last rows, which repeats rows of the tile before it.
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
MAX_COLUMNS = 4096  # longer rows do not fit in the registers
FOLD_MULTIPLE = 512  # of columns, for folded rows without gaps between lanes
EXCHANGES = 3  # per tile of folded rows: up to two sums, then the amax
_MULTIPLE = 128  # of columns, for rows in one warp without gaps
_SMEM_RESERVE = 3 * 1024  # for barriers, exchanges and alignment to 1 KiB


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tunable parameters of a launch.

    Attributes:
        lanes: lanes that share a row: 8, 16, 32, or 128 (folded over all warps of a
            warpgroup, for multiples of 512 columns, not for block norms).
        rows: rows of a tile that each lane has a part of.
        pipeline_stages: tiles in flight to a warpgroup in its ring buffer in shared
            memory; 0 loads from global memory.
        warpgroups: per CTA, of which there is one per SM. The more warpgroups, the
            fewer registers each has.
        keep_vectors: keep bias, gamma and beta in registers between tiles.
    """

    lanes: int = 32
    rows: int = 1
    pipeline_stages: int = 3
    warpgroups: int = 4
    keep_vectors: bool = True


def why_not(m: int, n: int, *, max_unfolded: int) -> str | None:
    """Returns why no config serves m rows of n columns, or None if one may."""
    if m < tiles.ROWS:
        return f"m={m} rows are fewer than {tiles.ROWS}"
    if not 0 < n <= MAX_COLUMNS or n % _MULTIPLE:
        return f"n={n} is not a positive multiple of {_MULTIPLE} up to {MAX_COLUMNS}"
    if n > max_unfolded and n % FOLD_MULTIPLE:
        return f"n={n} is not a multiple of {FOLD_MULTIPLE}, as above {max_unfolded}"
    return None


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The tiles and subtiles of m rows of n columns, and their layout in registers.

    A folded matrix has each row as `fold` rows of `n / fold` columns; without folding
    it is the matrix itself. A tile in registers is a list of its subtiles.
    """

    m: int
    n: int
    config: TuningConfig

    @property
    def fold(self) -> int:
        """Warps that share a row."""
        return max(1, self.config.lanes // 32)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return 32 * WARPS // self.config.lanes * self.config.rows

    @property
    def whole_tiles(self) -> int:
        """Tiles without repeated rows."""
        return self.m // self.tile_rows

    @property
    def repeats_rows(self) -> bool:
        """True if one more tile has the last rows, some of them a second time."""
        return self.m % self.tile_rows > 0

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
        """Columns of a subtile."""
        return math.gcd(self.columns, tiles.TMA_SIDE)

    @property
    def subtiles(self) -> list:
        """Columns of each subtile."""
        return [pl.ds(i, self.width) for i in range(0, self.columns, self.width)]

    @property
    def ctas(self) -> int:
        """CTAs of a launch: at most one per SM, and none without tiles."""
        cta_rows = self.tile_rows * self.config.warpgroups
        return min(-(-self.m // cta_rows), tiles.SMS)

    @property
    def warps(self) -> int:
        """Warps of a launch."""
        return self.ctas * self.config.warpgroups * WARPS

    @property
    def registers(self) -> Any:
        """Layout of a subtile: rows over warps and lane groups, columns over lanes."""
        lanes = min(32, self.config.lanes)
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
        """Returns why the config does not serve this shape, or None if it does."""
        config, n = self.config, self.n
        if self.fold > 1:
            if config.rows > 1 or norm == "block":
                return f"{config} is for single rows without blocks"
            if n % FOLD_MULTIPLE:
                return f"n={n} is not a multiple of {FOLD_MULTIPLE} for {config}"
        if self.m < self.tile_rows:
            return f"m={self.m} is less than the {self.tile_rows} rows of a tile"
        ring = config.pipeline_stages * self.tile_rows * n * element_bytes
        smem = config.warpgroups * (ring + extra_bytes)
        if smem + _SMEM_RESERVE > tiles.SMEM_BYTES:
            return f"n={n} takes {smem} bytes of shared memory for {config}"
        return None

    def matrix_type(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Returns the type of a folded matrix."""
        return jax.ShapeDtypeStruct((self.m * self.fold, self.columns), dtype)

    def fold_matrix(self, x: jax.Array) -> jax.Array:
        """Returns the folded matrix."""
        return x.reshape(-1, self.columns)

    def fold_vector(self, x: jax.Array | None) -> jax.Array | None:
        """Returns a vector with a value per column, as rows if rows are folded."""
        if x is None or self.fold == 1:
            return x
        return x.reshape(self.fold, self.columns)

    def scratch(self, dtypes: Sequence[DTypeLike]) -> dict[str, Any]:
        """Returns the memory that a `TilePipeline` of these matrices' dtypes takes."""
        scratch = {}
        warpgroups, subtiles = self.config.warpgroups, len(self.subtiles)
        stages = self.config.pipeline_stages * warpgroups
        if stages:
            ring = (stages, subtiles, self.rows, self.width)
            arrivals = len(dtypes) * subtiles
            scratch["ring"] = [plgpu.SMEM(ring, dtype) for dtype in dtypes]
            scratch["full"] = plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals)
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
        """Returns the kernel's outputs, arrays in place of the types in `results`.

        Args:
            body: takes references to inputs and results, and the scratch by name.
            inputs: a tree of arrays; None where absent.
            results: a tree of types; None where not requested.
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
            num_threads=self.config.warpgroups,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*jax.tree.leaves(inputs))
        return jax.tree.unflatten(jax.tree.structure(results), out)
