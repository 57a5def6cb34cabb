"""`fp8_matmul` against numpy in float64, interpreted and on a GPU."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.fp8 import E4M3, E5M2, Fp8Array
from loka_jax.triton.matmul import TuningConfig, fp8_matmul, search_space, why_not
from tests import support
from tests.support.triton import (
    compiled,
    interpreted,
    launcher,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

run = launcher(fp8_matmul)

FORMATS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# Which elements of lhs and rhs share a scale: all, rows, or tiles.
ROWS, TILES = ("rows", "rows"), ((1, 128), (128, 128))
GRANULARITIES = [
    ((), ()),
    ROWS,
    ("rows", ()),
    ((), "rows"),
    TILES,
    ((1, 128), (1, 128)),
    ((128, 128), (1, 128)),
]
# Every granularity, and every format with rows and tiles.
formats_and_granularities = pytest.mark.parametrize(
    "formats, granularities",
    [(FORMATS[0], by) for by in GRANULARITIES]
    + [(formats, by) for formats in FORMATS[1:] for by in (ROWS, TILES)],
)


def _quantized(rows, k, dtype, granularity, seed):
    """Returns rows of different sizes, in parts along K of different sizes."""
    x = support.normal(rows, k, seed=seed)
    sizes = np.random.default_rng(seed + 9).uniform(-2, 2, (rows, math.ceil(k / 128)))
    x = x * jnp.asarray(10.0 ** np.repeat(sizes, 128, 1)[:, :k], jnp.float32)
    if granularity in ((), "rows"):
        return fp8.quantize(x, dtype, axes=(1,) if granularity else None)
    return fp8.quantize_tiles(x, dtype, tile=granularity)


def _operands(m, k, n, formats=FORMATS[0], granularities=ROWS):
    (lhs, rhs), (by_lhs, by_rhs) = formats, granularities
    return _quantized(m, k, lhs, by_lhs, 0), _quantized(n, k, rhs, by_rhs, 1)


def _error(out, lhs, rhs):
    """Returns the relative L2 norm of the error, each element in its natural unit.

    The unit is the sum of the magnitudes of its products over the root of their number,
    so that a wrong scale of small rows shows as much as one of large rows.
    """
    a, b = (np.asarray(x.dequantize(), np.float64) for x in (lhs, rhs))
    unit = np.abs(a) @ np.abs(b).T / math.sqrt(a.shape[1])
    ref = a @ b.T / unit
    error = np.asarray(out, np.float64) / unit - ref
    return np.linalg.norm(error) / np.linalg.norm(ref)


def _limit(out_dtype, fast=False):
    """Returns the expected error of a correct kernel."""
    rounding = 2.5e-3 if out_dtype == jnp.bfloat16 else 1e-6
    if jax.default_backend() == "cpu":
        return rounding
    # The tensor core's sums keep about 13 bits.
    return rounding + (2e-3 if fast else 5e-4)


def _check(run, sizes, *formats_and_granularities, out_dtype=jnp.float32, fast=False):
    lhs, rhs = _operands(*sizes, *formats_and_granularities)
    out = run(lhs, rhs, out_dtype=out_dtype, fast_accumulation=fast)
    assert out.dtype == out_dtype
    assert _error(out, lhs, rhs) < _limit(out_dtype, fast)


@formats_and_granularities
def test_products_of_the_dequantized_operands(run, formats, granularities):
    _check(run, (100, 208, 48), formats, granularities)


@pytest.mark.parametrize("granularities", [ROWS, TILES])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 16, 1),
        (64, 128, 64),
        (65, 272, 130),
        pytest.param((600, 32, 17), id="groups of tiles"),
    ],
)
def test_sizes(run, sizes, granularities):
    _check(run, sizes, FORMATS[0], granularities)


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("granularities", [ROWS, TILES])
def test_accumulation_and_result_types(run, granularities, fast, out_dtype):
    rest = dict(out_dtype=out_dtype, fast=fast)
    _check(run, (70, 400, 48), FORMATS[1], granularities, **rest)


def test_bfloat16_results_are_rounded_once(interpreted):
    lhs, rhs = _operands(70, 208, 48)
    wide = fp8_matmul(lhs, rhs, out_dtype=jnp.float32)
    narrow = fp8_matmul(lhs, rhs, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def test_nan_stays_in_its_row(run):
    lhs, rhs = _operands(70, 208, 48)
    lhs = lhs.replace(data=lhs.data.at[3, 200].set(jnp.nan))
    out = run(lhs, rhs, out_dtype=jnp.bfloat16)
    faulty = np.isnan(np.asarray(out, np.float32))
    assert faulty[3].all() and not np.delete(faulty, 3, 0).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@formats_and_granularities
def test_many_programs(formats, granularities):
    rest = dict(out_dtype=jnp.bfloat16)
    _check(fp8_matmul, (1000, 208, 48), formats, granularities, **rest)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "granularities, one_sum", [(ROWS, False), (ROWS, True), (TILES, False)]
)
def test_all_configs_agree(granularities, one_sum):
    sizes = 1000, 528, 600
    lhs, rhs = _operands(*sizes, FORMATS[0], granularities)
    rest = dict(out_dtype=jnp.float32, fast_accumulation=one_sum)
    for config in search_space(*sizes, one_sum=one_sum):
        out = fp8_matmul(lhs, rhs, config=config, **rest)
        assert _error(out, lhs, rhs) < _limit(jnp.float32, one_sum), config


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_launches_repeat_bit_by_bit():
    lhs, rhs = _operands(1000, 528, 600)
    f = jax.jit(functools.partial(fp8_matmul, out_dtype=jnp.float32))
    first = f(lhs, rhs)
    for _ in range(100):
        np.testing.assert_array_equal(first, f(lhs, rhs))


def _tile(granularity):
    return None if granularity in ((), "rows") else granularity


def _shapes(rows, k, dtype, granularity):
    """Returns the shapes of an operand's data and scales."""
    scales = (rows, 1) if granularity == "rows" else ()
    if tile := _tile(granularity):
        scales = math.ceil(rows / tile[0]), math.ceil(k / tile[1])
    data = jax.ShapeDtypeStruct((rows, k), dtype)
    return data, jax.ShapeDtypeStruct(scales, jnp.float32)


def _compiled(sizes, formats, granularities, fast, config=None):
    m, k, n = sizes

    def f(lhs, rhs):
        operands = (
            Fp8Array(*operand, _tile(by))
            for operand, by in zip((lhs, rhs), granularities, strict=True)
        )
        rest = dict(fast_accumulation=fast, config=config)
        return fp8_matmul(*operands, out_dtype=jnp.bfloat16, **rest)

    lhs = _shapes(m, k, formats[0], granularities[0])
    return compiled(f, lhs, _shapes(n, k, formats[1], granularities[1]))


@pytest.mark.parametrize(
    "sizes",
    [(65536, 512, 256), pytest.param((1000, 208, 48), marks=pytest.mark.slow)],
)
@formats_and_granularities
def test_formats_run_on_the_fp8_tensor_cores(formats, granularities, sizes):
    names = {E4M3: "e4m3", E5M2: "e5m2"}
    ptx = _compiled(sizes, formats, granularities, False).ptx
    assert "wgmma.mma_async.sync.aligned" in ptx
    assert f"f32.{names[formats[0]]}.{names[formats[1]]}" in ptx
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes a copy, even with masks


LARGE = (65536, 528, 520)


@pytest.mark.slow
@pytest.mark.parametrize(
    "granularities, fast",
    [(ROWS, True), (ROWS, False), (TILES, False), (GRANULARITIES[5], False)],
)
def test_no_config_spills_registers_or_serializes(granularities, fast):
    space = search_space(*LARGE, one_sum=fast)
    assert len(space) >= 10
    for config in space:
        program = _compiled(LARGE, FORMATS[1], granularities, fast, config)
        assert program.shared_bytes <= 227 * 1024, config
        report = program.ptxas_report()
        assert spilled_bytes(report) == 0, config
        assert "serialized" not in report, config


@pytest.mark.parametrize(
    "sizes, one_sum, expected",
    [
        ((65536, 512, 512), True, TuningConfig(128, 256, 128, 8, 3)),
        ((65536, 512, 512), False, TuningConfig(128, 128, 128, 8, 4)),
        ((65536, 512, 48), False, TuningConfig(128, 64, 128, 4, 4)),
        ((4096, 512, 256), False, TuningConfig(64, 64, 128, 4, 5)),
        ((128, 32, 1), False, TuningConfig(64, 16, 64, 4, 5)),
    ],
)
def test_default_configs_keep_the_multiprocessors_busy(sizes, one_sum, expected):
    space = search_space(*sizes, one_sum=one_sum)
    assert space[0] == expected and len(set(space)) == len(space)


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ((100, 48, 7), None),
        ((100, 40, 7), "k=40 is not a multiple of 16"),
        ((0, 48, 7), "m=0 is not positive"),
        ((100, 0, 7), "k=0 is not positive"),
        ((100, 48, 0), "n=0 is not positive"),
    ],
)
def test_why_not_names_the_size(sizes, reason):
    assert why_not(*sizes) == reason


def test_refused_operands_have_a_reason():
    refuse = functools.partial(pytest.raises, ValueError)
    lhs, rhs = _operands(32, 40, 16)
    with refuse(match="k=40 is not a multiple of 16"):
        fp8_matmul(lhs, rhs, out_dtype=jnp.float32)
    lhs, rhs = _operands(32, 48, 16)
    with refuse(match="differ in k"):
        fp8_matmul(lhs, _operands(32, 64, 16)[1], out_dtype=jnp.float32)
    with refuse(match="tile both operands or none"):
        tiled = _quantized(16, 48, E4M3, (1, 128), 1)
        fp8_matmul(lhs, tiled, out_dtype=jnp.float32)
    with refuse(match="not in the search space"):
        config = TuningConfig(256, 256, 128, 8, 3)
        fp8_matmul(lhs, rhs, out_dtype=jnp.float32, config=config)


def test_refused_scales_have_a_reason():
    lhs, rhs = _operands(32, 48, 16)
    by_column = Fp8Array(lhs.data, jnp.ones((1, 48)))
    with pytest.raises(ValueError, match=r"must have shape \[\] or \(32, 1\)"):
        fp8_matmul(by_column, rhs, out_dtype=jnp.float32)
    narrow = [_quantized(r, 128, E4M3, (1, 64), 1) for r in (32, 16)]
    with pytest.raises(ValueError, match="tiles must be 128 wide"):
        fp8_matmul(*narrow, out_dtype=jnp.float32)
