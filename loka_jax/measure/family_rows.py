"""What kernels of embeddings, their rows, lists and the wire are checked on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loka_jax import xla
from loka_jax.fp8 import E4M3
from loka_jax.measure.check_families import (
    BF16,
    EXACT,
    SUMS,
    Case,
    by_both,
    normal,
    uneven,
)
from loka_jax.normed import NormName, NormVectors
from loka_jax.ops import embedding, exchange, interaction, row_codec, row_rounding
from loka_jax.ops import gated_norm as gated_norm_ops
from loka_jax.ops import joined_norm as joined_norm_ops
from loka_jax.ops.embedding import BAD_ID, Rounded
from loka_jax.ops.row_codec import Codec
from loka_jax.ops.row_order import Order
from loka_jax.optim.rows import RowwiseAdagrad, RowwiseAdagradState, Sgd
from loka_jax.packed import Format, Packing
from loka_jax.tails import Dropout
from loka_jax.triton import (
    dot_features,
    gated_norm,
    joined_norm,
    merge,
    packed,
    route,
    row_update,
    row_wire,
)

# The kernels keep y rounded to bfloat16, XLA in float32: dz is 2^-8 |y| off, |y| to 4.
_ROUNDED_Y = 2.0**-6


def joined_norms() -> list[Case]:
    """Returns the cases of norms of joined embeddings, either way."""
    counts, shape, epsilon = (3, 5), (37, 8, 40), joined_norm_ops.EPSILON

    def draw(*names: str):
        parts = tuple(uneven(37, count, 40, seed=count) for count in counts)
        vectors = {name: normal(40, seed=i) for i, name in enumerate(names)}
        arrays = uneven(*shape, seed=1), normal(*shape, seed=2, dtype=BF16)
        return parts, *arrays, NormVectors(**vectors)

    def ours(norm, parts, x, dy, vectors):
        run = functools.partial(joined_norm.joined_norm, norm=norm, epsilon=epsilon)
        y, *kept = run(parts, x, vectors)
        run = functools.partial(joined_norm.joined_norm_backward, dy, *kept, vectors)
        run = functools.partial(run, counts=counts, norm=norm)
        return y, *run(), run(with_dx=False)[0]

    def theirs(norm, parts, x, dy, vectors):
        run = functools.partial(joined_norm_ops.joined_norm, norm=norm)
        run = functools.partial(run, implementation="xla")
        y, pull = jax.vjp(run, parts, x, vectors)
        dparts, *others = pull(dy)
        return y, dparts, *others, dparts

    def case(name: str, norm: NormName, *vectors: str) -> Case:
        by_kernel, by_xla = (functools.partial(run, norm) for run in (ours, theirs))
        drawn = functools.partial(draw, *vectors)
        return Case(name, drawn, by_kernel, by_xla, _ROUNDED_Y)

    return [
        case("joined embeddings", "block"),
        case("joined embeddings, layer norm", "layer", "gamma", "beta"),
    ]


def gated_norms() -> list[Case]:
    """Returns the cases of gated norms, either way, with dropout and without."""
    rows, n, epsilon = 37, 72, 1e-6

    def draw(rate: float):
        u, x = (uneven(rows, n, seed=seed) for seed in (0, 1))
        vectors = NormVectors(None, *(normal(n, seed=seed) for seed in (2, 3)))
        words = np.asarray([5, 6], np.uint32)
        dropout = Dropout(jnp.asarray(words), rate) if rate else None
        return normal(rows, 3 * n, seed=4, dtype=BF16), u, x, vectors, dropout

    def ours(dy, *operands):
        y = gated_norm.gated_norm(*operands, epsilon=epsilon)
        return y, *gated_norm.gated_norm_backward(dy, *operands, epsilon=epsilon)

    def theirs(dy, u, x, vectors, dropout):
        run = functools.partial(gated_norm_ops.gated_norm, dropout=dropout)
        y, pull = jax.vjp(functools.partial(run, implementation="xla"), u, x, vectors)
        return y, *pull(dy)

    return [
        Case(name, functools.partial(draw, rate), ours, theirs)
        for name, rate in (("gated norm", 0.0), ("gated norm, dropout", 0.25))
    ]


def dot_features_cases() -> list[Case]:
    """Returns the cases of the products of pairs, either way."""
    return [_dot_features_case("i > j"), _dot_features_case("i <= j")]


def _dot_features_case(pairs: dot_features.Pairs) -> Case:
    batch, fields, dim = 17, 26, 16
    width = interaction.padded(dim + dot_features.count(fields + 1, pairs))

    def draw():
        bottom = normal(batch, dim, dtype=BF16)
        return bottom, uneven(batch, fields, dim), normal(batch, width, dtype=BF16)

    def ours(bottom, embeddings, g):
        options: Any = dict(width=width, pairs=pairs)
        out = dot_features.dot_features(bottom, embeddings, **options)
        back = dot_features.dot_features_backward(bottom, embeddings, g, pairs=pairs)
        return out, back

    def theirs(bottom, embeddings, g):
        options: Any = dict(implementation="xla", pairs=pairs)
        run = functools.partial(interaction.dot_features, **options)
        out, pull = jax.vjp(run, bottom, embeddings)
        return out, pull(g)

    return Case(f"pairs of vectors, {pairs}", draw, ours, theirs)


def row_updates() -> list[Case]:
    """Returns the cases of sums of rows, and of updates by each optimizer."""
    count, rows, dim = 530, 200, 16
    draws = np.random.default_rng(0)
    # Long runs, short ones, rows that nobody asked for, and ids of no row.
    ids = np.where(draws.random(count) < 0.5, 7, draws.integers(0, rows, count))
    ids = np.where(draws.random(count) < 0.1, BAD_ID, ids)
    ids[:2] = rows - 1  # the last row
    order = np.argsort(ids, kind="stable")
    entries = tuple(x.astype(np.int32) for x in (ids[order], order))

    def draw():
        table, grads = normal(rows, dim, seed=1), normal(count, dim, seed=2)
        return table, RowwiseAdagradState(jnp.ones(rows)), grads

    def draw_narrow():
        # Sums of whole numbers are exact, and so are powers of two times them.
        grads = np.round(3 * normal(count, dim, seed=2))
        order = Order(4 * rows, 256)
        rounding = row_rounding.of_step(7, jnp.asarray(3), order, dim, 192)
        return normal(rows, dim, seed=1, dtype=BF16), (), grads, rounding

    def update(optimizer, lr, table, state, grads, rounding=None):
        operands = table, state, *map(jnp.asarray, entries), grads, jnp.float32(lr)
        return optimizer.update_in_place(*operands, rounding)

    def update_by_xla(optimizer, lr, table, state, grads, rounding=None):
        rounded = Rounded(optimizer, rounding) if rounding else optimizer
        operands = table, state, jnp.asarray(ids, jnp.int32), grads, rounded
        lr = jnp.float32(lr)
        return embedding.update_rows(*operands, lr, implementation="xla")

    def case(name, draw, *optimizer, noise=SUMS):
        ours = functools.partial(update, *optimizer)
        theirs = functools.partial(update_by_xla, *optimizer)
        return Case(name, draw, ours, theirs, noise)

    def sums_by_xla(*x):
        return _of_runs(x[0], embedding.sum_sorted(*x, implementation="xla").grads)

    adagrad = RowwiseAdagrad(eps=1e-6, initial_accumulator=0.1)
    return [
        Case(
            "sums of rows",
            lambda: (*entries, normal(count, dim, dtype=BF16)),
            lambda *x: _of_runs(x[0], row_update.sum_runs(*x)),
            sums_by_xla,
            SUMS,
        ),
        case("AdaGrad", draw, adagrad, 0.5),
        case("SGD", lambda: (draw()[0], (), draw()[2]), Sgd(), 0.5),
        case("SGD, rounded at random", draw_narrow, Sgd(), 2.0**-9, noise=EXACT),
    ]


def _of_runs(ids: Array, sums: Array) -> Array:
    """Returns the sums at the last positions of runs, and zeros elsewhere."""
    ends = jnp.append(ids[1:] != ids[:-1], True) & (ids != BAD_ID)
    return jnp.where(ends[:, None], sums, 0.0)


def routes() -> list[Case]:
    """Returns the cases of lists that are too short, and long enough."""
    owners, part, count = 3, 300, 5000
    places = np.random.default_rng(0).integers(0, owners * part, count)
    places = np.where(np.arange(count) % 5, places, owners * part)  # of no owner
    order = np.argsort(places, kind="stable")
    operands = places[order].astype(np.uint32), order.astype(np.int32)

    def case(capacity: int) -> Case:
        how = dict(owners=owners, part=part, capacity=capacity)
        ours = lambda *x: route.lists(*x, **how)  # noqa: E731
        theirs = functools.partial(exchange.lists_by_xla, **how)
        return Case(f"lists of {capacity}", lambda: operands, ours, theirs, EXACT)

    return [case(24), case(500)]


def merges() -> list[Case]:
    """Returns the case of lists of which some entries are unused."""
    count, capacity = 3, 350
    draws = np.random.default_rng(0)
    lists = draws.integers(0, 500, (count, capacity))
    used = draws.integers(0, capacity, (count, 1))
    lists = np.where(np.arange(capacity) < used, lists, BAD_ID)
    lists = np.sort(lists, axis=1).astype(np.int32)

    def theirs(lists):
        positions = jnp.arange(lists.size, dtype=jnp.int32)
        return tuple(jax.lax.sort((lists.ravel(), positions), num_keys=1))

    return [Case("ascending lists", lambda: (lists,), merge.merge_lists, theirs, EXACT)]


def row_wires() -> list[Case]:
    """Returns the cases of rows in each codec, packed and spread."""
    return [case for codec in ("bf16", "e4m3", "int8") for case in _row_wires_of(codec)]


def _row_wires_of(codec: Codec) -> list[Case]:
    lists, capacity, dim, rows = 3, 24, 12, 50
    slots = _numbers((1000,), lists * capacity)

    def draw():
        return uneven(rows, dim, dtype="f4"), _numbers((lists, capacity), rows)

    def draw_payload():
        how: Any = dict(codec=codec, implementation="xla")
        return jax.jit(functools.partial(row_codec.gather, **how))(*draw()), slots

    def case(what, draw, ours, theirs, **how):
        ours = functools.partial(ours, codec=codec, **how)
        theirs = functools.partial(theirs, codec=codec, implementation="xla", **how)
        return Case(f"rows in {codec}, {what}", draw, ours, theirs, EXACT)

    return [
        case("packed", draw, row_wire.encode, row_codec.gather),
        case("spread", draw_payload, row_wire.decode, row_codec.scatter, dim=dim),
    ]


def _numbers(shape: tuple[int, ...], below: int) -> np.ndarray:
    """Returns numbers below a limit, some of them of nothing; the last is the last."""
    draw = np.random.default_rng(0)
    found = draw.integers(0, below, shape)
    bad = draw.choice([BAD_ID, -1, below], shape)
    found = np.where(draw.random(shape) < 0.2, bad, found)
    found.flat[-1] = below - 1
    return found.astype(np.int32)


_WORDS = np.array([3, 5], np.uint32)  # any: both round by the same


def packings() -> list[Case]:
    """Returns the cases of vectors in each format: packed, added up, unpacked."""
    return [*_packings_of("int8"), *_packings_of("e4m3")]


def _packings_of(format: Format) -> list[Case]:
    packing = Packing(9001, 4, 64, format)

    def draw():
        # Blocks of different sizes, one in seven of zeros.
        x, block = normal(packing.size), np.arange(packing.size) // packing.block
        return (x * np.exp2(-(block % 8)).astype("f4") * (block % 7 != 6),)

    def draw_packed():
        return (jax.jit(lambda x: xla.pack(x, jnp.asarray(_WORDS), packing))(*draw()),)

    def run(name, provider, x):
        if name == "unpack":
            return provider.unpack(x, packing)
        rows = getattr(provider, name)(x, jnp.asarray(_WORDS), packing)
        return _codes_and_scales(rows, packing)

    draws = {"pack": draw, "sum_packed": draw_packed, "unpack": draw_packed}
    return [
        by_both(f"{n} in {format}", draw, functools.partial(run, n), packed, SUMS)
        for n, draw in draws.items()
    ]


def _codes_and_scales(rows: Array, packing: Packing) -> tuple[Array, Array]:
    """Returns what the bytes of packed parts stand for."""
    dtype = jnp.int8 if packing.format == "int8" else E4M3
    codes = jax.lax.bitcast_convert_type(rows[:, : packing.part], dtype)
    scales = rows[:, packing.part :].reshape(len(rows), packing.blocks, -1)
    return codes, jax.lax.bitcast_convert_type(scales, jnp.float32)
