"""The kernels as sites see them: whom they serve, what they write, measured configs."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Outputs
from loka_jax.pallas import (
    KERNELS,
    dense_norm_layout,
    fm_lcb_backward_layout,
    fm_lcb_layout,
    site_kernels,
    training_outputs,
    tuned,
    why_not,
)
from loka_jax.recipe import get_recipe
from loka_jax.site import SiteSpec

BF16 = jnp.bfloat16
E5M2_ROWS = dict(dtype=E5M2, granularity="rowwise")


def spec_of(**options):
    """Returns a site, by default one that every kernel serves."""
    sizes = dict(m=192, k=128, n=256, norm="layer", activation="relu")
    return SiteSpec(**(sizes | options))


def with_cast(operand, **changes):
    """Returns a tensorwise recipe, an operand of its forward product cast otherwise."""
    recipe = get_recipe("fp8_tensorwise")
    cast = replace(getattr(recipe.fwd, operand), **changes)
    fwd = replace(recipe.fwd, **{operand: cast})
    return replace(recipe, fwd=fwd)


@pytest.mark.parametrize(
    "recipe, sizes, reason",
    [
        (get_recipe("fp8_rowwise"), {}, None),
        (get_recipe("bf16"), {}, None),
        (get_recipe("fp8_rowwise"), dict(k=0), "k=0"),
        (get_recipe("f32"), {}, "recipe 'f32' computes in float32"),
        (get_recipe("fp8_blockwise"), {}, "'fp8_blockwise' scales in blocks"),
        (with_cast("first", **E5M2_ROWS), {}, "a forward product that is not E4M3"),
        (with_cast("second", **E5M2_ROWS), {}, "a forward product that is not E4M3"),
        (
            get_recipe("bf16"),
            dict(activation="exact_gelu"),
            "no erf, as exact_gelu needs",
        ),
    ],
)
def test_a_site_that_no_kernel_serves_has_a_reason(recipe, sizes, reason):
    found = why_not(spec_of(**sizes), recipe)
    assert found is None if reason is None else found.endswith(reason)


FP8_WITHOUT_NORM = dict(norm="none", out="fp8")
IN_E4M3, IN_BF16 = Outputs(xhat=E4M3, rstd=True), Outputs(xhat=BF16, rstd=True)


# Rows are kept in E4M3 where that holds all values and adds little to FP8's error.
@pytest.mark.parametrize(
    "recipe, options, want",
    [
        ("bf16", {}, IN_BF16),
        ("bf16/fp8_rowwise/fp8_rowwise", {}, IN_E4M3),
        ("fp8_rowwise", dict(n=784), IN_E4M3),
        ("fp8_rowwise", dict(n=785), IN_BF16),
        ("fp8_rowwise", dict(n=1024, norm="block"), IN_E4M3),
        ("fp8_rowwise", dict(norm="none"), Outputs(xhat=BF16)),
        ("fp8_rowwise", FP8_WITHOUT_NORM, Outputs(y_fp8="rowwise", xhat=BF16)),
        ("fp8_rowwise", dict(out="both"), replace(IN_E4M3, y_fp8="tensorwise")),
    ],
)
def test_a_forward_pass_keeps_what_its_backward_pass_reads(recipe, options, want):
    assert training_outputs(spec_of(**options), get_recipe(recipe)) == want


@pytest.mark.parametrize(
    "recipe, options, dtype, by_row, by_column",
    [
        (get_recipe("bf16"), {}, BF16, False, False),
        (get_recipe("fp8_rowwise"), {}, E4M3, True, True),
        (get_recipe("fp8_tensorwise"), dict(fp8_in="rowwise"), E4M3, True, False),
        (with_cast("first", granularity="rowwise"), {}, E4M3, True, False),
        (with_cast("second", granularity="rowwise"), {}, E4M3, False, True),
    ],
)
def test_dense_norm_is_asked_about_the_scales_of_the_recipe(
    monkeypatch, recipe, options, dtype, by_row, by_column
):
    asked, spec = [], spec_of(**options)
    monkeypatch.setattr(site_kernels, "_why_not_dense_norm", asked.append)
    assert KERNELS.dense_norm.why_not(spec, recipe) is None
    (problem,) = asked
    assert problem.spec == spec and problem.want == training_outputs(spec, recipe)
    assert jnp.dtype(problem.dtype) == jnp.dtype(dtype) and problem.has_affine
    scales = problem.x_scale_by_row, problem.w_scale_by_column
    assert scales == (by_row, by_column)


def test_the_config_of_the_nearest_number_of_rows_is_taken(monkeypatch):
    table = dict(kernel={"key": {"2000": dict(a=1), "32000": dict(a=2)}, "other": {}})
    monkeypatch.setattr(tuned, "_load", lambda: table)
    # By ratio: the two are alike at 8,000.
    for m, a in ((1, 1), (7900, 1), (8100, 2), (17_000, 2), (10**6, 2)):
        assert tuned.lookup("kernel", "key", m) == dict(a=a)
    assert tuned.lookup("kernel", "other", 9) is None
    assert tuned.lookup("kernel", "none", 9) is None
    assert tuned.lookup("none", "key", 9) is None


FUSED = dense_norm_layout.Problem(spec=spec_of(), dtype=E4M3, want=Outputs())
FUSED_KEY, CROSSED_KEY = "float8_e4m3fn 128x256 over_all y", "n64 d64 k32 l32"
CROSSED = fm_lcb_layout.Problem(batch=192, n=64, d=64, k=32, m=64)


@pytest.mark.parametrize(
    "layout, problem, fastest, key",
    [
        (dense_norm_layout, FUSED, dict(n_tiles=2, store_subtile_bytes=64), FUSED_KEY),
        (fm_lcb_layout, CROSSED, dict(warpgroups=3, chunks=2), CROSSED_KEY),
        (fm_lcb_backward_layout, CROSSED, dict(pipeline_stages=2), CROSSED_KEY),
    ],
)
def test_the_default_config_is_the_fastest_measured_that_fits(
    monkeypatch, layout, problem, fastest, key
):
    lookups, entries = [], [fastest, dict(pipeline_stages=99), None]
    lookup = lambda *args: lookups.append(args) or entries.pop(0)  # noqa: E731
    monkeypatch.setattr(layout.tuned, "lookup", lookup)
    found = [vars(layout.best_config(problem)) for _ in range(3)]
    kernel = layout.__name__.rpartition(".")[2].removesuffix("_layout")
    assert found[0].items() >= fastest.items() and lookups == [(kernel, key, 192)] * 3
    # One that would hang, and none.
    assert found[1] == found[2] == vars(layout.search_space(problem)[0])
