"""The static side of `dense_norm`: problems, tuning configs and launch layouts.

Which problems are served, and how a launch is laid out, is decided here without a GPU:
shared memory is counted, not tried.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3
from loka_jax.normed import NORM_BLOCK, XHAT_MAX_FEATURES, Outputs
from loka_jax.pallas import tiles, tuned
from loka_jax.pallas.tiles import ROWS
from loka_jax.site import SiteSpec

_ROW_MULTIPLE = 8  # as TMA addresses swizzled tiles
_MAX_TILE_N = 256  # columns of an N tile: the widest wgmma
_MAX_TILE_K = 256  # columns of x in one TMA copy
_MAX_N_TILES = 8  # CTAs of a portable cluster
_MAX_BARRIERS = 32  # in a group, as Mosaic GPU allocates them
_STORES = ((256, 1), (128, 2), (128, 1), (64, 1))  # store_subtile_bytes, store_stages
_MOST_CONFIGS = 3  # worth trying for a number of N tiles and consumer warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes, all of it static.

    Attributes:
        w_scale_by_column: the weight has one scale per column of z.
    """

    spec: SiteSpec
    dtype: Any
    want: Outputs
    has_affine: bool = True
    x_scale_by_row: bool = False
    w_scale_by_column: bool = False

    @property
    def reduces_rows(self) -> bool:
        """True if the norm takes sums over whole rows."""
        return self.spec.norm in ("layer", "rms")


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tunable parameters of a launch.

    Attributes:
        consumer_warpgroups: warpgroups that compute, each on row tiles of its own.
        pipeline_stages: K tiles of x in flight to each consumer (64 rows of at most 256
            columns).
        n_tiles: number of tiles that the columns of z are cut into.
        store_subtile_bytes: width of the subtiles in which a row tile is stored.
    """

    consumer_warpgroups: int = 2
    pipeline_stages: int = 2
    n_tiles: int = 1
    store_subtile_bytes: int = 128
    store_stages: int = 1


class Inputs(NamedTuple):
    """The kernel's operands, or references to them; None where absent."""

    x: Any
    w: Any
    x_scale: Any
    w_scale: Any
    bias: Any
    gamma: Any
    beta: Any
    y_scale: Any


class Results(NamedTuple):
    """The kernel's outputs; None where not requested."""

    y: Any
    y_fp8: Any
    y_scale: Any
    y_amax: Any
    xhat: Any
    rstd: Any


class Scratch(NamedTuple):
    """Shared memory and barriers; None where not needed.

    A barrier `*_full` completes when that memory is filled, `*_empty` when it was read.
    """

    x: Any  # [consumers * pipeline_stages, 64, tile_k]: a ring buffer per consumer
    w: Any  # [k_tiles, tile_n, tile_k]
    x_scale: Any  # [consumers, 2, 64]
    vectors: Any  # [vectors, tile_n]
    affine: Any  # [2, tile_n]: gamma and beta in the dtype and scale of the activation
    store_bf16: Any  # [consumers, store_stages, 64, columns of a subtile]
    store_fp8: Any  # the same in E4M3
    store_rows: Any  # [consumers, 3, 64] float32: one value per row
    partials: Any  # [consumers, 2, n_tiles - 1, 64, 8] from the other N tiles
    x_full: Any
    x_empty: Any
    vectors_full: Any
    w_full: Any
    affine_full: Any
    mma_order: Any  # per consumer: its turn on the tensor cores
    partials_full: Any
    x_scale_full: Any
    x_scale_empty: Any


class LaunchLayout:
    """How a launch is laid out: tiles, grid, outputs and shared memory."""

    def __init__(self, problem: Problem, config: TuningConfig):
        """Derives the layout; `misfit` tells whether it is possible."""
        spec, want = problem.spec, problem.want
        self.problem, self.config, self.spec, self.want = problem, config, spec, want
        self.tile_n = spec.n // config.n_tiles
        self.tile_k = math.gcd(spec.k, _MAX_TILE_K)
        self.k_tiles = spec.k // self.tile_k
        # TMA reads rows beyond the last one as zeros, and does not write them.
        self.m_tiles = -(-spec.m // ROWS)
        self.m_ctas = max(1, min(tiles.SMS // config.n_tiles, self.m_tiles))
        # The vectors with a value per column, in the order of `Scratch.vectors`.
        presence = {
            "bias": spec.use_bias,
            "gamma": problem.has_affine,
            "beta": problem.has_affine,
            "w_scale": problem.w_scale_by_column,
        }
        self.vectors = [name for name, is_present in presence.items() if is_present]
        # Exchanges between the N tiles of a row tile: sums, and the amax of its rows.
        exchanges = (problem.reduces_rows, want.y_fp8 == "rowwise")
        self.exchanges = sum(exchanges) if config.n_tiles > 1 else 0
        # FP8 outputs of normalized rows need only half precision after the norm, which
        # takes fewer instructions and registers.
        in_half = want.y_fp8 is not None and spec.norm != "none"
        self.epilogue_dtype = jnp.float16 if in_half else jnp.float32
        self.writes_bf16 = bool(want.y) or want.xhat == jnp.bfloat16
        self.writes_fp8 = want.y_fp8 is not None or want.xhat == E4M3

    def store_columns(self) -> list[int]:
        """Returns the columns of a store's subtile, for each dtype written."""
        itemsizes = [2] * self.writes_bf16 + [1] * self.writes_fp8
        return [self.config.store_subtile_bytes // itemsize for itemsize in itemsizes]

    def results(self) -> Results:
        """Returns the shapes of the kernel's outputs."""
        m, n, want = self.spec.m, self.spec.n, self.want
        f32, shape = jnp.float32, jax.ShapeDtypeStruct
        blocks = self.config.n_tiles if self.spec.norm == "block" else 1
        rstd = shape((m,) if blocks == 1 else (blocks, m), f32)
        return Results(
            y=shape((m, n), jnp.bfloat16) if want.y else None,
            y_fp8=shape((m, n), E4M3) if want.y_fp8 else None,
            y_scale=shape((m,), f32) if want.y_fp8 == "rowwise" else None,
            y_amax=shape((self.config.n_tiles, m), f32) if want.y_amax else None,
            xhat=shape((m, n), want.xhat) if want.xhat is not None else None,
            rstd=rstd if want.rstd else None,
        )

    def scratch(self) -> Scratch:
        """Returns the shared memory and the barriers of a CTA."""
        config, want, problem = self.config, self.want, self.problem
        f32, barrier, smem = jnp.float32, plgpu.Barrier, plgpu.SMEM
        consumers, others = config.consumer_warpgroups, config.n_tiles - 1
        ring, two_each = consumers * config.pipeline_stages, 2 * consumers

        def staging(dtype):
            columns = config.store_subtile_bytes // jnp.dtype(dtype).itemsize
            shape = (consumers, config.store_stages, ROWS, columns)
            return tiles.swizzled(shape, dtype)

        rows = want.y_fp8 == "rowwise" or want.rstd or want.y_amax
        vectors, x_scale = len(self.vectors), problem.x_scale_by_row
        in_half = problem.has_affine and self.epilogue_dtype == jnp.float16
        partials = partials_full = None
        if self.exchanges:
            partials = tiles.swizzled((consumers, 2, others, ROWS, 8), f32)
            partials_full = barrier(num_barriers=two_each, num_arrivals=others)
        return Scratch(
            x=tiles.swizzled((ring, ROWS, self.tile_k), problem.dtype),
            w=tiles.swizzled((self.k_tiles, self.tile_n, self.tile_k), problem.dtype),
            x_scale=smem((consumers, 2, ROWS), f32) if x_scale else None,
            vectors=smem((vectors, self.tile_n), f32) if vectors else None,
            affine=smem((2, self.tile_n), jnp.float16) if in_half else None,
            store_bf16=staging(jnp.bfloat16) if self.writes_bf16 else None,
            store_fp8=staging(E4M3) if self.writes_fp8 else None,
            store_rows=smem((consumers, 3, ROWS), f32) if rows else None,
            partials=partials,
            x_full=barrier(num_barriers=ring),
            x_empty=barrier(num_barriers=ring),
            vectors_full=barrier(num_arrivals=vectors) if vectors else None,
            w_full=barrier(num_arrivals=self.k_tiles),
            affine_full=barrier() if problem.has_affine else None,
            mma_order=barrier(num_barriers=consumers) if consumers > 1 else None,
            partials_full=partials_full,
            x_scale_full=barrier(num_barriers=two_each) if x_scale else None,
            x_scale_empty=barrier(num_barriers=two_each) if x_scale else None,
        )


def why_not(problem: Problem) -> str | None:
    """Returns why a problem is not served, or None if it is."""
    spec, want, dtype = problem.spec, problem.want, jnp.dtype(problem.dtype)
    if spec.m < ROWS:
        return f"m={spec.m} rows are fewer than {ROWS}"
    if spec.m % _ROW_MULTIPLE:
        return f"m={spec.m} is not a multiple of {_ROW_MULTIPLE}"
    if dtype not in (jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)):
        return f"{dtype.name} operands are neither E4M3 nor bfloat16"
    for name, size in (("k", spec.k), ("n", spec.n)):
        if size == 0 or size % 64:
            return f"{name}={size} is not a positive multiple of 64"
    if spec.norm == "block" and spec.n > NORM_BLOCK and spec.n % NORM_BLOCK:
        return f"n={spec.n} is not a multiple of the norm's block of {NORM_BLOCK}"
    if spec.norm == "block" and problem.has_affine:
        return "block norms have no gamma and beta"
    if want.xhat == E4M3 and (spec.norm == "none" or spec.n > XHAT_MAX_FEATURES):
        return f"rows normalized by {spec.norm!r} over n={spec.n} may not fit E4M3"
    if not search_space(problem):
        return f"a weight of {spec.k} x {spec.n} does not fit shared memory"
    return None


def search_space(problem: Problem) -> list[TuningConfig]:
    """Returns the configs worth trying that fit, the most promising first."""
    space = []
    for n_tiles in _n_tiles(problem.spec):
        for consumers in (4, 2) if problem.spec.n // n_tiles <= 128 else (2,):
            options = itertools.product(_pipeline_stages(problem.spec), _STORES)
            configs = (
                TuningConfig(consumers, s, n_tiles, *store) for s, store in options
            )
            fitting = (c for c in configs if misfit(problem, c) is None)
            space += itertools.islice(fitting, _MOST_CONFIGS)
    return space


def best_config(problem: Problem) -> TuningConfig:
    """Returns the default config of a launch.

    The fastest one measured for the nearest number of rows, if it fits; else the first
    of the search space.
    """
    entry = tuned.lookup("dense_norm", problem_key(problem), problem.spec.m)
    if entry is not None:
        config = TuningConfig(**entry)
        if misfit(problem, config) is None:
            return config
    return search_space(problem)[0]


def problem_key(problem: Problem) -> str:
    """Returns the key of a problem, of any number of rows, in the tuned table."""
    spec, want = problem.spec, problem.want
    outputs = [name for name, on in (("y", want.y), ("xhat", want.xhat)) if on]
    outputs += [f"y_fp8_{want.y_fp8}"] if want.y_fp8 else []
    norm = "over_all" if problem.reduces_rows else spec.norm
    dtype = jnp.dtype(problem.dtype).name
    return f"{dtype} {spec.k}x{spec.n} {norm} {'+'.join(outputs)}"


def misfit(problem: Problem, config: TuningConfig) -> str | None:
    """Returns why a launch cannot be laid out with a config, or None if it can."""
    layout, n = LaunchLayout(problem, config), problem.spec.n
    if n % config.n_tiles or layout.tile_n > _MAX_TILE_N:
        return f"N tiles of {n} columns are at most {_MAX_TILE_N} wide"
    # A K tile is released when the next one has arrived.
    if layout.k_tiles > 1 and config.pipeline_stages < 2:
        return f"x comes in {layout.k_tiles} K tiles, which takes 2 pipeline stages"
    ring = config.consumer_warpgroups * config.pipeline_stages
    if ring > _MAX_BARRIERS:
        return (
            f"the ring buffers have {ring} stages, more than {_MAX_BARRIERS} barriers"
        )
    if any(layout.tile_n % columns for columns in layout.store_columns()):
        return f"an N tile has {layout.tile_n} columns, no multiple of a store's"
    size = tiles.shared_memory_bytes(layout.scratch())
    if size > tiles.SMEM_BYTES:
        return f"it takes {size} bytes of shared memory of {tiles.SMEM_BYTES}"
    return None


def present(values) -> list:
    """Returns the values that are not None."""
    return [value for value in values if value is not None]


def _n_tiles(spec: SiteSpec) -> list[int]:
    """Returns the possible numbers of N tiles, smallest first."""
    n = spec.n
    if spec.norm == "block":  # a tile's statistics are those of its own columns
        blocks = max(1, n // NORM_BLOCK)
        return [blocks] if blocks <= _MAX_N_TILES else []
    sizes = {count: n // count for count in (1, 2, 4) if n % count == 0}
    return [
        count
        for count, size in sizes.items()
        if size <= _MAX_TILE_N and size % 64 == 0 and (size >= 128 or count == 1)
    ]


def _pipeline_stages(spec: SiteSpec) -> list[int]:
    """Returns the pipeline stages of three, two and one row tiles of x."""
    k_tiles = spec.k // math.gcd(spec.k, _MAX_TILE_K)
    return [k_tiles * m_tiles for m_tiles in (3, 2, 1)]
