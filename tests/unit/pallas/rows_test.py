"""The kernels that work by rows: which shapes they serve, and how their tiles lie."""

import jax.numpy as jnp
import pytest

from loka_jax.fp8 import E4M3
from loka_jax.normed import Epilogue, NormResiduals, Outputs
from loka_jax.pallas import norm_backward, norm_quantize, tiles
from loka_jax.pallas.rows import RowLayout, TuningConfig
from tests.support.pallas import NORMS

BF16 = jnp.bfloat16


@pytest.mark.parametrize(
    "m, n, norm, config, reason",
    [
        (63, 512, "layer", {}, "m=63 rows are fewer than 64"),
        (64, 100, "layer", {}, "n=100 is not a positive multiple of 128 up to 4096"),
        (64, 2304, "block", {}, "n=2304 is not a multiple of 512, as above 2048"),
        (64, 384, "block", {}, "n=384 is not a multiple of the norm's block, 256"),
        (64, 4096, "layer", {}, None),
        # 4 warpgroups of 4 stages of 4 rows in bfloat16: 224 KiB, and 3 KiB in reserve.
        (64, 1792, "layer", dict(pipeline_stages=4), None),
        (64, 1920, "layer", dict(pipeline_stages=5, warpgroups=3), "230400 bytes"),
        (64, 128, "layer", dict(lanes=8, rows=8), "128 rows of a tile"),
        (64, 1152, "layer", dict(lanes=128), "multiple of 512"),
        (64, 512, "block", dict(lanes=128), "single rows without blocks"),
    ],
)
def test_norm_quantize_says_what_it_does_not_serve(m, n, norm, config, reason):
    config = TuningConfig(**config) if config else None
    found = norm_quantize.why_not(m, n, norm=norm, config=config)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    "m, n, norm, xhat_dtype, config, reason",
    [
        (63, 512, "layer", BF16, {}, "m=63 rows are fewer than 64"),
        (64, 1152, "layer", BF16, {}, "n=1152 is not a multiple of 512, as above 1024"),
        (64, 384, "block", BF16, {}, "n=384 is not a multiple of 256 up to 2048"),
        (64, 512, "none", E4M3, {}, "without a norm xhat is in bfloat16"),
        (64, 512, "layer", jnp.float32, {}, "is float32, neither bfloat16 nor E4M3"),
        (64, 4096, "layer", E4M3, {}, None),
        (64, 2048, "block", E4M3, {}, None),
        (64, 128, "layer", BF16, dict(rows=17), "rows of a tile"),
        (64, 512, "layer", BF16, dict(lanes=128, rows=2), "single rows"),
        (64, 256, "layer", BF16, dict(lanes=8), "sums of columns"),
        # 4 warpgroups of 3 stages of 4 rows of 1,024 columns of 2 + 1 or 2 + 2 bytes,
        # the sums of 4 warps in float32, and 3 KiB of 227.
        (64, 1024, "layer", E4M3, dict(pipeline_stages=3), None),
        (64, 1024, "layer", BF16, dict(pipeline_stages=3), "takes 262144 bytes"),
        (64, 1024, "block", BF16, dict(pipeline_stages=3), None),  # no sums: 196,608
    ],
)
def test_norm_backward_says_what_it_does_not_serve(
    m, n, norm, xhat_dtype, config, reason
):
    config = TuningConfig(**config) if config else None
    asked = dict(norm=norm, xhat_dtype=xhat_dtype, config=config)
    found = norm_backward.why_not(m, n, **asked)
    assert found is None if reason is None else reason in found


def test_launches_refuse_what_they_do_not_serve():
    z, rest = jnp.zeros((63, 512), BF16), dict(epilogue=Epilogue("layer"))
    with pytest.raises(ValueError, match="m=63 rows are fewer than 64"):
        norm_quantize.norm_quantize(z, want=Outputs(), **rest)
    with pytest.raises(ValueError, match="m=63 rows are fewer than 64"):
        norm_backward.norm_backward(z, NormResiduals(z, jnp.ones(63)), **rest)


@pytest.mark.parametrize("norm", NORMS)
def test_default_configs_fit_every_shape_that_is_served(norm):
    for n in range(128, 4097, 128):
        configs = [(norm_quantize, {}, dict(num_vectors=i)) for i in (0, 3)]
        configs += [(norm_backward, dict(xhat_dtype=x), {}) for x in (BF16, E4M3)]
        for module, asked, options in configs:
            if module.why_not(64, n, norm=norm, **asked) is None:
                config = module.default_config(n, norm=norm, **options)
                reason = module.why_not(64, n, norm=norm, config=config, **asked)
                assert reason is None, (n, config)


@pytest.mark.parametrize(
    "m, n, config, fold, tile_rows, whole, ctas",
    [
        (64, 256, TuningConfig(8, 1, 1, 1), 1, 16, 4, 4),
        (100, 512, TuningConfig(16, 2, 1, 1), 1, 16, 6, 7),
        (130, 640, TuningConfig(32, 4, 0, 2), 1, 16, 8, 5),
        (65, 512, TuningConfig(128, 1, 3, 2), 4, 1, 65, 33),
        (50_000, 4096, TuningConfig(128, 1, 3, 2), 4, 1, 50_000, 132),
    ],
)
def test_rows_lie_in_tiles(m, n, config, fold, tile_rows, whole, ctas):
    layout = RowLayout(m, n, config)
    found = layout.fold, layout.tile_rows, layout.whole_tiles, layout.ctas
    assert found == (fold, tile_rows, whole, ctas)
    assert layout.repeats_rows == (whole * tile_rows < m)
    starts = [subtile.start for subtile in layout.subtiles]
    assert starts == list(range(0, n // fold, layout.width))


def test_warpgroups_ask_for_no_more_registers_than_were_released():
    # Else a launch hangs: registers are divided evenly, and then moved.
    for consumers in range(1, 5):
        launched = 65536 // (128 * (consumers + 1)) // 8 * 8 * (consumers + 1)
        asked = consumers * tiles.consumer_registers(consumers)
        assert asked % 8 == 0 and asked + tiles.PRODUCER_REGISTERS <= launched


def test_row_scales_are_the_least_powers_of_two_that_hold_a_row():
    least = 2.0**-125
    amax = [0.0, 448.0, 448.5, 224.0, 1e-3, jnp.inf]
    found = tiles.row_scale_inv(jnp.asarray(amax, jnp.float32), least)
    expected = [least, 1.0, 2.0, 0.5, 2.0**-18, jnp.inf]
    assert found.tolist() == expected
