"""Cross networks, alone and with layers: every recipe and depth, XLA and Triton."""

import functools

import pytest

from tests import support
from tests.support import tailed
from tests.support.tailed import BF16_DRHS, DELAYED, CrossedCase, Form
from tests.support.triton import anywhere, interpreted, on_gpu

__all__ = ["anywhere", "interpreted", "on_gpu"]


def alone(recipe, rank, depth, *, has_bias=True, m=32, n=96):
    """Returns a network without layers."""
    form = Form(m=m, widths=(n,))
    return CrossedCase(recipe, rank, depth, form=form, has_bias=has_bias)


ODD = dict(m=31, n=93)
TWO_LAYERS = CrossedCase("").form._replace(widths=(95, 63, 32))


@pytest.mark.parametrize(
    "case, limit",
    [
        # Of three layers the errors of a flipped rounding grow from one to the next.
        (alone(BF16_DRHS, 48, 3), 2.0**-8),
        (alone(DELAYED, 47, 3, has_bias=False, **ODD), 2.0**-8),
        (alone("bf16", 47, 1, **ODD), 2.0**-8),
        (alone(DELAYED, None, 3), 2.0**-8),
        (alone(BF16_DRHS, None, 1, has_bias=False), 2.0**-8),
        # Of five layers sums of three products are kept, in bfloat16.
        (alone("bf16", 48, 5), 2.0**-7),
        (alone("bf16", None, 5), 2.0**-7),
        (CrossedCase(DELAYED, 31, 2, form=TWO_LAYERS), 2.0**-8),
        (CrossedCase(DELAYED, None, 2, is_beside=True, form=TWO_LAYERS), 2.0**-8),
        (CrossedCase("bf16", is_beside=True), 2.0**-8),
    ],
    ids=str,
)
def test_networks_follow_the_equations(case, limit):
    tailed.assert_crossed_follows_the_equations(case, implementation="xla", limit=limit)


# Other roundings to bfloat16 (2^-9) flip a code of E4M3, of steps of 2^-3, with a
# probability of 2^-6, which is an error of 2^-3: in the mean 2^-3 sqrt(2^-6). The
# gradients of four products are cast so, one after the other.
LIMITS = {"bf16": 2.0**-8, DELAYED: 2.0**-5, BF16_DRHS: 2.0**-5}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    "case, limit",
    [
        (alone(DELAYED, 48, 2, has_bias=False), 2.0**-8),
        (alone("bf16", 48, 2), 2.0**-8),
        (alone(BF16_DRHS, 47, 2, **ODD), 2.0**-8),
        (alone(DELAYED, None, 1), 2.0**-8),
        (alone(BF16_DRHS, None, 3), 2 * 2.0**-8),
        (alone("bf16", None, 4), 3 * 2.0**-8),  # more layers than a kernel takes
        *[
            (CrossedCase(recipe, rank, 2, is_beside), limit)
            for recipe, limit in LIMITS.items()
            for rank, is_beside in ((31, False), (None, True))
        ],
    ],
    ids=str,
)
def test_networks_by_triton_give_the_results_of_xla(case, limit):
    results = functools.partial(tailed.crossed_results, case)
    tailed.assert_triton_gives_the_results_of_xla(results, limit)


@pytest.mark.parametrize("rank, is_beside", [(31, False), (None, True)])
def test_inference_gives_the_results_of_training(rank, is_beside):
    case = CrossedCase(DELAYED, rank, 2, is_beside)
    run, arrays, states, g = tailed.crossed_operands(case)
    inference = support.jitted(run)(arrays, states)
    (trained, _), _ = tailed.compiled(run, arrays, states, g)
    # Products hand FP8 on without a rounding to bfloat16 first: of three, other casts.
    tailed.assert_close(inference, trained, 3**0.5 * 2.6e-2)
