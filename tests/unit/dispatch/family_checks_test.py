"""Families are checked once a machine, and those that fail do not run."""

import types

import jax
import jax.numpy as jnp
import pytest

from loka_jax import checked
from loka_jax.dispatch import family_checks
from loka_jax.measure import families
from loka_jax.measure.checking import NO_MEMORY
from loka_jax.ops.device import HOPPER
from loka_jax.ops.fm_lcb import plan_fm_lcb
from loka_jax.triton import launch

HALVED = "pack in int8: result[1] is halved"


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Stands a GPU in; returns what a check finds by family, and those checked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    reasons, asked = {"packed": HALVED, "merge": NO_MEMORY}, []
    monkeypatch.setattr(
        families, "why_wrong", lambda name: asked.append(name) or reasons.get(name)
    )
    checked.use(family_checks.why_wrong)
    yield reasons, asked
    checked.use(family_checks.why_wrong)


def test_verdicts_are_kept_unless_memory_was_missing_or_they_are_damaged(found):
    reasons, asked = found
    for _ in range(2):
        for name, reason in (("route", None), *reasons.items()):
            assert family_checks.why_wrong(name) == reason
    assert asked == ["route", "packed", "merge", "merge"]
    family_checks.verdicts_path().write_text("{")
    assert family_checks.why_wrong("packed") == HALVED
    assert asked[4:] == ["packed"]


def test_other_kernels_are_checked_anew(found, monkeypatch):
    before = family_checks.verdicts_path()
    monkeypatch.setattr(family_checks.sources, "digest", lambda roots=(): "others")
    assert family_checks.verdicts_path() != before


def test_nothing_is_checked_where_no_kernel_runs(found, monkeypatch):
    cpu = types.SimpleNamespace(platform="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [cpu])
    assert checked.why_wrong("packed", "route") is None
    assert not found[1]


def test_a_family_that_failed_is_left_to_xla_with_a_note_or_refused(
    found, monkeypatch, caplog
):
    for name in ("why_not_here", "why_not_installed"):
        monkeypatch.setattr(launch, name, lambda: None)
    for _ in range(2):
        assert launch.chosen(None, None, "route", "packed") == "xla"
    assert launch.chosen(None, None, "route") == "triton"
    reason = f"the kernels of packed failed their check on this device: {HALVED}"
    note = f"T{reason[1:]}. XLA runs in their place."
    assert [record.getMessage() for record in caplog.records] == [note]
    with pytest.raises(ValueError) as error:
        launch.chosen("triton", None, "packed")
    assert str(error.value) == f"implementation='triton' cannot run: {reason}."
    assert launch.chosen("xla", None, "packed") == "xla"


def test_either_pass_of_fm_and_lcb_is_left_to_xla_by_itself(found):
    found[0]["fm_lcb_backward"] = "FM and LCB, backward: result[0] is zero"
    x = jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16)
    plan = plan_fm_lcb(x, 64, 32, HOPPER)
    assert plan.why_not("fwd") is None
    assert plan.why_not("dlhs").endswith("result[0] is zero")
