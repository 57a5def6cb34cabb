"""Softmax attention as a naive reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import sum_error

SCALE = 0.1


def both_ways(function, q, k, v, gradient):
    """Returns the output and the gradients of q, k and v."""

    @jax.jit
    def run(q, k, v, gradient):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(gradient)

    return run(q, k, v, gradient)


def exact(mask, q, k, v, g):
    """Returns out, dq, dk and dv, and how far each may be off.

    The bounds hold for sums in float32, and roundings to the operands' dtype of the
    results, of the shares and of the gradient of the scores.
    """
    unit = float(jnp.finfo(q.dtype).eps) / 2 if q.dtype != jnp.float32 else 0.0
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    terms, of_score = 2 * (q.shape[2] + len(k)), 2 * (q.shape[2] + 8)
    product = functools.partial(np.einsum, "ihd,jhd->hij")
    scores = np.where(mask, SCALE * product(q, k), -np.inf)
    largest = np.maximum(scores.max(-1, keepdims=True), -1e9)
    shares = np.exp(scores - largest)
    shares = shares / np.maximum(shares.sum(-1, keepdims=True), 1e-300)
    # A share errs by the errors of its score, of all scores in the sum, and by sums.
    of_scores = mask * sum_error(of_score, SCALE * product(abs(q), abs(k)) + 1)
    relative = 2 * (of_scores + of_scores.max(-1, keepdims=True)) + sum_error(terms, 1)
    of_shares = shares * (relative + unit)
    out = np.einsum("hij,jhd->ihd", shares, v)
    of_out = np.einsum("hij,jhd->ihd", of_shares, abs(v)) + unit * abs(out)
    delta, of_delta = (g * out).sum(-1), (abs(g) * of_out).sum(-1)
    inner = product(g, v) - delta.T[..., None]
    slopes = SCALE * shares * inner
    of_inner = sum_error(of_score, product(abs(g), abs(v))) + of_delta.T[..., None]
    of_slopes = SCALE * (of_shares * abs(inner) + shares * of_inner) + unit * abs(
        slopes
    )
    forms = "hij,jhd->ihd", "hij,ihd->jhd", "hij,ihd->jhd"
    parts = (slopes, of_slopes, k), (slopes, of_slopes, q), (shares, of_shares, g)
    results, bounds = [out], [of_out]
    for form, (weights, off, rows) in zip(forms, parts, strict=True):
        results.append(np.einsum(form, weights, rows))
        magnitude = np.einsum(form, abs(weights), abs(rows))
        bound = np.einsum(form, off, abs(rows)) + sum_error(terms, magnitude)
        bounds.append(bound + unit * abs(results[-1]))
    return results, bounds


def assert_exact(found, mask, *operands):
    """Asserts that out, dq, dk and dv are right within their bounds."""
    names = "out", "dq", "dk", "dv"
    for name, x, result, bound in zip(
        names, found, *exact(mask, *operands), strict=True
    ):
        assert x.shape == result.shape, name
        difference = abs(np.asarray(x, np.float64) - result)
        assert np.max(difference - 1.01 * bound, initial=0) <= 1e-30, name
        # The bound is not so wide that it holds for anything.
        assert np.linalg.norm(bound) <= 0.5 * np.linalg.norm(result) + 1e-30, name
