"""The fused forward kernel against numpy, in the interpreter with its race detector.

The reference takes the dequantized operands in float64: bfloat16 outputs must agree to
their rounding, FP8 outputs to theirs.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import Epilogue, Outputs
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.dense_norm_layout import TuningConfig
from tests.support import normal
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16


@pytest.fixture
def run(interpret):
    return support.interpreted(dense_norm, interpret)


def operands_of(m, k, n, *, x_scale="rowwise", w_scale="tensorwise"):
    """Returns x and the weight in FP8, or in bfloat16."""
    # Rows and columns of different sizes, so that a misplaced scale shows.
    x = normal(m, k, seed=1) * np.linspace(0.1, 3, m, dtype=np.float32)[:, None]
    w = normal(n, k, seed=2) * np.linspace(0.5, 2, n, dtype=np.float32)[:, None]
    w = w / np.float32(np.sqrt(k))
    if x_scale == "bf16":
        return x.astype(BF16), w.astype(BF16)
    axes = {"rowwise": (1,), "tensorwise": None}
    return fp8.quantize(x, axes=axes[x_scale]), fp8.quantize(w, axes=axes[w_scale])


def reference(x, w, vectors, epilogue):
    """Returns y, xhat and rstd in float64."""
    x, w = (
        np.asarray(v.dequantize() if isinstance(v, Fp8Array) else v).astype(np.float64)
        for v in (x, w)
    )
    return support.forward(x @ w.T, vectors, epilogue)


def check(out, want, exact, *, y_scale_inv=None):
    """Checks every output that is wanted, and that there is no other."""
    # Activations after FP8 outputs are computed in half precision, of eleven bits.
    half = want.y_fp8 is not None and exact[2] is not None
    largest = np.abs(exact[0]).max(1, keepdims=True)
    error = (2.0**-9 if half else 2.0**-16) * (1 + largest)
    rest = dict(error=error, xhat_error=error, y_scale_inv=y_scale_inv, rtol=1e-5)
    support.assert_outputs(out, want, exact, **rest)


EVERYTHING = Outputs(y=True, y_fp8="rowwise", xhat=BF16, rstd=True, y_amax=True)
NO_NORM = Outputs(y=True, y_fp8="rowwise", xhat=BF16, y_amax=True)
TRAINING = Outputs(y=False, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)
SMALL = TuningConfig(store_subtile_bytes=64)
ROWS, ALL = "rowwise", "tensorwise"


# Every norm, every activation, every scale and every output, by pairs. Rows beyond the
# last whole tile, which TMA cuts off: one row group of 8, several, and more than a
# CTA's. Rings of several K tiles, N tiles in a cluster, one and several stores.
@pytest.mark.parametrize(
    "m, k, n, x_scale, w_scale, norm, activation, want, config",
    [
        (192, 64, 64, ROWS, ALL, "none", "relu", NO_NORM, SMALL),
        (72, 64, 64, ROWS, ALL, "layer", "swish", EVERYTHING, SMALL),
        (200, 64, 64, ALL, ALL, "none", "swish", NO_NORM, SMALL),
        (104, 64, 64, "bf16", None, "rms", "swish", EVERYTHING, SMALL),
        (136, 64, 64, ROWS, ALL, "block", "hard_swish", EVERYTHING, SMALL),
        (1000, 64, 64, ALL, ALL, "layer", "none", EVERYTHING, SMALL),
        (192, 128, 128, "bf16", None, "layer", "gelu", Outputs(xhat=BF16), None),
        (192, 128, 128, "bf16", None, "none", "gelu", Outputs(xhat=BF16), None),
        (320, 64, 128, ROWS, ALL, "rms", "gelu", TRAINING, (2, 2, 1, 64, 2)),
        (64, 512, 128, ALL, ROWS, "layer", "swish", TRAINING, (4, 2, 1, 64, 1)),
        (128, 192, 64, ROWS, ROWS, "layer", "hard_swish", TRAINING, (1, 2, 1, 64, 1)),
    ],
)
def test_outputs_are_the_rounded_reference(
    run, m, k, n, x_scale, w_scale, norm, activation, want, config
):
    x, w = operands_of(m, k, n, x_scale=x_scale, w_scale=w_scale)
    vectors, epilogue = support.affine(n, norm), Epilogue(norm, activation, 1e-3)
    if k > 64:
        vectors = vectors._replace(bias=normal(n, seed=5))
    scale_inv = jnp.float32(2.0**-5) if want.y_fp8 == "tensorwise" else None
    config = TuningConfig(*config) if isinstance(config, tuple) else config
    static = dict(epilogue=epilogue, want=want, config=config)
    out = run(x, w, vectors, y_scale_inv=scale_inv, **static)
    check(out, want, reference(x, w, vectors, epilogue), y_scale_inv=2.0**-5)


def test_nan_stays_nan(run):
    x, w = operands_of(64, 64, 64, x_scale="bf16")
    x = x.at[5, 7].set(jnp.nan)
    want = Outputs(y=True, y_fp8="rowwise")
    out = run(x, w, epilogue=Epilogue("rms"), want=want)
    is_nan = np.isnan(np.asarray(out.y, np.float32))
    assert is_nan[5].all() and not is_nan[:5].any() and not is_nan[6:].any()
    assert np.isnan(np.asarray(out.y_fp8.dequantize())[5]).all()
