"""How far results are from the reference, compared with what rounding explains.

Of each result, and of the same under perturbations that stand for rounding:

    row       relative L2 error of each row
    tile      of each tile of 64 x 64, all rows scaled to one size
    gain      least-squares slope of the error on the reference, over 64 rows or columns
    offset    mean error over 64 rows or columns, in units of the root mean square
    cast      slope of the error of a product on what it changes if an operand is not
              cast: 0 if it is cast as the recipe says, 1 if it is not
    share     slope of the error of drhs on what 64 rows add to it: 1 if it lacks them

What is allowed is a floor and a few times what the perturbations do. The floors are
about one rounding to bfloat16 (2^-9, or 0.2 %); those of `cast` and `share` lie well
between 0 and 1.

`scores` runs on the device and leaves a number for each place; `worst_finding` judges
them on the host, in NumPy: its many small reductions took half of the compilation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax.measure.check_reference import Expected, Flip

TILE = 64
INFERENCE = "inference "


class Limits(NamedTuple):
    """What is allowed of a score: floor + slack x the score under perturbations."""

    floor: float
    slack: float


_ROUNDING = Limits(0.003, 2.0)
_LIMITS = {"cast": Limits(0.25, 2.0), "share": Limits(0.25, 6.0)}
_FLIPS = 1.5  # of the code that matters most to a row, times the slack: three flip


class Scores(NamedTuple):
    """A result's scores of one kind, by place; arrays on the device or the host.

    Attributes:
        values: (1 + p, places): of the result, and of p perturbations.
        flips: (places,) or a number: noise that the perturbations may lack.
    """

    values: Any
    flips: Any


class Finding(NamedTuple):
    """The worst of a result's scores of one kind.

    Attributes:
        kind: of the score; for casts followed by the operand.
        excess: the score over what is allowed; infinite instead of NaN.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    excess: float
    value: float
    allowed: float
    index: int

    def __str__(self) -> str:
        """Returns what is wrong, and where."""
        kind, _, operand = self.kind.partition(" ")
        off = f"by {self.value:.2g}, above {self.allowed:.2g}"
        place = f"{self.name}{self._place(kind)}"
        relative = f"{place} is off {off} (relative L2)"
        return {
            "row": relative,
            "tile": relative,
            "gain": f"{place} is too large or too small {off}",
            "offset": f"{place} is shifted {off} of its size",
            "cast": f"{place} is off {off} along the cast of {operand}",
            "share": f"{place}: the part of these rows is off {off}",
        }[kind]

    def _place(self, kind: str) -> str:
        """Returns the rows and columns in which the score was the worst."""
        index = self.index
        rows, columns = (1, *self.shape)[-2:]
        row_blocks, column_blocks = -(-rows // TILE), -(-columns // TILE)
        match kind:
            case "row":
                return f"[{index}]" if len(self.shape) > 1 else ""
            case "tile":
                at = divmod(index, column_blocks)
                return f"[{_block(at[0], rows)}, {_block(at[1], columns)}]"
            case "gain" | "offset" if index >= row_blocks:
                return f"[:, {_block(index - row_blocks, columns)}]"
            case "gain" | "offset":
                return f"[{_block(index, rows)}]"
            case "share":
                return f", rows {index * TILE} to {(index + 1) * TILE} of lhs"
        return ""


def _block(index: int, size: int) -> str:
    return f"{index * TILE}:{min((index + 1) * TILE, size)}"


def scores(
    results: Mapping[str, Array],
    exact: Expected,
    perturbed: Sequence[Mapping[str, Array]],
) -> dict[str, dict[str, Scores]]:
    """Returns the scores by result and kind."""
    by_result = {}
    for name, result in results.items():
        of = name if name in exact.results else name.removeprefix(INFERENCE)
        ref = exact.results[of]
        others = [result, *(other[of] for other in perturbed)]
        kinds = _matrix_scores(ref, others, exact.flips.get(of))
        for (changed, operand), change in exact.uncast.items():
            if changed == of:
                kinds[f"cast {operand}"] = _cast_score(ref, others, change)
        if of == "drhs":
            kinds["share"] = _share_score(exact.lhs, exact.g, ref, others)
        by_result[name] = kinds
    return by_result


def worst_finding(
    by_result: Mapping[str, Mapping[str, Scores]], shapes: Mapping[str, tuple[int, ...]]
) -> Finding:
    """Returns the worst of all scores."""
    with np.errstate(all="ignore"):  # what is not finite counts as the worst
        findings = [
            Finding(name, shapes[name], kind, *_worst(kind, by_place))
            for name, kinds in by_result.items()
            for kind, by_place in kinds.items()
        ]
    return max(findings, key=lambda finding: finding.excess)


def _matrix_scores(
    ref: Array, others: list[Array], flips: Flip | None
) -> dict[str, Scores]:
    """Returns the scores of rows, tiles and blocks of a result."""
    ref, errors = _errors(ref, others)
    lengths = jnp.sqrt(jnp.sum(errors**2, axis=2))
    noise = jnp.mean(lengths[1:] ** 2, axis=0)
    size = jnp.sqrt(jnp.sum(ref**2, axis=1) + noise)
    unit = jnp.where(size > 0, size, 1.0)
    scale = (ref.shape[1] ** 0.5 / unit)[:, None]
    # Where nothing is expected any error is infinitely large.
    is_nothing = (size == 0)[None] & (lengths > 0)
    parts = jax.vmap(_blocks, in_axes=(None, 0))(ref * scale, errors * scale[None])
    parts["row"] = jnp.where(is_nothing, jnp.inf, lengths / unit[None])
    moved = dict.fromkeys(parts, jnp.float32(0))
    if flips is not None:
        # Where few codes make a result, perturbations may miss the one that flips.
        tile = _FLIPS * jnp.sqrt(jnp.mean((flips.tile / unit) ** 2))
        line = tile / TILE**0.5
        row = _FLIPS * flips.row / unit
        moved = {"tile": tile, "gain": line, "offset": line, "row": row}
    return {
        kind: Scores(x.reshape(len(x), -1), moved[kind]) for kind, x in parts.items()
    }


def _cast_score(ref: Array, others: list[Array], change: Array) -> Scores:
    """Returns how much of an operand's cast a product lacks; of one place."""
    _, errors = _errors(ref, others)

    def mean_slope(axis: int) -> Array:
        total = jnp.sum(change**2, axis=axis - 1)[None]
        along = jnp.sum(errors * change[None], axis=axis)
        return jnp.abs(jnp.mean(along / jnp.where(total > 0, total, jnp.inf), axis=1))

    # One code that flips moves a row or a column, and hardly the mean over the others.
    slopes = jnp.minimum(mean_slope(1), mean_slope(2))
    return Scores(slopes[:, None], jnp.float32(0))


def _share_score(lhs: Array, g: Array, ref: Array, others: list[Array]) -> Scores:
    """Returns what share of some rows is missing in lhs^T g, or added to it."""
    _, errors = _errors(ref, others)
    on_rows = jnp.einsum("mk,ekn,mn->em", lhs, errors, g)
    whole = jnp.sum(lhs**2, axis=1) * jnp.sum(g**2, axis=1)
    total = _tile_sums(whole[:, None])[:, 0]
    along = jax.vmap(_tile_sums)(on_rows[:, :, None])[:, :, 0]
    total = jnp.where(total > 0, total, 1.0)
    return Scores(jnp.abs(along) / total[None], jnp.float32(0))


def _errors(ref: Array, others: list[Array]) -> tuple[Array, Array]:
    """Returns the reference and the errors as matrices, the errors stacked."""
    ref = jnp.atleast_2d(ref)
    others = [jnp.atleast_2d(x).astype(jnp.float32) for x in others]
    # Written once: else each of many reductions would compute them again.
    return jax.lax.optimization_barrier((ref, jnp.stack(others) - ref[None]))


def _blocks(ref: Array, error: Array) -> dict[str, Array]:
    """Returns scores of tiles, and of blocks of rows followed by blocks of columns.

    The rows of the reference have a root mean square of at most 1.
    """

    def along(x: Array) -> Array:
        sums = _tile_sums(x)
        return jnp.concatenate([jnp.sum(sums, axis=1), jnp.sum(sums, axis=0)])

    count = along(jnp.ones_like(ref))
    full_tile = min(TILE, ref.shape[0]) * min(TILE, ref.shape[1])
    # Blocks that are nearly zero have no slope.
    references = jnp.maximum(along(ref**2), 0.1 * count)
    return {
        # Partial tiles count as much as their elements: few say little.
        "tile": jnp.sqrt(_tile_sums(error**2) / full_tile),
        "gain": jnp.abs(along(error * ref) / references),
        "offset": jnp.abs(along(error) / count),
    }


def _typical_noise(scores: np.ndarray) -> np.ndarray:
    """Returns the noise at each place, at least that of most places."""
    square = np.mean(scores**2, axis=0)
    # The geometric mean: some places with much noise hardly count.
    usual = np.exp(np.mean(np.log(square + 1e-8)))
    return np.sqrt(square + usual)


def _worst(kind: str, scores: Scores) -> tuple[float, float, float, int]:
    """Returns excess, value, allowed and index of the worst score of a kind."""
    values, perturbed = scores.values[0], scores.values[1:]
    # Of gain, offset and cast there are few places: the largest noise is that of all.
    is_many = kind in ("row", "tile", "share")
    noise = _typical_noise(perturbed) if is_many else np.max(perturbed)
    limits = _LIMITS.get(kind.partition(" ")[0], _ROUNDING)
    allowed = limits.floor + limits.slack * (noise + scores.flips)
    values, allowed = np.broadcast_arrays(values, allowed)
    excess = values / allowed
    excess = np.where(np.isnan(excess), np.inf, excess)
    at = int(np.argmax(excess))
    return float(excess[at]), float(values[at]), float(allowed[at]), at


def _tile_sums(x: Float[Array, "m n"]) -> Float[Array, "a b"]:
    """Returns the sums over tiles; the last ones may be partial."""
    m, n = x.shape
    x = jnp.pad(x, ((0, -m % TILE), (0, -n % TILE)))
    tiles = x.reshape(x.shape[0] // TILE, TILE, x.shape[1] // TILE, TILE)
    return jnp.sum(tiles, axis=(1, 3))
