"""Which problems `dense_norm` serves, its tuning configs, and how launches lie."""

import dataclasses

import jax.numpy as jnp
import pytest

from loka_jax.fp8 import E4M3
from loka_jax.normed import Outputs
from loka_jax.pallas import tiles, tuned
from loka_jax.pallas.dense_norm_layout import (
    LaunchLayout,
    Problem,
    TuningConfig,
    best_config,
    misfit,
    problem_key,
    why_not,
)
from loka_jax.site import SiteSpec
from tests.support.pallas import shapes_of

BF16 = jnp.bfloat16
TRAINING = Outputs(y=True, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)
WITH_RSTD = Outputs(y_fp8="tensorwise", rstd=True)
ROWWISE = Outputs(y=False, y_fp8="rowwise")


def problem_of(m=192, k=64, n=64, norm="layer", use_bias=False, **options):
    """Returns a problem, by default of a small site with gamma and beta."""
    spec = SiteSpec(m=m, k=k, n=n, norm=norm, activation="swish", use_bias=use_bias)
    rest = dict(dtype=E4M3, want=Outputs(), has_affine=norm in ("layer", "rms"))
    return Problem(spec=spec, **(rest | options))


BLOCKS = problem_of(n=512, norm="block", want=WITH_RSTD)


@pytest.mark.parametrize(
    "problem, config, reason",
    [
        (problem_of(m=56), None, "m=56 rows are fewer than 64"),
        (problem_of(m=100), None, "m=100 is not a multiple of 8"),
        (problem_of(k=100), None, "k=100 is not a positive multiple of 64"),
        (problem_of(k=4096, n=512), None, "a weight of 4096 x 512 does not fit"),
        (problem_of(n=320, norm="block"), None, "norm's block of 256"),
        (problem_of(norm="block", has_affine=True), None, "have no gamma and beta"),
        (problem_of(norm="none", want=Outputs(xhat=E4M3)), None, "over n=64 may not"),
        (problem_of(n=832, want=Outputs(xhat=E4M3)), None, "may not fit E4M3"),
        (problem_of(n=2304, norm="block"), None, "does not fit"),
        (problem_of(m=72, dtype=BF16), None, None),
        (problem_of(n=1024, norm="block"), None, None),
        (problem_of(norm="none", want=Outputs(xhat=BF16)), None, None),
        (problem_of(k=512), dict(pipeline_stages=1), "takes 2 pipeline stages"),
        (problem_of(k=256), dict(pipeline_stages=1), None),
        (problem_of(), dict(store_subtile_bytes=256), "multiple of a store's"),
        (problem_of(want=ROWWISE), dict(store_subtile_bytes=128), "store's"),
        (problem_of(), dict(pipeline_stages=17), "34 stages, more than 32 barriers"),
        (problem_of(), dict(pipeline_stages=16), None),
        (problem_of(k=256), dict(pipeline_stages=16), "shared memory of 232448"),
        (problem_of(n=320), dict(n_tiles=1), "at most 256 wide"),
        (problem_of(n=320), dict(n_tiles=2, store_subtile_bytes=64), None),
    ],
)
def test_what_is_not_served_has_a_reason(problem, config, reason):
    has_config = config is not None
    options = dict(consumer_warpgroups=2) | (config or {})
    found = misfit(problem, TuningConfig(**options)) if has_config else why_not(problem)
    assert found is None if reason is None else reason in found


def test_a_launch_with_everything_lies_in_shared_memory_as_counted():
    want = Outputs(y=True, y_fp8="rowwise", xhat=E4M3, rstd=True, y_amax=True)
    flags = dict(x_scale_by_row=True, w_scale_by_column=True)
    problem = problem_of(200, 384, 512, use_bias=True, want=want, **flags)
    layout = LaunchLayout(problem, TuningConfig(2, 3, 4, 128, 2))
    assert (layout.tile_n, layout.tile_k, layout.k_tiles) == (128, 128, 3)
    assert (layout.m_tiles, layout.m_ctas, layout.exchanges) == (4, 4, 2)
    assert layout.vectors == ["bias", "gamma", "beta", "w_scale"]
    assert layout.epilogue_dtype == jnp.float16
    assert layout.store_columns() == [64, 128]
    results = dict(y=(200, 512), y_fp8=(200, 512), y_scale=(200,), y_amax=(4, 200))
    assert shapes_of(layout.results()) == results | dict(xhat=(200, 512), rstd=(200,))
    # In KiB, each array from a multiple of one: x, w, x_scale, vectors, affine, and
    # both stores, store_rows and partials.
    kib = 48 + 48 + 1 + 2 + 1 + 32 + 32 + 2 + 24
    num_barriers = 6 + 6 + 1 + 1 + 1 + 2 + 4 + 4 + 4
    size = tiles.shared_memory_bytes(layout.scratch())
    assert size == 1024 * kib + 8 * num_barriers


@pytest.mark.parametrize(
    "problem, n_tiles, m_ctas, exchanges, kept, rstd",
    [
        # A block norm has a statistic for each tile.
        (BLOCKS, 2, 3, 0, jnp.float16, (2, 192)),
        (dataclasses.replace(BLOCKS, want=ROWWISE), 2, 3, 1, jnp.float16, None),
        (problem_of(64 * 500, norm="none"), 1, 132, 0, jnp.float32, None),
        (problem_of(want=ROWWISE, norm="none"), 1, 3, 0, jnp.float32, None),
        (problem_of(want=Outputs(xhat=E4M3)), 1, 3, 0, jnp.float32, None),
    ],
)
def test_tiles_exchange_what_rows_share(
    problem, n_tiles, m_ctas, exchanges, kept, rstd
):
    layout = LaunchLayout(problem, TuningConfig(n_tiles=n_tiles))
    # Half precision serves FP8 activations after a norm.
    found = layout.m_ctas, layout.exchanges, layout.epilogue_dtype
    assert found == (m_ctas, exchanges, kept)
    assert shapes_of(layout.results()).get("rstd") == rstd
    assert exchanges or layout.scratch().partials is None


def test_every_config_of_the_table_fits_its_problem():
    for key, by_rows in tuned._load()["dense_norm"].items():
        dtype, sizes, norm, outputs = key.split()
        k, n = map(int, sizes.split("x"))
        names = outputs.split("+")
        y_fp8 = next((x[6:] for x in names if x.startswith("y_fp8")), None)
        xhat = E4M3 if "xhat" in names else None
        want = Outputs(y="y" in names, y_fp8=y_fp8, xhat=xhat, rstd=xhat is not None)
        assert norm == "over_all"
        problem = problem_of(32768, k, n, dtype=jnp.dtype(dtype), want=want)
        assert problem_key(problem) == key
        for rows, entry in by_rows.items():
            assert misfit(problem, TuningConfig(**entry)) is None, (key, rows)
            # Nothing but the table tells these configs from those of the space.
            assert best_config(problem) == TuningConfig(**by_rows["32768"])
