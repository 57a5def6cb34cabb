"""A program that launches a kernel twice at one shape has one lowering of it."""

import re

import jax
import jax.numpy as jnp
import pytest

from loka_jax.normed import Epilogue, NormResiduals, Outputs
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.fm_lcb import fm_lcb
from loka_jax.pallas.fm_lcb_backward import fm_lcb_backward
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize

M, N, B, D, K = 128, 256, 4, 64, 16
EPILOGUE = Epilogue("block", "hard_swish")


def _bf16(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def _norm_backward(dy):
    residuals = NormResiduals(_bf16(M, N), jnp.ones(M))
    return norm_backward(dy, residuals, epilogue=EPILOGUE)


LAUNCHES = {
    "dense_norm": lambda x: dense_norm(
        x, _bf16(N, N), epilogue=EPILOGUE, want=Outputs()
    ),
    "norm_quantize": lambda x: norm_quantize(x, epilogue=EPILOGUE, want=Outputs()),
    "norm_backward": _norm_backward,
    "fm_lcb": lambda x: fm_lcb(x, _bf16(D, 2 * K), K),
    "fm_lcb_backward": lambda x: fm_lcb_backward(
        x, _bf16(D, 2 * K), _bf16(B, D, K), _bf16(B, K, D)
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_two_launches_share_a_lowering(name):
    launch = LAUNCHES[name]
    shape = (B, D, D) if name.startswith("fm_lcb") else (M, N)

    def twice(x):
        return launch(x), launch(2 * x)

    lowered = jax.jit(twice).trace(_bf16(*shape)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert len(re.findall(r"(?<!func\.)\bcall @_?launch", text)) == 2
