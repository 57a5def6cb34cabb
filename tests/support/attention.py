"""Attention over jagged rows as a naive reference in float64, and cases of it."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from loka_jax.jagged import Rule
from tests.support import normal, sum_error


class Case(NamedTuple):
    """Lengths of the sequences, and who sees whom."""

    lengths: tuple[int, ...]
    spare: int = 0  # rows beyond the last sequence
    contextual: tuple[int, ...] | None = None
    candidates: tuple[int, ...] | None = None
    window: int | None = None
    oldest: int = 0

    @property
    def offsets(self):
        """Where sequences begin, and where the last one ends."""
        return np.cumsum((0, *self.lengths)).astype(np.int32)

    @property
    def num_rows(self):
        """The number of rows, spare ones included."""
        return sum(self.lengths) + self.spare

    @property
    def rule(self):
        """Who sees whom."""
        count = lambda x: None if x is None else jnp.asarray(x, jnp.int32)  # noqa: E731
        counts = count(self.contextual), count(self.candidates)
        return Rule(*counts, self.window, self.oldest)


# Examples of no row, of one, across blocks; rows beyond them; none at all.
CASES = {
    "causal": Case((5, 0, 100, 1, 70, 0), 16),
    "one": Case((192,)),
    "nothing": Case((0, 0), 64),
    "contextual": Case((70, 3, 0, 119), 0, contextual=(2, 3, 2, 1)),
    "candidates": Case((70, 3, 0, 90), 29, candidates=(5, 3, 0, 70)),
    "window": Case((150, 42), 0, window=20),
    "oldest": Case((3, 170, 19), 0, window=7, oldest=10),
    "all": Case(
        (150, 2, 40), 0, (3, 1, 5), (9, 1, 35), window=25, oldest=4
    ),
    "more than there are": Case((6, 0, 4), 54, (9, 9, 1), (3, 1, 4)),
}  # fmt: skip


def mask_of(case):
    """Returns which row (first axis) sees which, told one by one."""
    seen = np.zeros((case.num_rows, case.num_rows), bool)
    for b, (start, length) in enumerate(zip(case.offsets, case.lengths, strict=False)):
        candidates = 0 if case.candidates is None else case.candidates[b]
        history = max(length - candidates, 0)
        context = 0 if case.contextual is None else case.contextual[b]
        context = min(context, history)
        for i in range(length):
            for j in range(length):
                seen[start + i, start + j] = _sees(case, i, j, context, history)
    return seen


def _sees(case, i, j, context, history):
    if i == j or j >= history:
        return i == j
    if i < context:
        return True
    if j > i:
        return False
    near = case.window is None or min(i, history) - j < case.window
    return near or j < context + case.oldest


def operands_of(num_rows, heads, size, dtype, value_size=None):
    """Returns q, k, v and a gradient of the output; rows and columns of many sizes."""
    sizes = (size, size, value_size or size, value_size or size)
    rows = np.linspace(0.5, 2, num_rows)[:, None, None]
    arrays = []
    for seed, columns in enumerate(sizes):
        array = np.asarray(normal(num_rows, heads, columns, seed=seed))
        array = array * rows * np.linspace(0.5, 2, heads)[:, None]
        arrays.append(jnp.asarray(array * np.linspace(0.5, 1.5, columns), dtype))
    return arrays


def exact(case, q, k, v, gradient, *, scale, max_length):
    """Returns out, dq, dk and dv, and how far each may be off.

    The bounds hold for sums in float32, and roundings to the operands' dtype of the
    results, of silu of the scores and of the gradient of the scores.
    """
    unit = float(jnp.finfo(q.dtype).eps) / 2 if q.dtype != jnp.float32 else 0.0
    q, k, v, g = operands = [np.asarray(x, np.float64) for x in (q, k, v, gradient)]
    scores, by_value = scale * _scores(q, k), _scores(g, v)
    sigmoid = 1 / (1 + np.exp(-scores))
    weights = mask_of(case) / max_length
    values = weights * scores * sigmoid
    grads = scale * weights * sigmoid * (1 + scores * (1 - sigmoid)) * by_value
    results = _results(values, grads, *operands)
    absolute = [abs(x) for x in operands]
    rounded = _results(abs(values), abs(grads), *absolute)
    # A score errs by the magnitude of its sum; silu and its slope by not much more.
    q, k, v, g = absolute
    of_scores = scale * _scores(q, k)
    of_grads = scale * weights * _scores(g, v) * (1 + of_scores)
    sums = _results(weights * of_scores, of_grads, *absolute)
    terms = 4 * (q.shape[2] + case.num_rows)
    bounds = [
        1.01 * unit * (abs(result) + by_rounding) + sum_error(terms, magnitude)
        for result, by_rounding, magnitude in zip(results, rounded, sums, strict=True)
    ]
    return results, bounds


def assert_exact(found, case, operands, *, scale, max_length):
    """Asserts that out, dq, dk and dv are right within their bounds."""
    results, bounds = exact(case, *operands, scale=scale, max_length=max_length)
    for name, x, result, bound in zip(
        ("out", "dq", "dk", "dv"), found, results, bounds, strict=True
    ):
        assert x.shape == result.shape, name
        difference = np.abs(np.asarray(x, np.float64) - result)
        worst = np.max(difference - bound, initial=0)
        assert worst <= 0, (name, worst, np.argmax(difference - bound))


def assert_exact_in_fp8(out, case, q, k, v, *, scale, max_length):
    """Asserts that a result of operands in E4M3 is right, silu rounded likewise."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    how = dict(scale=scale, max_length=max_length)
    (result, *_), (bound, *_) = exact(case, q, k, v, jnp.zeros_like(v), **how)
    scores = scale * _scores(np.asarray(q, np.float64), np.asarray(k, np.float64))
    steps = 2.0**-4 * abs(scores / (1 + np.exp(-scores))) + 2.0**-10
    by_rounding = np.einsum(
        "hij,jhd->ihd", mask_of(case) / max_length * steps, abs(np.asarray(v))
    )
    bound = bound + 1.01 * (2.0**-9 * (abs(result) + by_rounding) + by_rounding)
    difference = abs(np.asarray(out, np.float64) - result)
    assert np.max(difference - bound, initial=0) <= 0
    # The bound is not so wide that it holds for anything.
    assert np.linalg.norm(difference) <= 0.05 * np.linalg.norm(result)


def _scores(a, b):
    return np.einsum("ihd,jhd->hij", a, b)


def _results(values, grads, q, k, v, g):
    return (
        np.einsum("hij,jhd->ihd", values, v),
        np.einsum("hij,jhd->ihd", grads, k),
        np.einsum("hij,ihd->jhd", grads, q),
        np.einsum("hij,ihd->jhd", values, g),
    )
