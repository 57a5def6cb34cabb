"""What is measured of candidates at a site, on a CPU."""

import jax
import numpy as np
import pytest

from loka_jax.choice import Choice
from loka_jax.dispatch.candidates import SiteKey
from loka_jax.probe.site import ProbeConfig, no_stats, observe
from loka_jax.recipe import ROLES
from loka_jax.tuning import site as site_lib
from loka_jax.tuning.site import Job, measure_site
from tests import support

SITE = SiteKey(64, 32, 16, "layer", "swish")
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise_delayed/bf16/bf16")


def _job(*names, stats=None):
    choices = tuple(map(Choice.parse, names or NAMES))
    return Job(SITE, choices, stats, "model dense", pairs=2, rows=32, seed=0)


@pytest.fixture(scope="module")
def entry():
    return measure_site(_job(), lambda name: None)


def test_all_candidates_have_times_of_both_passes(entry):
    for what in ("training", "inference", "training warm"):
        assert set(entry.times[what]) == set(NAMES)
        assert all(time > 0 for time in entry.times[what].values())
    assert entry.failures == {}


def test_products_have_errors_with_intervals(entry):
    errors = entry.errors["model dense"]
    assert set(errors) == set(ROLES)
    found = errors["fwd"]["fp8_rowwise"]["relative_l2"]
    assert found.low <= found.mean <= found.high and 0.01 < found.mean < 0.06


def test_errors_are_those_of_what_probe_learned():
    # Operands near one, which FP8 holds nearly exactly: N(0, 1) would say otherwise.
    lhs, rhs, g = (
        1 + 1e-3 * support.normal(*size) for size in ((64, 32), (32, 16), (64, 16))
    )
    stats = no_stats(32, 16, ProbeConfig())
    seen = observe(stats, lhs, rhs, g, (None,) * 3, ProbeConfig())
    errors = site_lib._errors(_job("xla bf16", stats=seen))
    assert errors["fwd"]["fp8_rowwise"]["relative_l2"].mean < 0.01


def _wrong(run_site, wrong):
    """Returns `run_site` with one recipe's result changed."""

    def changed(site, recipe, *args, **kwargs):
        out = run_site(site, recipe, *args, **kwargs)
        return wrong(out) if recipe.name == "fp8_rowwise" else out

    return changed


@pytest.mark.parametrize(
    "wrong, why",
    [
        (lambda out: out * 2, "y is off by"),
        (lambda out: out.at[:16].multiply(4.0), "y is off by"),
        (lambda out: out + jax.lax.stop_gradient(-out) * np.nan, "y is off by nan"),
        (lambda out: out[:8], "does not"),
    ],
    ids=["scale", "rows", "nan", "shape"],
)
def test_who_is_wrong_has_no_time(monkeypatch, wrong, why):
    monkeypatch.setattr(site_lib, "run_site", _wrong(site_lib.run_site, wrong))
    found = measure_site(_job("xla bf16", "xla fp8_rowwise"), lambda name: None)
    assert set(found.times["training"]) == {"xla bf16"}
    assert why in found.failures["xla fp8_rowwise"]


def test_kernels_that_do_not_run_here_fail_with_a_reason():
    site = SiteKey(64, 64, 64, "layer", "swish")
    job = _job("xla bf16", "pallas bf16")._replace(site=site)
    found = measure_site(job, lambda name: None)
    assert "does not compile" in found.failures["pallas bf16"]
    assert set(found.times["training"]) == {"xla bf16"}


def test_it_is_told_whose_turn_it_is():
    turns = []
    measure_site(
        _job("xla bf16", "xla fp8_rowwise")._replace(is_serial=True), turns.append
    )
    assert turns[0] == "" and turns[-1] == ""
    assert set(turns) == {"", "xla bf16", "xla fp8_rowwise"}
    assert turns.index("xla bf16") < turns.index("xla fp8_rowwise")
