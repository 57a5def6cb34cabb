"""The conditions under which the Triton provider runs; imports stay lazy."""

import inspect
import re
import types

import jax
import pytest

from loka_jax import triton
from loka_jax.triton import launch


def _pretend(monkeypatch, *, missing=(), capability="9.0"):
    def find_spec(name):
        return None if name in missing else object()

    monkeypatch.setattr(launch.importlib.util, "find_spec", find_spec)
    fields = dict(device_kind="some GPU", compute_capability=capability)
    device = types.SimpleNamespace(**fields)
    monkeypatch.setattr(jax, "devices", lambda: [device])


def test_the_provider_runs_with_the_extra_on_hopper(monkeypatch):
    _pretend(monkeypatch)
    assert triton.why_not_here() is None
    for capability in ("8.0", "10.0", None):
        _pretend(monkeypatch, capability=capability)
        assert triton.why_not_here() == "no Hopper GPU: the device is 'some GPU'"
    for package, name in (("jax_triton", "jax-triton"), ("triton", "triton")):
        _pretend(monkeypatch, missing=[package])
        remedy = f"{name} is not installed: pip install 'loka-jax[triton]'"
        assert triton.why_not_here() == remedy
        with pytest.raises(ImportError, match=re.escape(remedy)):
            launch.require_triton()


def test_triton_is_chosen_where_it_runs_and_asked_for_elsewhere_it_is_an_error(
    monkeypatch,
):
    unwrapped = inspect.unwrap(launch.chosen)  # tests check types before it does
    chosen = lambda *x: unwrapped(*x, "norm_tail")  # noqa: E731
    _pretend(monkeypatch)
    asked = [(None, None), (None, "no operands"), ("xla", None), ("xla", "no operands")]
    assert [chosen(*x) for x in asked] == ["triton", "xla", "xla", "xla"]
    # Lowered for a GPU on another machine.
    _pretend(monkeypatch, capability=None)
    assert [chosen(x, None) for x in (None, "triton")] == ["xla", "triton"]
    _pretend(monkeypatch, missing=["triton"])
    for implementation, why_not, reason in (
        ("tritn", None, "'tritn' must be 'xla', 'triton' or None"),
        ("triton", "no operands", "'triton' cannot run: no operands"),
        ("triton", None, "'triton' cannot run: triton is not installed"),
    ):
        with pytest.raises(ValueError, match=reason):
            chosen(implementation, why_not)
    assert chosen(None, None) == "xla"


def test_operations_that_are_left_out_are_counted_where_a_kernel_serves(monkeypatch):
    _pretend(monkeypatch)
    with launch.left_out() as entries:
        reasons = (None, "no", None)
        providers = [launch.chosen(None, reason, "merge") for reason in reasons]
        assert launch.chosen("triton", None, "merge") == "triton"  # requested
    assert providers == ["xla"] * 3 and entries == ["triton"] * 2
    assert launch.chosen(None, None, "merge") == "triton" and len(entries) == 2
