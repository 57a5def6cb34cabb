"""Jagged rows: which rows of a batch see which, and in which blocks they lie.

The sequences of a batch lie one after another in rows [C, ...]; sequence b has the rows
`offsets[b]` to `offsets[b + 1]`: contextual tokens, then a history in order, then
candidates. Row i sees row j of its sequence if

    j = i
    or j is no candidate, and i is contextual
    or j is no candidate, j < i, and i has no window, or j is contextual, or among the
       oldest after these, or fewer than `window` places before i

where all candidates have the place after the history. So candidates do not see each
other, and contextual tokens see all but candidates. (`generative-recommenders`; the
oldest and newest are the semi-local attention of ULTRA-HSTU, arXiv 2602.16986.)

What a row sees, and by which rows it is seen, are a span of rows, for some a second one
before it, and the row itself. Attention works on blocks of rows, whoever they belong
to: spans say which pairs of blocks it may skip, and which need no mask.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Rule(NamedTuple):
    """Who sees whom, besides the offsets.

    Attributes:
        num_contextual: tokens at the start of each sequence; none if None.
        num_candidates: tokens at the end of each sequence; none if None.
        window: rows that a row sees, itself included; all before it if None.
        oldest: rows after the contextual ones that all later rows see, whatever the
            window.
    """

    num_contextual: Int32[Array, " B"] | None = None
    num_candidates: Int32[Array, " B"] | None = None
    window: int | None = None
    oldest: int = 0


CAUSAL = Rule()


def full(offsets: Int32[Array, " B_plus_1"]) -> Rule:
    """Returns the rule by which each row sees all of its sequence."""
    return Rule(num_contextual=jnp.diff(offsets))


class Spans(NamedTuple):
    """For each row a span of rows, and a second one before it, each half open.

    Rows beyond the last sequence have empty spans, which start at C.
    """

    first: Int32[Array, " C"]
    last: Int32[Array, " C"]
    second_first: Int32[Array, " C"] | None = None
    second_last: Int32[Array, " C"] | None = None


class Pass(NamedTuple):
    """A pass of attention: what each block of fixed rows sums over streamed ones.

    With fixed rows a and b, streamed rows x and y, scores `S = scale a x^T` and 0 where
    a query does not see a key:

        slopes  (silu'(S) * b y^T) x scale / N
        values  silu(S) y / N

    Attributes:
        by_key: the fixed rows are keys and the streamed ones queries.
        has_slopes: whether slopes are wanted.
        has_values: whether values are.
    """

    by_key: bool
    has_slopes: bool
    has_values: bool


FORWARD = Pass(False, False, True)  # q, none; k, v: the output
BY_QUERY = Pass(False, True, False)  # q, dout; k, v: dq
BY_KEY = Pass(True, True, True)  # k, v; q, dout: dk and dv


class Visibility(NamedTuple):
    """What each row sees, and by which rows it is seen.

    Attributes:
        itself: the row, which sees itself besides its spans, or -1; None if the spans
            have it.
        seen_by: spans that may also have rows that do not see it, not outside of blocks
            that need a mask.
    """

    sees: Spans
    itself: Int32[Array, " C"] | None
    seen_by: Spans


class Blocks(NamedTuple):
    """For each of n blocks of rows, the blocks of other rows that attention visits.

    They are `second_count` blocks from `second`, then as many from `first` that there
    are `count` in all. Blocks from `full_first` to before `full_last` need no mask.
    """

    second: Int32[Array, " n"]
    second_count: Int32[Array, " n"]
    first: Int32[Array, " n"]
    count: Int32[Array, " n"]
    full_first: Int32[Array, " n"]
    full_last: Int32[Array, " n"]


def sequence_of(
    offsets: Int32[Array, " B_plus_1"], rows: Int32[Array, " n"]
) -> Int32[Array, " n"]:
    """Returns the sequence of each row; the last one of rows beyond it."""
    ends = offsets[1:]
    found = jnp.searchsorted(ends, rows, side="right", method="scan_unrolled")
    return jnp.minimum(found, len(ends) - 1)


def newest(
    offsets: Int32[Array, " B_plus_1"], counts: Int32[Array, " B"], most: int
) -> tuple[Int32[Array, " n"], Int32[Array, " B_plus_1"]]:
    """Returns the newest `counts` rows of each sequence, and their own offsets.

    Args:
        most: as of `taken`.
    """
    lengths = jnp.minimum(jnp.diff(offsets), counts)
    return taken(offsets[1:] - lengths, lengths, most)


def taken(
    starts: Int32[Array, " B"], lengths: Int32[Array, " B"], most: int
) -> tuple[Int32[Array, " n"], Int32[Array, " B_plus_1"]]:
    """Returns the rows of a span of each sequence, and their own offsets.

    Args:
        starts: the first row of each span.
        lengths: the rows of each.
        most: the number of rows that are returned; those beyond the last sequence are
            -1.
    """
    none = jnp.zeros(1, jnp.int32)
    kept = jnp.concatenate([none, jnp.cumsum(lengths, dtype=jnp.int32)])
    places = jnp.arange(most, dtype=jnp.int32)
    rows = places + (starts - kept[:-1])[sequence_of(kept, places)]
    return jnp.where(places < kept[-1], rows, -1), kept


def visibility(
    offsets: Int32[Array, " B_plus_1"], num_rows: int, rule: Rule
) -> Visibility:
    """Returns which of `num_rows` rows see which.

    Offsets beyond the rows are cut to them.
    """
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    offsets = jnp.clip(offsets.astype(jnp.int32), 0, num_rows)
    is_row = rows < offsets[-1]
    sequence = sequence_of(offsets, rows)
    start, end = offsets[sequence], offsets[sequence + 1]
    history_end = context_end = end
    if rule.num_candidates is not None:
        history_end = jnp.maximum(end - rule.num_candidates[sequence], start)
    context_end = start
    if rule.num_contextual is not None:
        context_end = start + rule.num_contextual[sequence]
        context_end = jnp.minimum(context_end, history_end)
    places = _Places(rows, is_row, start, context_end, history_end, end)
    has_itself = rule.num_candidates is not None
    itself = jnp.where(is_row, rows, -1) if has_itself else None
    return Visibility(_sees(places, rule), itself, _seen_by(places, rule))


class _Places(NamedTuple):
    """For each row, what its sequence consists of."""

    row: Array
    is_row: Array
    start: Array
    context_end: Array
    history_end: Array
    end: Array


def _sees(p: _Places, rule: Rule) -> Spans:
    last = jnp.minimum(p.row + 1, p.history_end)
    last = jnp.where(p.row < p.context_end, p.history_end, last)
    if rule.window is None:
        return _spans(p, (p.start, last))
    first = jnp.minimum(p.row, p.history_end) + 1 - rule.window
    first = jnp.where(p.row < p.context_end, p.start, jnp.maximum(first, p.start))
    kept = jnp.minimum(p.context_end + rule.oldest, last)
    return _spans(p, (first, last), (p.start, kept))


def _seen_by(p: _Places, rule: Rule) -> Spans:
    is_candidate = p.row >= p.history_end
    last = p.end
    if rule.window is not None:
        reach = p.row + rule.window - 1
        is_kept = p.row < p.context_end + rule.oldest
        last = jnp.where(is_kept | (reach >= p.history_end), last, reach + 1)
    last = jnp.where(is_candidate, p.row + 1, last)
    if rule.num_contextual is None:
        return _spans(p, (p.row, last))
    context_end = jnp.where(is_candidate, p.start, p.context_end)
    return _spans(p, (p.row, last), (p.start, context_end))


def _spans(p: _Places, *pairs: tuple[Array, Array]) -> Spans:
    """Returns the spans, empty ones where there is no row."""
    limits: list[Array] = []
    for first, last in pairs:
        limits += _span(first, jnp.where(p.is_row, last, 0), len(p.row))
    return Spans(*limits)


def _span(first: Array, last: Array, nowhere: int) -> tuple[Array, Array]:
    """Returns the limits of spans, those of empty ones such that none has a row."""
    is_empty = first >= last
    return jnp.where(is_empty, nowhere, first), jnp.where(is_empty, 0, last)


def blocks(visible: Visibility, *, by_key: bool, fixed: int, streamed: int) -> Blocks:
    """Returns which blocks of `streamed` rows each block of `fixed` rows visits.

    Args:
        by_key: the fixed rows are keys and the streamed ones queries.
        fixed: a divisor of the number of rows.
        streamed: rows of a block, likewise.
    """
    spans = visible.seen_by if by_key else visible.sees
    first, last = spans.first, spans.last
    full_first = -(-_blocked(first, fixed).max(1) // streamed)
    full_last = _blocked(last, fixed).min(1) // streamed
    if visible.itself is not None and not by_key:
        itself = visible.itself
        first = jnp.where(itself >= 0, jnp.minimum(first, itself), first)
        last = jnp.maximum(last, itself + 1)
    begin = _blocked(first, fixed).min(1) // streamed
    count = jnp.maximum(-(-_blocked(last, fixed).max(1) // streamed) - begin, 0)
    second, second_count = begin, jnp.zeros_like(begin)
    if spans.second_first is not None and spans.second_last is not None:
        second = _blocked(spans.second_first, fixed).min(1) // streamed
        end = -(-_blocked(spans.second_last, fixed).max(1) // streamed)
        second_count = jnp.maximum(jnp.minimum(end, begin) - second, 0)
    return Blocks(
        second, second_count, begin, second_count + count, full_first, full_last
    )


def padded(
    visible: Visibility, num_queries: int, num_keys: int | None = None
) -> Visibility:
    """Returns the visibility of more rows, of which the new ones see none.

    Args:
        num_keys: as many as queries if None.
    """
    num_keys = num_queries if num_keys is None else num_keys
    most = max(num_queries, num_keys)

    def pad(x: Array | None, num_rows: int, value: int) -> Any:
        if x is None or len(x) == num_rows:
            return x
        return jnp.pad(x, (0, num_rows - len(x)), constant_values=value)

    sees, seen_by = (
        Spans(*(pad(x, count, y) for x, y in zip(own, (most, 0) * 2, strict=True)))
        for own, count in ((visible.sees, num_queries), (visible.seen_by, num_keys))
    )
    return Visibility(sees, pad(visible.itself, num_queries, -1), seen_by)


def span_visibility(
    first: Int32[Array, " Q"], last: Int32[Array, " Q"], num_keys: int
) -> Visibility:
    """Returns the visibility of queries that see a span of keys each.

    Args:
        first: where the spans begin, in rising order.
        last: before which they end, likewise; a span that ends where it begins, or
            before, is empty.
    """
    keys = jnp.arange(num_keys, dtype=jnp.int32)
    begin, end = (
        jnp.searchsorted(x, keys, side="right", method="scan_unrolled")
        for x in (last, first)
    )
    return Visibility(
        Spans(*_span(first, last, num_keys)),
        None,
        Spans(*_span(begin, end, len(first))),
    )


def kept_visibility(
    offsets: Int32[Array, " B_plus_1"],
    rows: Int32[Array, " Q"],
    kept: Int32[Array, " B_plus_1"],
    num_keys: int,
) -> Visibility:
    """Returns the visibility by which rows of sequences see all up to themselves.

    Args:
        rows: that are queries, see `taken`.
        kept: their own offsets.
    """
    places = jnp.arange(len(rows), dtype=jnp.int32)
    is_row = places < kept[-1]
    first = jnp.where(is_row, offsets[sequence_of(kept, places)], num_keys)
    return span_visibility(first, jnp.where(is_row, rows + 1, num_keys), num_keys)


def with_tokens(
    rows: Visibility, tokens_of_rows: Visibility, tokens: Visibility
) -> Visibility:
    """Returns the visibility of rows with tokens after the last of them.

    Tokens see rows and tokens, and rows see no tokens. Each of the visibilities has one
    span of a query.

    Args:
        rows: what rows see of rows.
        tokens_of_rows: what tokens see of rows.
        tokens: what tokens see of tokens.
    """
    queries, keys = len(rows.sees.first), len(rows.seen_by.first)
    new_keys = len(tokens.seen_by.first)
    nowhere = 2**30  # after the blocks of all rows, those that are not full too

    def none(count: int) -> Spans:
        return Spans(jnp.full(count, nowhere, jnp.int32), jnp.zeros(count, jnp.int32))

    def after(count: int, spans: Spans) -> Spans:
        first, last = spans.first, spans.last
        return Spans(first + count, jnp.where(last > 0, last + count, 0))

    def join(*parts: Spans) -> list[Array]:
        limits = ((x.first, x.last) for x in parts)
        return [jnp.concatenate(x) for x in zip(*limits, strict=True)]

    own = join(none(queries), after(keys, tokens.sees))
    by_tokens = join(
        after(queries, tokens_of_rows.seen_by), after(queries, tokens.seen_by)
    )
    return Visibility(
        Spans(*own, *join(rows.sees, tokens_of_rows.sees)),
        None,
        Spans(*by_tokens, *join(rows.seen_by, none(new_keys))),
    )


def _blocked(x: Array, size: int) -> Array:
    return x.reshape(-1, size)


def is_visible(visible: Visibility, keys: jax.Array) -> jax.Array:
    """Returns which keys the queries see.

    Args:
        visible: of these queries, with shapes that broadcast against the keys'.
        keys: positions of the keys.
    """
    sees, itself = visible.sees, visible.itself
    seen = (sees.first <= keys) & (keys < sees.last)
    if itself is not None:
        seen |= itself == keys
    if sees.second_first is not None and sees.second_last is not None:
        seen |= (sees.second_first <= keys) & (keys < sees.second_last)
    return seen
