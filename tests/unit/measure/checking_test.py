"""What is right passes the check, in every recipe; what does not run has a reason."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from loka_jax.measure import passes
from loka_jax.measure.check_operands import AIMS, draw
from loka_jax.measure.check_reference import Expected
from loka_jax.measure.check_scores import scores, worst_finding
from loka_jax.measure.checking import NO_MEMORY, lower_check, why_wrong
from loka_jax.measure.compiling import compile_lowered
from loka_jax.measure.programs import chain_forms, form_spec
from loka_jax.ops.device import Device
from loka_jax.ops.run_site import run_site
from loka_jax.site import Choice, SiteSpec
from tests import support
from tests.support import stand_ins

CASES = [
    # A last partial tile, k != n, FP8 in and out, every norm and activation.
    ("xla bf16", SiteSpec(65, 24, 40, "rms", "hard_swish")),
    ("pallas fp8_rowwise", SiteSpec(144, 96, 512, "layer", "gelu", True)),
    ("pallas fp8_tensorwise_delayed", SiteSpec(208, 64, 96, "block", "relu")),
    ("pallas fp8_rowwise", SiteSpec(64, 32, 2048, "block", "relu")),
    (
        "pallas fp8_rowwise_bf16_drhs",
        SiteSpec(100, 32, 48, "none", "swish", True, "rowwise", "fp8"),
    ),
    ("xla fp8_blockwise", SiteSpec(80, 256, 32, "rms", "relu")),
    ("xla fp8_tensorwise", SiteSpec(64, 32, 48, "layer", "none", out="both")),
    ("pallas bf16", SiteSpec(65, 64, 128, "layer", "hard_swish", out="fp8")),
]
# Delayed scales are right in XLA's products of the faults' site, too, in CI.
DRILLS = [
    ("xla fp8_tensorwise_delayed", SiteSpec(320, 48, 64, "none", "relu", True)),
]


@pytest.mark.parametrize(
    "name, spec",
    support.slow_except(CASES, CASES[1]) + support.drills(DRILLS),
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_what_is_right_passes(name, spec):
    assert why_wrong(spec, Choice.parse(name), stand_ins.HOPPER) is None


def test_a_check_without_memory_is_no_fault():
    def exhausted(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    spec = SiteSpec(64, 32, 48, "none", "none")
    check = lower_check(spec, Choice.parse("xla bf16"), stand_ins.HOPPER)
    compiled = compile_lowered(check.programs)
    assert check.why_wrong(compiled) is None
    for name in ("draw", "begin", "training", "judge"):
        assert check.why_wrong({**compiled, name: exhausted}) == NO_MEMORY


def test_a_kernel_that_takes_too_much_shared_memory_is_at_fault():
    def exhausted(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory limit")

    spec = SiteSpec(64, 32, 48, "none", "none")
    check = lower_check(spec, Choice.parse("xla bf16"), stand_ins.HOPPER)
    compiled = compile_lowered(check.programs) | {"training": exhausted}
    reason = check.why_wrong(compiled)
    assert reason is not None and "RESOURCE_EXHAUSTED: Shared" in reason


# 5,000 rows are for all kernels, 49,999 for those that work by rows.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "m, n, norm, form",
    [
        (5000, 256, "layer", "in out"),
        (5000, 256, "none", "out"),
        (5000, 2048, "rms", ""),
        (49_999, 256, "layer", "in out"),
        (49_999, 512, "block", "out"),
        (49_999, 1024, "rms", ""),
    ],
)
def test_rows_that_fill_no_tile_are_right_on_the_device(m, n, norm, form):
    spec = form_spec(SiteSpec(m, 256, n, norm, "swish", use_bias=True), form)
    names = ("fp8_tensorwise",) if spec.fp8_in else ("bf16", "fp8_tensorwise")
    choices = [Choice.parse(f"pallas {name}") for name in names]
    assert [why_wrong(spec, choice) for choice in choices] == [None] * len(names)


def test_what_does_not_run_has_a_reason():
    spec = SiteSpec(64, 64, 128)
    reason = why_wrong(spec, Choice.parse("pallas bf16"), Device(platform="cpu"))
    assert reason == "does not run: no Hopper GPU"


@pytest.mark.slow
def test_the_epsilon_that_is_asked_for_counts():
    spec = SiteSpec(64, 16, 16, "rms")
    bf16 = Choice.parse("xla bf16")
    assert why_wrong(spec, bf16, stand_ins.CPU, epsilon=1e-3) is None


def test_results_of_another_shape_are_wrong(monkeypatch):
    def cut_off(*args, **kwargs):
        return run_site(*args, **kwargs)[:8]

    monkeypatch.setattr(passes, "run_site", cut_off)
    reason = why_wrong(SiteSpec(64, 16, 16), Choice.parse("xla bf16"), stand_ins.CPU)
    assert reason.startswith("does not compile")


def test_in_a_chain_fp8_leaves_and_comes_where_it_is_read():
    spec = SiteSpec(64, 64, 128, "layer")
    bf16, fp8 = (Choice.parse(f"pallas {x}") for x in ("bf16", "fp8_rowwise"))
    assert chain_forms(spec, bf16) == ("out",)
    assert form_spec(spec, "out") == dataclasses.replace(spec, out="fp8")
    assert chain_forms(spec, fp8)[-1] == "in out"
    expected = dataclasses.replace(spec, fp8_in="tensorwise", out="fp8")
    assert form_spec(spec, "in out") == expected


def test_operands_have_patterns_small_rows_and_signs():
    spec = SiteSpec(64, 16, 32, "layer", use_bias=True)
    trial = draw(spec, "float32", AIMS["uneven"], 0)
    nonzero = jnp.sum(trial.lhs != 0, axis=1)
    assert (nonzero[7], nonzero[11]) == (1, 0) and jnp.ptp(trial.lhs[3]) == 0
    small = draw(spec, "float32", AIMS["small"], 0)
    z = small.lhs @ small.rhs
    square = jnp.mean(z**2, axis=1)
    assert jnp.any(square < 1e-6) and jnp.any(square > 1e-6)
    gamma = small.vectors.gamma
    assert jnp.any(gamma > 0) and jnp.any(gamma < 0)


def _found(change):
    """Returns the worst finding of a result that is `change` of the reference."""
    y = support.normal(130, 96)
    y = y.at[5].set(0.0)  # a row of which nothing is expected
    noise = 2.0**-9 * support.normal(130, 96, seed=1)
    nothing = jnp.zeros((130, 1))

    def expected(y):
        return Expected({"y": y}, {}, {}, nothing, nothing)

    @jax.jit
    def score(y, found, perturbed):
        return scores({"y": found}, expected(y), [{"y": perturbed}])

    by_result = jax.device_get(score(y, change(y), y * (1 + noise)))
    return worst_finding(by_result, {"y": y.shape})


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda y: y * 1.004, "too large"),
        (lambda y: y + 0.01, "[5] is off by inf"),
        (lambda y: y.at[100:].multiply(1.01), "[128:130] is too large"),
        (lambda y: y.at[129].set(0.0), "[128:130] is too large"),
        (lambda y: y.at[64:128, :64].multiply(-1.0), "[64:128] is too large"),
        (lambda y: y.at[3, 3].set(jnp.nan), "is off by nan"),
    ],
    ids=["gain", "nothing expected", "block", "row", "tile", "nan"],
)
def test_a_finding_says_what_and_where(change, why):
    found = _found(change)
    assert found.score.excess > 1
    assert why in str(found) or found.score.excess == float("inf")


def test_rounding_is_no_finding():
    rounded = _found(lambda y: y.astype(jnp.bfloat16).astype(jnp.float32))
    assert rounded.score.excess < 1
