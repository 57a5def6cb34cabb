"""The planted model of generated click logs, and the examples that it labels.

It has the three things that ranking models learn,

    logit = bias + sum_j f_j(z_j) + c z_0 z_1      dense columns, z_j ~ N(0, 1)
                 + sum_f effect_f[id_f]            every id has an effect
                 + sum_(f,g) <v_f[id_f], v_g[id_g]>   low-rank pairs of fields
    label ~ Bernoulli(sigmoid(logit)),

and ids follow a power law, `P(k) ~ k^-ZIPF`. Rare ids have smaller effects, as no
model could learn them from a few clicks.

B is the batch size, n the number of dense columns, F the number of fields, R the latent
rank, V the ids of all tables that have effects of their own (`_planted`), W those of
the interacting fields.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from loka_jax.data.config import DataConfig

NUM_DENSE = 13
ZIPF = 1.1  # exponent of the ids' power law
LATENT_DIM = 4  # rank of the interactions
_SEED = 0  # of the planted model; the seed of a run draws the examples
NUM_INTERACTING = 8  # fields with smaller tables, paired in a ring
SHARES = (0.4, 0.4, 0.2)  # of the logit's variance: dense, ids, pairs
# Streams of examples, by number.
STREAMS = {"train": 0, "valid": 1, "test": 2, "scaling": 3, "measure": 4}
_LARGEST = np.float32(2**31 - 128)  # the last before int32 ends
# Ids of a table with effects of their own. A larger table has those of its first ids
# over and over, so that the planted model is small beside it.
_MOST_PLANTED = 2**26
_REPEATED = 2**22


class World(NamedTuple):
    """The planted model's parameters.

    Attributes:
        dense_waves: amplitude, frequency, phase and slope of each `f_j`.
        effects: the effect of each id.
        latents: the latent vectors of the interacting fields' ids.
        weights: the factors of the logit's three parts.
        bias: sets the mean probability to `click_rate`.
    """

    dense_waves: Float[Array, "4 n"]
    effects: Float[Array, "V"]
    latents: Float[Array, "W R"]
    weights: Float[Array, "3"]
    bias: Float[Array, ""]


def interacting_fields(num_fields: int) -> range:
    """Returns the fields that interact in pairs in the planted model."""
    first = max(0, num_fields * 3 // 4 - NUM_INTERACTING // 2)
    return range(first, min(first + NUM_INTERACTING, num_fields))


def zipf_ids(uniform: Float[Array, "B F"], rows: tuple[int, ...]) -> Int[Array, "B F"]:
    """Returns ids in 1..rows-1 with `P(k) ~ k^-ZIPF`, by the inverse CDF.

    The power law is continuous on [1, rows) and rounded down. Id 0 stands for values
    outside a vocabulary, which generated logs do not have.
    """
    log_rows = jnp.log(jnp.asarray(rows, jnp.float32))
    q = 1.0 - ZIPF
    log_x = jnp.log1p(uniform * jnp.expm1(q * log_rows)[None, :]) / q
    # float32 rounding may reach `rows` itself.
    last = jnp.asarray(rows, jnp.int32)[None, :] - 1
    x = jnp.minimum(jnp.exp(log_x), _LARGEST)
    return jnp.clip(x.astype(jnp.int32), 1, last)


def draw(config: DataConfig, key: Array, index: UInt[Array, "B"]):
    """Returns z [B, n], ids [B, F] and a uniform [B] for the examples `index`."""
    num_fields = len(config.rows)
    width = NUM_DENSE + num_fields + 1

    def draw_example(i):
        # Half a step above the grid of 2^-23, so that 0 and 1 never occur.
        bits = jax.random.bits(jax.random.fold_in(key, i), (width,)) >> 9
        return (bits.astype(jnp.float32) + 0.5) * 2.0**-23

    uniform = jax.vmap(draw_example)(index)
    z = jnp.sqrt(2.0) * jax.lax.erf_inv(2.0 * uniform[:, :NUM_DENSE] - 1.0)
    ids = zipf_ids(uniform[:, NUM_DENSE:-1], config.rows)
    return z, ids, uniform[:, -1]


def _planted(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many ids of each table have effects of their own; int32 in all."""
    most = _MOST_PLANTED if len(rows) < 2**31 // _MOST_PLANTED else _REPEATED
    return tuple(count if count <= most else _REPEATED for count in rows)


def _effect_rows(
    ids: Int[Array, "B F"], rows: tuple[int, ...], planted: tuple[int, ...]
) -> Int[Array, "B F"]:
    """Returns the place of each id's effects among those of all tables."""
    if planted != rows:
        ids = ids % np.array(planted, np.int32)[None, :]
    return ids + np.cumsum((0, *planted[:-1]), dtype=np.int32)[None, :]


def _parts(
    config: DataConfig, world: World, z: Float[Array, "B n"], ids: Int[Array, "B F"]
) -> Float[Array, "B 3"]:
    """Returns the logit's dense, id and pair parts, not yet weighted."""
    amplitude, frequency, phase, slope = (w[None, :] for w in world.dense_waves)
    waves = amplitude * jnp.sin(frequency * z + phase) + slope * z
    dense = jnp.sum(waves, axis=-1) + jnp.tanh(z[:, 0]) * jnp.tanh(z[:, 1])
    planted = _planted(config.rows)
    effects = world.effects[_effect_rows(ids, config.rows, planted)]
    fields = interacting_fields(len(config.rows))
    part = slice(fields.start, fields.stop)
    latent_rows = _effect_rows(ids[:, part], config.rows[part], planted[part])
    latents = world.latents[latent_rows]  # [B, fields, R]
    pairs = jnp.sum(latents * jnp.roll(latents, 1, axis=1), axis=(1, 2))
    return jnp.stack([dense, jnp.sum(effects, axis=-1), pairs], axis=-1)


def true_logit(
    config: DataConfig, world: World, z: Float[Array, "B n"], ids: Int[Array, "B F"]
) -> Float[Array, "B"]:
    """Returns the planted model's logits of examples."""
    parts = _parts(config, world, z, ids)
    return jnp.sum(parts * world.weights[None, :], axis=-1) + world.bias


def make_world(config: DataConfig) -> World:
    """Returns the planted model, scaled to `signal` and `click_rate`."""
    rank = np.concatenate([np.arange(count) for count in _planted(config.rows)])
    fade = jnp.asarray(1.0 / np.sqrt(1.0 + rank / 30.0), jnp.float32)
    return _scale_world(config, _draw_world(config, fade))


# What has a value for each row is an argument: as constants of tables of 1e8 rows they
# make a program of a gigabyte, to be compiled and kept in JAX's cache.
@functools.partial(jax.jit, static_argnames="config")
def _draw_world(config: DataConfig, fade: Float[Array, "R"]) -> World:
    keys = jax.random.split(jax.random.key(_SEED), 6)
    fields = interacting_fields(len(config.rows))
    planted = _planted(config.rows)
    size = (sum(planted[fields.start : fields.stop]), LATENT_DIM)
    waves = [
        jax.random.normal(keys[0], (NUM_DENSE,)),
        jax.random.uniform(keys[1], (NUM_DENSE,), minval=0.5, maxval=1.5),
        jax.random.uniform(keys[2], (NUM_DENSE,), maxval=2 * math.pi),
        0.5 * jax.random.normal(keys[3], (NUM_DENSE,)),
    ]
    return World(
        dense_waves=jnp.stack(waves),
        effects=fade * jax.random.normal(keys[4], fade.shape),
        latents=jax.random.normal(keys[5], size),
        weights=jnp.ones(3),
        bias=jnp.zeros(()),
    )


def _scale_world(config: DataConfig, world: World) -> World:
    """Gives each part its share of the variance, then finds the bias by bisection."""
    key = jax.random.fold_in(jax.random.key(_SEED), STREAMS["scaling"])

    @jax.jit
    def sample(world: World):
        index = jnp.arange(1 << 16, dtype=jnp.uint32)
        z, ids, _ = draw(config, key, index)
        return _parts(config, world, z, ids)

    parts = np.asarray(sample(world), np.float64)
    deviations = parts.std(axis=0)
    is_constant = deviations < 1e-6  # as without pairs, or with one id a table
    weights = np.where(is_constant, 0.0, np.sqrt(SHARES) / np.maximum(deviations, 1e-6))
    weights *= config.signal / max((parts @ weights).std(), 1e-6)
    logit = parts @ weights
    low, high = -40.0, 40.0
    for _ in range(60):
        bias = (low + high) / 2
        too_few = np.mean(1 / (1 + np.exp(-logit - bias))) < config.click_rate
        low, high = (bias, high) if too_few else (low, bias)
    return world._replace(
        weights=jnp.asarray(weights, jnp.float32), bias=jnp.asarray(bias, jnp.float32)
    )


_EXACT = 4096  # the first ids, one by one; further ones in ranges of equal odds
_RANGES = 2048


def expected_distinct(rows: int, draws: int, zipf: float | None) -> float:
    """Returns the distinct ids among independent draws, `sum_k 1 - (1 - p_k)^draws`.

    Args:
        rows: of a table; ids are 1..rows-1.
        zipf: exponent of `P(k) ~ k^-zipf`, as `zipf_ids` draws it; None if nothing is
            known, for the most that there can be.
    """
    if zipf is None:
        return float(min(rows, draws))
    if rows <= 2:
        return 1.0
    edges = np.arange(1.0, min(rows, _EXACT) + 1)
    if rows > _EXACT:
        further = np.unique(np.round(np.geomspace(_EXACT, rows, _RANGES)))
        edges = np.append(edges, further[1:])
    ids = np.diff(edges)
    # The share of the continuous power law on [1, rows) below each edge.
    q = 1.0 - zipf
    below = np.expm1(q * np.log(edges)) / np.expm1(q * math.log(rows))
    odds = np.diff(below) / ids
    return float(np.sum(-np.expm1(draws * np.log1p(-odds)) * ids))
