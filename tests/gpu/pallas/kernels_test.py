"""The Pallas kernels on a GPU: real sizes, every config, repeated launches."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_SCALE_INV, ActivationName, Epilogue, Outputs
from loka_jax.pallas import activations
from loka_jax.pallas import fm_lcb_backward_layout as backward_layout
from loka_jax.pallas import fm_lcb_layout as forward_layout
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.fm_lcb import fm_lcb
from loka_jax.pallas.fm_lcb_backward import fm_lcb_backward
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from tests.support import FLOOR_DB, row_kernels, sqnr_db
from tests.support import pallas as support
from tests.whole.pallas import dense_norm_test, fm_lcb_test

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
SWISH = Epilogue("layer", "swish")
ACTIVATIONS = [x for x in get_args(ActivationName) if activations.why_not(x) is None]
SHAPES = [(128, 128), (256, 256), (512, 256), (512, 512)]
LARGE = 64 * 300


# Rows in multiples of 64 and of 8.
@pytest.mark.parametrize(
    "m, norm, activation, k, n",
    [(LARGE, x, act, 256, 256) for x in ("layer", "none") for act in ACTIVATIONS]
    + [(LARGE, x, "swish", *shape) for x in ("layer", "block") for shape in SHAPES]
    + [(LARGE, "none", "relu", 512, 512), (LARGE, "rms", "gelu", 512, 512)]
    + [(m, "layer", "swish", 512, 512) for m in (72, 5000, 50_008)]
    + [(m, "rms", "swish", 128, 128) for m in (72, 5000, 50_008)],
)
def test_outputs_of_real_sites_are_the_rounded_reference(m, norm, activation, k, n):
    x, w = dense_norm_test.operands_of(m, k, n)
    vectors, epilogue = support.affine(n, norm), Epilogue(norm, activation)
    xhat_dtype = BF16 if norm == "none" else E4M3
    want = Outputs(y=True, y_fp8="rowwise", xhat=xhat_dtype, rstd=norm != "none")
    launch = jax.jit(functools.partial(dense_norm, epilogue=epilogue, want=want))
    for shape in ((m, n), (m, n), (m,)):  # NaN in the memory of the next outputs
        jnp.full(shape, jnp.nan, jnp.float32).block_until_ready().delete()
    out = launch(x, w, vectors)
    y, xhat, rstd = dense_norm_test.reference(x, w, vectors, epilogue)
    # FP8 sums of products keep fewer bits on the tensor cores, tanh is approximate.
    assert sqnr_db(y, out.y) > 50
    assert sqnr_db(y, out.y_fp8.dequantize()) > FLOOR_DB["cast_e4m3"]
    factor = XHAT_SCALE_INV if xhat_dtype == E4M3 else 1.0
    stored = np.asarray(out.xhat, np.float32) * factor
    assert sqnr_db(xhat, stored) > FLOOR_DB["cast_e4m3"]
    if norm != "none":
        np.testing.assert_allclose(out.rstd, rstd, rtol=2e-3)


rows = pytest.mark.parametrize("m", [5000, 49_999])


@rows
@pytest.mark.parametrize(
    "n, norm", [(256, "layer"), (512, "rms"), (512, "block"), (1024, "layer")]
)
def test_any_number_of_rows_is_served(m, n, norm):
    want, epilogue = row_kernels.ROW_SCALES, Epilogue(norm, "swish")
    row_kernels.check_rows(norm_quantize, m, n, norm, "swish", want, None)
    row_kernels.check_gradients(norm_backward, m, n, epilogue, E4M3, None)


@rows
def test_every_row_is_summed_once(m):
    row_kernels.check_sums(norm_backward, m, None)


@pytest.mark.parametrize("size", support.WUKONG)
@pytest.mark.parametrize("batch", [1, 1027])
def test_every_config_of_fm_lcb_is_the_rounded_reference(size, batch):
    n, d, k, m = support.WUKONG[size]
    x, weight = fm_lcb_test.operands_of(batch, n, d, m)
    problem = forward_layout.Problem(batch=batch, n=n, d=d, k=k, m=m)
    for config in forward_layout.search_space(problem):
        launch = jax.jit(functools.partial(fm_lcb, k=k, config=config))
        fm_lcb_test.check(launch(x, weight), x, weight, k)
    if size == "S":  # which the backward pass does not serve
        return
    operands = fm_lcb_test.gradients_of(batch, n, d, k, m)
    added = fm_lcb_test.added_to(operands[0], (n // 2, n // 2))
    for config in backward_layout.search_space(problem):
        launch = jax.jit(functools.partial(fm_lcb_backward, config=config))
        fm_lcb_test.check_backward(launch(*operands), *operands)
        fm_lcb_test.check_backward(launch(*operands, added), *operands, added)


@pytest.mark.parametrize(
    "k, n, x_scale", [(256, 256, "rowwise"), (512, 512, "rowwise"), (256, 256, "bf16")]
)
def test_launches_of_dense_norm_repeat_bit_by_bit(k, n, x_scale):
    operands = dense_norm_test.operands_of(8192, k, n, x_scale=x_scale)
    is_bf16 = x_scale == "bf16"
    want = Outputs(y=is_bf16, y_fp8=None if is_bf16 else "rowwise")
    f = functools.partial(dense_norm, epilogue=SWISH, want=want)
    support.assert_launches_repeat(f, *operands, support.affine(n, "layer"))


def test_launches_by_rows_repeat_bit_by_bit():
    z, vectors = row_kernels.rows_of(1024, "layer", 4096)
    f = functools.partial(norm_quantize, epilogue=SWISH, want=row_kernels.ROW_SCALES)
    support.assert_launches_repeat(f, z, (), vectors)
    f = functools.partial(norm_backward, epilogue=SWISH, dz_fp8=E4M3)
    for n in (512, 1024):
        operands = row_kernels.gradients_of(n, "layer", BF16, m=8192)
        support.assert_launches_repeat(f, *operands)


@pytest.mark.parametrize("size", support.WUKONG)
def test_launches_of_fm_lcb_repeat_bit_by_bit(size):
    n, d, k, m = support.WUKONG[size]
    operands = fm_lcb_test.gradients_of(1027, n, d, k, m)
    support.assert_launches_repeat(functools.partial(fm_lcb, k=k), *operands[:2])
    if size != "S":
        added = fm_lcb_test.added_to(operands[0], (n // 2, n // 2))
        support.assert_launches_repeat(fm_lcb_backward, *operands, added)
