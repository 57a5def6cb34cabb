"""Rows of histories in jagged batches, and tokens that stand before or after them.

C is the number of rows, B that of sequences, N of targets, each with L tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from loka_jax import jagged
from loka_jax.jagged import Visibility
from loka_jax.ops.distinct_rows import distinct_rows

_MULTIPLE = 128  # of rows: a block of them then has no tokens


class Histories(NamedTuple):
    """Where histories lie among rows, and which of these precede each target.

    Attributes:
        offsets: history b is the rows `offsets[b]` to `offsets[b + 1]`.
        of: the history of each target, in rising order; B of padding.
        reach: the first row of it that does not precede the target.
    """

    offsets: Int32[Array, " B_plus_1"]
    of: Int32[Array, " N"]
    reach: Int32[Array, " N"]

    def newest(
        self, num_rows: int, most: int | None = None
    ) -> tuple[Int32[Array, " n"], "Histories"]:
        """Returns the newest rows of each history, and where these lie.

        Rows beyond the last history are -1, see `distinct_rows`.

        Args:
            num_rows: C.
            most: rows of a history that are kept; all if None.
        """
        count = num_rows if most is None else most
        bound = (len(self.offsets) - 1) * count
        bound = min(num_rows, -(-bound // _MULTIPLE) * _MULTIPLE)
        lengths = jnp.minimum(jnp.diff(self.offsets), count)
        return self._taken(self.offsets[1:] - lengths, lengths, bound)

    def _taken(
        self, starts: Array, lengths: Array, most: int
    ) -> tuple[Int32[Array, " n"], "Histories"]:
        rows, offsets = jagged.taken(starts, lengths, most)
        of = jnp.minimum(self.of, len(lengths) - 1)
        place = self.reach - (starts - offsets[:-1])[of]
        reach = jnp.clip(place, offsets[:-1][of], offsets[1:][of])
        return rows, Histories(offsets, self.of, reach)


def histories_of(
    offsets: Int32[Array, " B_plus_1"],
    targets: Int32[Array, " N"],
    num_rows: int,
    *,
    contexts: int,
    candidates: Int32[Array, " B"] | None,
) -> tuple[Int32[Array, " C"], Histories]:
    """Returns the rows of histories among those of sequences, and where they lie.

    Rows beyond the last history are -1, see `distinct_rows`.

    Args:
        offsets: sequence b is the rows `offsets[b]` to `offsets[b + 1]`.
        targets: rows in rising order; those of padding, which are 0, follow.
        contexts: rows of a sequence that come before its history.
        candidates: rows of each sequence that come after it; None for none.
    """
    is_target = (targets > 0) | (jnp.arange(len(targets)) == 0)
    of = jagged.sequence_of(offsets, targets)
    of = jnp.where(is_target, of, len(offsets) - 1)
    lengths = jnp.diff(offsets) - contexts
    lengths = lengths if candidates is None else lengths - candidates
    starts = offsets[:-1] + contexts
    within = Histories(offsets, of, targets)
    return within._taken(starts, jnp.maximum(lengths, 0), num_rows)


def tokens_visibility(
    histories: Histories,
    queries: tuple[Int32[Array, " Q"], Histories],
    num_rows: int,
    num_tokens: int,
) -> Visibility:
    """Returns what rows, and tokens after them, see of both.

    A row sees those before it in its history, and itself; a token those that precede
    its target, the tokens before it of the same target, and itself.

    Args:
        queries: rows that see, and where these lie, see `Histories.newest`.
        num_rows: C.
        num_tokens: L.
    """
    offsets, of, reach = histories
    rows, kept = queries
    of_rows = jagged.kept_visibility(offsets, rows, kept.offsets, num_rows)
    is_target = of < len(offsets) - 1
    start = jnp.where(is_target, offsets[of], num_rows)
    end = jnp.where(is_target, reach, num_rows)
    first, last = (jnp.repeat(x, num_tokens) for x in (start, end))
    of_tokens = jagged.span_visibility(first, last, num_rows)
    token = jnp.arange(len(of) * num_tokens, dtype=jnp.int32)
    own = jagged.span_visibility(
        token // num_tokens * num_tokens, token + 1, len(token)
    )
    return jagged.with_tokens(of_rows, of_tokens, own)


class Sequences(NamedTuple):
    """Jagged rows, and where each lies in its sequence.

    Attributes:
        offsets: sequence b is the rows `offsets[b]` to `offsets[b + 1]`.
        of: the sequence of each row; the last one of rows beyond it.
        place: the place of each row in it.
    """

    offsets: Int32[Array, " B_plus_1"]
    of: Int32[Array, " R"]
    place: Int32[Array, " R"]

    @property
    def lengths(self) -> Int32[Array, " B"]:
        """The rows of each sequence."""
        return jnp.diff(self.offsets)

    def newest(
        self, x: Float[Array, "R D"], count: int, *, after: int
    ) -> Float[Array, "B n D"]:
        """Returns the last rows of each sequence, the newest first, or zeros.

        Args:
            after: rows at the start of a sequence that are not taken.
        """
        age = jnp.arange(count, dtype=jnp.int32)[None]
        is_row = age < self.lengths[:, None] - after
        return _padded(x, self.offsets[1:, None] - 1 - age, is_row)

    def oldest(self, x: Float[Array, "R D"], count: int) -> Float[Array, "B n D"]:
        """Returns the first rows of each sequence, or zeros; see `flat`."""
        place = jnp.arange(count, dtype=jnp.int32)[None]
        is_row = place < self.lengths[:, None]
        return _padded(x, self.offsets[:-1, None] + place, is_row)

    def flat(self, x: Float[Array, "B n D"]) -> Float[Array, "R D"]:
        """Returns the rows of sequences that are padded to n; zeros of others."""
        most = x.shape[1]
        row = jnp.arange(len(self.of), dtype=jnp.int32)
        is_row = (self.place < most) & (row < self.offsets[-1])
        rows = jnp.where(is_row, self.of * most + self.place, -1)
        return distinct_rows(jax.lax.collapse(x, 0, 2), rows)


def _padded(x: Float[Array, "R D"], rows: Array, is_row: Array) -> Array:
    """Returns rows [B, n, D], zeros where there is none."""
    flat = distinct_rows(x, jnp.where(is_row, rows, -1).reshape(-1))
    return flat.reshape(*rows.shape, x.shape[1])


def with_leaders(
    offsets: Int32[Array, " B_plus_1"], num_rows: int, count: int
) -> tuple[Int32[Array, " R"], Sequences]:
    """Returns sequences of so many tokens each, before the rows that it has.

    Args:
        offsets: of the rows.
        num_rows: C.
        count: L.

    Returns:
        Where each row lies among `[tokens; rows]`, first all tokens in the order of
        sequences, -1 of rows beyond the last sequence; and the sequences.
    """
    batch = len(offsets) - 1
    tokens = batch * count
    own = offsets + count * jnp.arange(batch + 1, dtype=jnp.int32)
    row = jnp.arange(tokens + num_rows, dtype=jnp.int32)
    of = jagged.sequence_of(own, row)
    place = row - own[of]
    among_rows = tokens + offsets[of] + place - count
    taken = jnp.where(place < count, of * count + place, among_rows)
    return jnp.where(row < own[-1], taken, -1), Sequences(own, of, place)
