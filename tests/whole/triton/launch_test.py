"""The conditions under which the Triton provider runs; imports stay lazy."""

import inspect
import subprocess
import sys
import types

import jax
import pytest

from loka_jax import triton
from loka_jax.triton import launch


def _pretend(monkeypatch, *, missing=(), capability="9.0"):
    def find_spec(name):
        return None if name in missing else object()

    monkeypatch.setattr(launch.importlib.util, "find_spec", find_spec)
    device = types.SimpleNamespace(
        device_kind="some GPU", compute_capability=capability
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])


def test_hopper_with_the_extra_serves(monkeypatch):
    _pretend(monkeypatch)
    assert triton.why_not_here() is None


@pytest.mark.parametrize(
    "package, name", [("jax_triton", "jax-triton"), ("triton", "triton")]
)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, package, name):
    _pretend(monkeypatch, missing=[package])
    remedy = f"{name} is not installed: pip install 'loka-jax[triton]'"
    assert triton.why_not_here() == remedy
    with pytest.raises(ImportError) as error:
        launch.require_triton()
    assert str(error.value) == remedy


@pytest.mark.parametrize("capability", ["8.0", "10.0", None])
def test_other_devices_are_refused(monkeypatch, capability):
    _pretend(monkeypatch, capability=capability)
    assert triton.why_not_here() == "no Hopper GPU: the device is 'some GPU'"


@pytest.mark.slow
def test_importing_the_provider_does_not_import_triton():
    modules = "loka_jax, loka_jax.nn, loka_jax.triton"
    modules += ", loka_jax.triton.matmul, loka_jax.triton.dot_features"
    modules += ", loka_jax.triton.row_update"
    code = (
        f"import sys, {modules}; print({{'triton', 'jax_triton'}} & {{*sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "size, power", [(1, 1), (2, 2), (3, 4), (256, 256), (257, 512)]
)
def test_power_of_two(size, power):
    assert launch.power_of_two(size) == power


def test_a_provider_that_does_not_exist_is_refused():
    chosen = inspect.unwrap(launch.chosen)  # tests check types before it does
    for why_not in (None, "no operands"):
        with pytest.raises(ValueError, match="'tritn' must be 'xla', 'triton' or None"):
            chosen("tritn", why_not)
