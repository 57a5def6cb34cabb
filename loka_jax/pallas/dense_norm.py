"""One kernel for `x W^T`, norm, activation and quantization.

    z = x W^T + bias        u = gamma norm(z) + beta        y = activation(u)

x (M, K) and the weight (N, K) come in FP8, or both in bfloat16; z stays in registers.
The columns of z are cut into slabs of at most 256. A CTA keeps its slab of W in shared
memory for the whole launch and walks over row tiles of 64. Where a norm or a row scale
needs more than one slab, their CTAs form a cluster and exchange sums through
distributed shared memory.

A producer warpgroup feeds x by TMA to teams of one warpgroup each. A team's products
start when those of the team before it are done, so that the tensor cores work for one
team while the others normalize.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.normed import (
    XHAT_MAX_FEATURES,
    XHAT_SCALE_INV,
    ActivationName,
    Normed,
    NormName,
    Outputs,
)
from loka_jax.pallas import tiles
from loka_jax.pallas.activations import activate_scaled, input_scale
from loka_jax.pallas.tiles import PER_COLUMN, PER_ROW, ROWS, per_column, per_row

SLAB = 256  # columns of a slab at most; also the block of a block norm
_PART = 256  # columns of x that one TMA copy takes at most
# Below it the reciprocal of a row scale would leave float16's range.
_MIN_ROW_SCALE = 2.0**-14
_WGMMA = plgpu.Layout.WGMMA
# Width in bytes of the pieces of an output, and pieces under way.
_PIECES = ((256, 1), (128, 2), (128, 1), (64, 1))
_MAX_SLABS = 8  # CTAs of a portable cluster
_SMEM_ALIGNMENT = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes, all of it static.

    Attributes:
        m, k, n: rows, contracted size, columns of z.
        dtype: of x and w: E4M3 or bfloat16.
        norm: of the rows of z.
        activation: after it.
        want: the outputs.
        has_bias: a bias is added before the norm.
        has_affine: gamma and beta follow the norm.
        x_scale_by_row: every row of x has a scale of its own.
        w_scale_by_column: every column of z has a scale of its own.
    """

    m: int
    k: int
    n: int
    dtype: Any
    norm: NormName
    activation: ActivationName
    want: Outputs
    has_bias: bool = False
    has_affine: bool = True
    x_scale_by_row: bool = False
    w_scale_by_column: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        teams: warpgroups that work on row tiles of their own.
        stages: parts of x under way to each team (64 rows of at most 256 columns).
        slabs: parts that the columns of z are cut into.
        piece_bytes: width of the pieces in which an output leaves shared memory.
        slots: pieces on their way out for each team.
    """

    teams: int = 2
    stages: int = 2
    slabs: int = 1
    piece_bytes: int = 128
    slots: int = 1


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    *,
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    epsilon: float = 1e-6,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
    settings: Settings | None = None,
    interpret: Any = None,
) -> Normed:
    """Returns what `want` asks for of `activation(norm(x @ w.T + bias))`.

    Args:
        x: bfloat16, or E4M3 with `scale_inv` of shape `[]` or `[m, 1]`.
        w: of the same dtype, `scale_inv` of shape `[]` or `[n, 1]`.
        bias: float32, added before the norm.
        gamma: float32 factor after the norm, with `beta`; both or none.
        beta: float32 summand after the norm.
        norm: "layer" and "rms" over all columns, "block" over blocks of 256 without
            gamma and beta, or "none".
        activation: applied last.
        epsilon: added to the variance or mean square.
        want: the outputs.
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensor".
        settings: the layout of the launch; the best one known if None.
        interpret: `plgpu.InterpretGPUParams` to interpret the kernel on a CPU.

    The variance is the mean square less the squared mean, in float32, as Flax's
    LayerNorm has it: features with a mean far beyond their deviation lose digits.

    Raises:
        ValueError: if the problem is not served (see `why_not`).
    """
    x_fp8, w_fp8 = isinstance(x, Fp8Array), isinstance(w, Fp8Array)
    assert x_fp8 == w_fp8 and (gamma is None) == (beta is None)
    inputs = _Inputs(
        x=x.data if x_fp8 else x,
        w=w.data if w_fp8 else w,
        x_scale=x.scale_inv.reshape(-1) if x_fp8 else None,
        w_scale=w.scale_inv.reshape(-1) if w_fp8 else None,
        bias=bias,
        gamma=gamma,
        beta=beta,
        y_scale=None if y_scale_inv is None else y_scale_inv.reshape(1),
    )
    (m, k), n = inputs.x.shape, inputs.w.shape[0]
    problem = Problem(
        m=m,
        k=k,
        n=n,
        dtype=inputs.x.dtype,
        norm=norm,
        activation=activation,
        want=want,
        has_bias=bias is not None,
        has_affine=gamma is not None,
        x_scale_by_row=_is_vector(inputs.x_scale),
        w_scale_by_column=_is_vector(inputs.w_scale),
    )
    reason = why_not(problem)
    if reason is not None:
        raise ValueError(f"pallas dense_norm does not serve this site: {reason}.")
    settings = settings or best_settings(problem)
    reason = _misfit(problem, settings)
    if reason is not None:
        raise ValueError(f"{settings} does not fit: {reason}.")
    return _Kernel(problem, epsilon, settings).launch(inputs, interpret)


def why_not(problem: Problem) -> str | None:
    """Returns why a problem is not served, or None if it is."""
    p = problem
    if p.m == 0 or p.m % ROWS:
        return f"m={p.m} is not a positive multiple of {ROWS}"
    if p.dtype not in (E4M3, jnp.bfloat16):
        return f"{jnp.dtype(p.dtype).name} operands are neither E4M3 nor bfloat16"
    for name, size in (("k", p.k), ("n", p.n)):
        if size == 0 or size % 64:
            return f"{name}={size} is not a positive multiple of 64"
    if p.norm == "block" and p.n > SLAB and p.n % SLAB:
        return f"n={p.n} is not a multiple of the norm's block of {SLAB}"
    if p.norm == "block" and p.has_affine:
        return "block norms have no gamma and beta"
    if p.want.xhat == E4M3 and (p.norm == "none" or p.n > XHAT_MAX_FEATURES):
        return f"rows normalized by {p.norm!r} over n={p.n} may not fit E4M3"
    if not search_space(p):
        return f"a weight of {p.k} x {p.n} does not fit shared memory"
    return None


def search_space(problem: Problem) -> list[Settings]:
    """Returns the settings worth trying that fit, the likeliest first."""
    found = []
    for slabs in _slabs(problem):
        teams = (4, 2) if problem.n // slabs <= 128 else (2,)
        choices = itertools.product(teams, _stages(problem), _PIECES)
        found += [Settings(t, s, slabs, *piece) for t, s, piece in choices]
    return [settings for settings in found if _misfit(problem, settings) is None]


def best_settings(problem: Problem) -> Settings:
    """Returns the settings that a launch takes by default."""
    return search_space(problem)[0]


def _slabs(problem: Problem) -> list[int]:
    """Returns into how many slabs the columns can be cut, fewest first."""
    if problem.norm == "block" and problem.n > SLAB:
        return [problem.n // SLAB] if problem.n // SLAB <= _MAX_SLABS else []
    counts = (1, 2, 4)
    sizes = {count: problem.n // count for count in counts if problem.n % count == 0}
    return [
        count
        for count, size in sizes.items()
        if size <= SLAB and size % 64 == 0 and (size >= 128 or count == 1)
    ]


def _stages(problem: Problem) -> list[int]:
    """Returns how many parts of x to keep under way: up to three row tiles."""
    parts = problem.k // math.gcd(problem.k, _PART)
    return [parts * tiles_ahead for tiles_ahead in (3, 2, 1)]


def _misfit(problem: Problem, settings: Settings) -> str | None:
    """Returns why a launch cannot be laid out so, or None if it can."""
    kernel = _Kernel(problem, 0.0, settings)
    if problem.n % settings.slabs or kernel.columns > SLAB:
        return f"slabs of {problem.n} columns are at most {SLAB} wide"
    # A part is given back when the next one has arrived.
    if kernel.parts > 1 and settings.stages < 2:
        return f"x comes in {kernel.parts} parts, which takes 2 stages"
    if any(kernel.columns % piece for piece in kernel.pieces()):
        return f"a slab has {kernel.columns} columns, no multiple of a piece's"
    needed = kernel.shared_memory_bytes()
    if needed > tiles.SMEM_BYTES:
        return f"it takes {needed} bytes of shared memory of {tiles.SMEM_BYTES}"
    return None


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    x: Any
    w: Any
    x_scale: Any
    w_scale: Any
    bias: Any
    gamma: Any
    beta: Any
    y_scale: Any


class _Results(NamedTuple):
    """What the kernel writes; None for what it does not."""

    y: Any
    y_fp8: Any
    y_scale: Any
    y_amax: Any
    xhat: Any
    rstd: Any


class _Scratch(NamedTuple):
    """Shared memory and barriers; None for what is not needed."""

    x: Any  # [teams * stages, 64, part]: a ring for each team
    w: Any  # [parts, columns, part]
    x_scale: Any  # [teams, 2, 64]
    table: Any  # [rows, columns]: what is given for each column
    affine: Any  # [2, columns]: gamma and beta as the activation wants them
    wide: Any  # [teams, slots, 64, columns of a piece], bfloat16 on its way out
    narrow: Any  # the same in E4M3
    rows: Any  # [teams, 3, 64], float32 on its way out
    sums: Any  # [teams, 2, slabs - 1, 64, 8] from the other slabs
    full: Any  # barriers of parts of x that have arrived,
    empty: Any  # and of those that were read
    resident: Any  # of all that stays
    prepared: Any  # of `affine`
    turn: Any  # of the team that may use the tensor cores
    sums_full: Any
    scale_full: Any
    scale_empty: Any


class _At(NamedTuple):
    """Where this thread is.

    Attributes:
        group: the first row tile of this CTA; the others follow `groups` apart.
        slab: its slab.
        steps: its number of row tiles.
    """

    group: Any
    slab: Any
    steps: Any


class _Kernel:
    """A launch: what is static of it, and the kernel's body."""

    def __init__(self, problem: Problem, epsilon: float, settings: Settings):
        self.m, self.k, self.n = problem.m, problem.k, problem.n
        self.dtype, self.norm = problem.dtype, problem.norm
        self.activation, self.epsilon = problem.activation, epsilon
        self.want, self.settings = problem.want, settings
        self.x_scale_by_row = problem.x_scale_by_row
        self.w_scale_by_column = problem.w_scale_by_column
        norm, want = problem.norm, problem.want
        self.columns = self.n // settings.slabs
        self.part = math.gcd(self.k, _PART)
        self.parts = self.k // self.part
        self.steps = self.m // ROWS
        self.groups = max(1, min(tiles.SMS // settings.slabs, self.steps))
        # What is given for each column, in the order of the table's rows.
        by_column = {
            "bias": problem.has_bias,
            "gamma": problem.has_affine,
            "beta": problem.has_affine,
            "w_scale": problem.w_scale_by_column,
        }
        self.table = [name for name, is_given in by_column.items() if is_given]
        self.has_affine = problem.has_affine
        # What a row tile needs of the other slabs: sums, and the amax of its rows.
        needs = (norm in ("layer", "rms"), want.y_fp8 == "row")
        self.exchanges = sum(needs) if settings.slabs > 1 else 0
        # What leaves in FP8 was normalized: half precision is enough after the norm, at
        # half the instructions and registers.
        in_half = want.y_fp8 is not None and norm != "none"
        self.late_dtype = jnp.float16 if in_half else jnp.float32
        self.writes_wide = bool(want.y) or want.xhat == jnp.bfloat16
        self.writes_narrow = want.y_fp8 is not None or want.xhat == E4M3

    def launch(self, inputs: _Inputs, interpret) -> Normed:
        """Runs the kernel."""
        results, scratch = self._results(), self._scratch()
        slabs = self.settings.slabs
        if self.exchanges:
            mesh = dict(grid=(self.groups,), grid_names=("group",))
            mesh |= dict(cluster=(slabs,), cluster_names=("slab",))
        else:
            mesh = dict(grid=(self.groups, slabs), grid_names=("group", "slab"))

        def body(*refs):
            refs = iter(refs)
            self._body(*(_fill(like, refs) for like in (inputs, results, scratch)))

        written = plgpu.kernel(
            body,
            out_type=_present(results),
            scratch_types=_present(scratch),
            **mesh,
            num_threads=self.settings.teams + 1,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*_present(inputs))
        out = _fill(results, iter(written))
        y_fp8 = None
        if out.y_fp8 is not None:
            row_scale, given = out.y_scale, inputs.y_scale
            scale = given.reshape(()) if row_scale is None else row_scale[:, None]
            y_fp8 = Fp8Array(out.y_fp8, scale)
        return Normed(out.y, y_fp8, out.xhat, out.rstd, out.y_amax)

    def pieces(self) -> list[int]:
        """Returns the columns of the pieces in which outputs leave."""
        itemsizes = [2] * self.writes_wide + [1] * self.writes_narrow
        return [self.settings.piece_bytes // itemsize for itemsize in itemsizes]

    def shared_memory_bytes(self) -> int:
        """Returns what a CTA needs: every array starts at a multiple of 1 KiB."""
        total = 0
        for scratch in _present(self._scratch()):
            if isinstance(scratch, plgpu.Barrier):
                total += 8 * math.prod(scratch.num_barriers)
            else:
                aval = scratch.inner_aval
                size = aval.size * aval.dtype.itemsize
                total += -(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT
        return total

    def _results(self) -> _Results:
        m, n, want = self.m, self.n, self.want
        f32, shape = jnp.float32, jax.ShapeDtypeStruct
        blocks = self.settings.slabs if self.norm == "block" else 1
        rstd = shape((m,) if blocks == 1 else (blocks, m), f32)
        return _Results(
            y=shape((m, n), jnp.bfloat16) if want.y else None,
            y_fp8=shape((m, n), E4M3) if want.y_fp8 else None,
            y_scale=shape((m,), f32) if want.y_fp8 == "row" else None,
            y_amax=shape((self.settings.slabs, m), f32) if want.y_amax else None,
            xhat=shape((m, n), want.xhat) if want.xhat is not None else None,
            rstd=rstd if want.rstd else None,
        )

    def _scratch(self) -> _Scratch:
        s, want = self.settings, self.want
        f32, barrier, smem = jnp.float32, plgpu.Barrier, plgpu.SMEM
        ring, two_each = s.teams * s.stages, 2 * s.teams

        def staging(dtype):
            piece = s.piece_bytes // jnp.dtype(dtype).itemsize
            return tiles.swizzled((s.teams, s.slots, ROWS, piece), dtype)

        rows = want.y_fp8 == "row" or want.rstd or want.y_amax
        sums = None
        if self.exchanges:
            transforms = (plgpu.TilingTransform((8, 8)), plgpu.SwizzleTransform(32))
            shape = (s.teams, 2, s.slabs - 1, ROWS, 8)
            sums = smem(shape, f32, transforms=transforms)
        scales = self.x_scale_by_row
        in_half = self.has_affine and self.late_dtype == jnp.float16
        return _Scratch(
            x=tiles.swizzled((ring, ROWS, self.part), self.dtype),
            w=tiles.swizzled((self.parts, self.columns, self.part), self.dtype),
            x_scale=smem((s.teams, 2, ROWS), f32) if scales else None,
            table=smem((len(self.table), self.columns), f32) if self.table else None,
            affine=smem((2, self.columns), jnp.float16) if in_half else None,
            wide=staging(jnp.bfloat16) if self.writes_wide else None,
            narrow=staging(E4M3) if self.writes_narrow else None,
            rows=smem((s.teams, 3, ROWS), f32) if rows else None,
            sums=sums,
            full=barrier(num_barriers=ring),
            empty=barrier(num_barriers=ring),
            resident=barrier(num_arrivals=self.parts + len(self.table)),
            prepared=barrier() if self.has_affine else None,
            turn=barrier(num_barriers=s.teams) if s.teams > 1 else None,
            sums_full=barrier(num_barriers=two_each, num_arrivals=s.slabs - 1)
            if self.exchanges
            else None,
            scale_full=barrier(num_barriers=two_each) if scales else None,
            scale_empty=barrier(num_barriers=two_each) if scales else None,
        )

    def _body(self, inputs: _Inputs, results: _Results, scratch: _Scratch):
        teams = self.settings.teams
        warpgroup, group = lax.axis_index("warpgroup"), lax.axis_index("group")
        slab = lax.axis_index("slab") if self.settings.slabs > 1 else 0
        steps = lax.div(self.steps - group + self.groups - 1, self.groups)
        at = _At(group, slab, steps)

        @pl.when(warpgroup == teams)
        def _():
            plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
            self._produce(inputs, scratch, at)

        @pl.when(warpgroup < teams)
        def _():
            registers = tiles.compute_registers(teams)
            plgpu.set_max_registers(registers, action="increase")
            self._work(warpgroup, inputs, results, scratch, at)

    def _row_slice(self, at: _At, step):
        return pl.ds((at.group + step * self.groups) * ROWS, ROWS)

    def _slot(self, team, part):
        """Returns where the `part`-th part of x that a team reads lies in the rings."""
        return team * self.settings.stages + lax.rem(part, self.settings.stages)

    def _produce(self, inputs: _Inputs, scratch: _Scratch, at: _At):
        """Loads what stays, then keeps the rings of x filled."""
        s = self.settings
        columns = pl.ds(at.slab * self.columns, self.columns)
        for p in range(self.parts):
            source = inputs.w.at[columns, pl.ds(p * self.part, self.part)]
            plgpu.copy_gmem_to_smem(source, scratch.w.at[p], scratch.resident)
        for i, name in enumerate(self.table):
            source = getattr(inputs, name).at[columns]
            plgpu.copy_gmem_to_smem(source, scratch.table.at[i], scratch.resident)

        @pl.loop(0, at.steps)
        def _(step):
            team, turn = lax.rem(step, s.teams), lax.div(step, s.teams)
            rows = self._row_slice(at, step)
            if self.x_scale_by_row:
                half = lax.rem(turn, 2)
                slot = 2 * team + half
                _wait_if(turn >= 2, scratch.scale_empty.at[slot])
                target, barrier = scratch.x_scale.at[team, half], scratch.scale_full
                source = inputs.x_scale.at[rows]
                plgpu.copy_gmem_to_smem(source, target, barrier.at[slot])
            for p in range(self.parts):
                part = turn * self.parts + p
                slot = self._slot(team, part)
                _wait_if(part >= s.stages, scratch.empty.at[slot])
                source = inputs.x.at[rows, pl.ds(p * self.part, self.part)]
                target, barrier = scratch.x.at[slot], scratch.full.at[slot]
                plgpu.copy_gmem_to_smem(source, target, barrier)

    def _work(self, team, inputs, results, scratch, at: _At):
        """Works through the row tiles of a team."""
        teams = self.settings.teams
        scale = _product_of_scalars(inputs.x_scale, inputs.w_scale)
        to_fp8 = None if inputs.y_scale is None else 1.0 / inputs.y_scale[0]
        plgpu.barrier_wait(scratch.resident)
        if self.has_affine:
            pl.when(team == 0)(lambda: self._prepare(scratch))
            plgpu.barrier_wait(scratch.prepared)

        @pl.loop(0, self._turns(team, at))
        def _(turn):
            step = turn * teams + team
            z = self._multiply(team, turn, scratch, at)
            tile = _Tile(self, team, turn, scratch, at)
            row_scale = scale
            if self.x_scale_by_row:
                row_scale = tile.x_scale()
                row_scale = row_scale if scale is None else row_scale * scale
            # What the last tile of this team wrote must have left before.
            tiles.drain()
            rows = self._row_slice(at, step)
            self._finish(z, row_scale, to_fp8, tile, results, rows)

        tiles.drain()

    def affine_rows(self, scratch: _Scratch):
        """Returns where gamma and beta lie as the row tiles read them."""
        if scratch.affine is not None:
            return scratch.affine.at[0], scratch.affine.at[1]
        return tuple(self._table_row(scratch, name) for name in ("gamma", "beta"))

    def _table_row(self, scratch: _Scratch, name: str):
        return scratch.table.at[self.table.index(name)]

    def _prepare(self, scratch: _Scratch):
        """Rewrites gamma and beta once, so that row tiles need not scale them."""
        factor = input_scale(self.activation)
        given = [
            plgpu.load(self._table_row(scratch, name), layout=PER_COLUMN)
            for name in ("gamma", "beta")
        ]
        # Every warp reads all columns, and may be about to overwrite them for others.
        plgpu.commit_smem()
        for value, target in zip(given, self.affine_rows(scratch), strict=True):
            target[...] = (value * factor).astype(self.late_dtype)
        plgpu.barrier_arrive(scratch.prepared)

    def _multiply(self, team, turn, scratch: _Scratch, at: _At):
        """Returns `x W^T` of a row tile: (64, columns) in float32, not yet scaled."""
        teams = self.settings.teams
        step = turn * teams + team

        def product(accumulator):
            for p in range(self.parts):
                slot = self._slot(team, turn * self.parts + p)
                plgpu.barrier_wait(scratch.full.at[slot])
                if p == 0 and teams > 1:
                    _wait_if(step > 0, scratch.turn.at[team])
                weight = scratch.w.at[p].transpose((1, 0))
                plgpu.wgmma(accumulator, scratch.x.at[slot], weight)
                if p > 0:
                    plgpu.wgmma_wait(1)
                    self._release(team, turn, p - 1, scratch, at)
            return accumulator[...]

        accumulator = plgpu.ACC((ROWS, self.columns), jnp.float32)
        z = pl.run_scoped(product, accumulator)
        if teams > 1:
            following = scratch.turn.at[lax.rem(team + 1, teams)]
            _arrive_if(step + 1 < at.steps, following)
        self._release(team, turn, self.parts - 1, scratch, at)
        return z

    def _release(self, team, turn, p, scratch: _Scratch, at: _At):
        """Gives a part of x that was read back to the producer, if it needs it."""
        part = turn * self.parts + p
        needed = part + self.settings.stages < self._turns(team, at) * self.parts
        _arrive_if(needed, scratch.empty.at[self._slot(team, part)])

    def _turns(self, team, at: _At):
        """Returns the number of row tiles of a team."""
        teams = self.settings.teams
        return lax.div(at.steps - team + teams - 1, teams)

    def _finish(self, z, scale, to_fp8, tile: "_Tile", results: _Results, rows):
        """Normalizes, activates and stores a row tile."""
        want = self.want
        if self.w_scale_by_column:
            z = z * per_column(tile.column("w_scale"))
        if "bias" in self.table:
            z = z if scale is None else z * self._by_row(scale)
            z, scale = z + per_column(tile.column("bias")), None
        z, rstd, factor = self._normalize(z, scale, tile)
        if want.rstd:
            by_block = self.norm == "block" and self.settings.slabs > 1
            target = results.rstd.at[tile.at.slab] if by_block else results.rstd
            tile.store_rows(0, rstd, target, rows, by_slab=by_block)
        z = z.astype(self.late_dtype)
        store = tile.store
        # Piece by piece fewer values are alive at a time; a row scale needs all.
        size = self.settings.piece_bytes // (1 if self.writes_narrow else 2)
        size = self.columns if want.y_fp8 == "row" else size
        amax = None
        for start in range(0, self.columns, size):
            part = z[:, start : start + size]
            if want.xhat is not None:
                xhat = part * (1 / XHAT_SCALE_INV) if want.xhat == E4M3 else part
                store(xhat, results.xhat, rows, start)
            y = self._activate(part, factor, tile, start)
            if want.y:
                store(y, results.y, rows, start)
            if want.y_fp8 == "row" or want.y_amax:
                largest = jnp.max(jnp.abs(y), axis=1).astype(jnp.float32)
                amax = largest if amax is None else jnp.maximum(amax, largest)
            if want.y_fp8 == "row":
                to_fp8 = per_row(self._row_scale(amax, tile, results, rows), size)
            if want.y_fp8:
                store(y * to_fp8.astype(y.dtype), results.y_fp8, rows, start)
        if want.y_amax:
            target = results.y_amax.at[tile.at.slab]
            tile.store_rows(1, amax, target, rows, by_slab=True)

    def _row_scale(self, amax, tile: "_Tile", results: _Results, rows):
        """Stores the scales of the rows and returns their reciprocals."""
        if self.exchanges:
            (amax,) = tile.exchange(self.exchanges - 1, (amax,), jnp.maximum)
        scale_inv = _row_scale_inv(amax)
        tile.store_rows(2, scale_inv, results.y_scale, rows)
        return 1.0 / scale_inv

    def _activate(self, v, factor, tile: "_Tile", start: int):
        """Returns columns of the activations, from what the norm returned."""
        if self.has_affine:
            gamma, beta = tile.affine(start, v.shape[1])
            v = v * per_column(gamma) + per_column(beta)
        elif factor != 1.0:
            v = v * factor
        return activate_scaled(self.activation, v)

    def _normalize(self, z, scale, tile: "_Tile"):
        """Returns the normalized tile, 1 / deviation, and a factor still to apply.

        A scale of z is not applied to z: norms do not see it, but through epsilon.
        The factor is the activation's input scale, applied here if that is free.
        """
        factor = input_scale(self.activation)
        is_last = not self.has_affine and self.want.xhat is None
        here, later = (factor, 1.0) if is_last else (1.0, factor)
        if self.norm == "none":
            if scale is not None:
                z = z * self._by_row(scale * here)
            elif here != 1.0:
                z = z * here
            return z, None, later
        sums = [jnp.sum(z * z, axis=1)]
        if self.norm == "layer":
            sums.append(jnp.sum(z, axis=1))
        features = self.columns if self.norm == "block" else self.n
        if self.exchanges and self.norm != "block":
            sums = tile.exchange(0, sums, jnp.add)
        moment, *mean = (total * (1 / features) for total in sums)
        if mean:
            moment = jnp.maximum(moment - mean[0] * mean[0], 0.0)
        if scale is None:
            rstd = rate = lax.rsqrt(moment + self.epsilon)
        else:
            rstd = lax.rsqrt(scale * scale * moment + self.epsilon)
            rate = scale * rstd
        rate = rate if here == 1.0 else rate * here
        z = z * per_row(rate, self.columns)
        if mean:
            z = z - per_row(mean[0] * rate, self.columns)
        return z, rstd, later

    def _by_row(self, value):
        """Returns what multiplies a tile: a scalar as it is, rows broadcast."""
        return per_row(value, self.columns) if value.ndim else value


class _Tile:
    """A team's row tile: what it shares with shared memory and with other slabs."""

    def __init__(self, kernel: _Kernel, team, turn, scratch: _Scratch, at: _At):
        self._kernel, self._team, self._turn = kernel, team, turn
        self._scratch, self.at = scratch, at
        staged = {jnp.bfloat16: scratch.wide, E4M3: scratch.narrow}
        self._stores = {
            jnp.dtype(dtype): tiles.RowStore(staging.at[team])
            for dtype, staging in staged.items()
            if staging is not None
        }

    def column(self, name: str):
        """Returns this slab's part of what is given for each column."""
        source = self._kernel._table_row(self._scratch, name)
        return plgpu.load(source, layout=PER_COLUMN)

    def affine(self, start: int, size: int):
        """Returns gamma and beta of some columns, as `_prepare` left them."""
        rows = self._kernel.affine_rows(self._scratch)
        columns = pl.ds(start, size)
        return tuple(plgpu.load(row.at[columns], layout=PER_COLUMN) for row in rows)

    def x_scale(self):
        """Returns the scales of the tile's rows of x."""
        half = lax.rem(self._turn, 2)
        slot = 2 * self._team + half
        plgpu.barrier_wait(self._scratch.scale_full.at[slot])
        scale = plgpu.load(self._scratch.x_scale.at[self._team, half], layout=PER_ROW)
        turns = self._kernel._turns(self._team, self.at)
        _arrive_if(self._turn + 2 < turns, self._scratch.scale_empty.at[slot])
        return scale

    def store(self, tile, target, rows, start=0):
        """Starts storing columns of the tile in the target's dtype."""
        column = self.at.slab * self._kernel.columns + start
        self._stores[jnp.dtype(target.dtype)](
            tile.astype(target.dtype), target, rows, column
        )

    def store_rows(self, place, values, target, rows, *, by_slab=False):
        """Starts storing a value a row; slab 0 does it if all have the same."""
        staging = self._scratch.rows.at[self._team, place]
        staging[...] = values
        plgpu.commit_smem()

        def copy():
            plgpu.copy_smem_to_gmem(staging, target.at[rows])

        if by_slab or self._kernel.settings.slabs == 1:
            return copy()
        pl.when(self.at.slab == 0)(copy)

    def exchange(self, index, values, combine):
        """Returns one or two values a row, combined over the slabs.

        `index` counts a tile's exchanges. Two buffers are enough: who is one exchange
        ahead has everybody's part of the last one, so the one before was read.
        """
        s = self._kernel.settings
        half = lax.rem(self._turn * self._kernel.exchanges + index, 2)
        barrier = self._scratch.sums_full.at[2 * self._team + half]
        buffer = self._scratch.sums.at[self._team, half]
        # The unit that travels is a tile of 8 columns: four for either value.
        iota = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 1, layout=_WGMMA)
        is_first = iota < 4
        total = jnp.where(is_first, per_row(values[0], 8), per_row(values[-1], 8))
        own = total
        for distance in range(1, s.slabs):
            plgpu.async_store_smem(
                own,
                buffer.at[distance - 1],
                barrier,
                cluster_idx=lax.rem(self.at.slab + distance, s.slabs),
                cluster_dim="slab",
            )
        plgpu.barrier_wait(barrier)
        for distance in range(1, s.slabs):
            other = plgpu.load(buffer.at[distance - 1], layout=_WGMMA)
            total = combine(total, other)
        # Every column of a half holds the same value: a maximum picks it exactly.
        low = jnp.full((ROWS, 8), -jnp.inf, jnp.float32)
        low = plgpu.layout_cast(low, _WGMMA)
        first = jnp.max(jnp.where(is_first, total, low), axis=1)
        second = jnp.max(jnp.where(is_first, low, total), axis=1)
        return (first, second)[: len(values)]


def _present(values) -> list:
    return [value for value in values if value is not None]


def _fill(like, values):
    """Returns `like` with its values that are not None replaced by the next ones."""
    return type(like)(*(None if v is None else next(values) for v in like))


def _is_vector(scale) -> bool:
    return scale is not None and scale.shape[0] > 1


def _product_of_scalars(*scales):
    """Returns the product of those that are one number, None if there are none."""
    numbers = [s[0] for s in scales if s is not None and s.shape[0] == 1]
    return math.prod(numbers[1:], start=numbers[0]) if numbers else None


def _wait_if(condition, barrier):
    @pl.when(condition)
    def _():
        plgpu.barrier_wait(barrier)


def _arrive_if(condition, barrier):
    @pl.when(condition)
    def _():
        plgpu.barrier_arrive(barrier)


def _row_scale_inv(amax):
    """Returns the power-of-two `scale_inv` of rows of that amax, as `fp8` has it."""
    least = jnp.maximum(amax * (1 / fp8_max(E4M3)), _MIN_ROW_SCALE)
    # Rounds up to a power of two; NaN and infinity stay what they are.
    bits = lax.bitcast_convert_type(least, jnp.int32) + 0x007FFFFF
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
