"""`why_wrong` catches every fault planted in a site, and finds none where none is.

Most faults are planted around XLA's references in the place of the kernels; some inside
the kernels, in the interpreter. On a GPU all are planted around the kernels, at the
sizes of real sites.
"""

import dataclasses
import pathlib
import re

import jax
import pytest

from loka_jax.measure.checking import NO_MEMORY, why_wrong
from loka_jax.ops.device import Device, local_device
from loka_jax.pallas import dense_norm_kernel, norm_backward
from loka_jax.site import Choice, SiteSpec
from tests.drills.faults import FAULTS, Fault, plant
from tests.support import stand_ins
from tests.support.pallas import interpret  # noqa: F401

SMALL = SiteSpec(208, 64, 128, "layer", "swish", use_bias=True)
LARGE = dataclasses.replace(SMALL, m=65_488, k=256, n=256)  # fused in bfloat16 too
DOCS = pathlib.Path(__file__).parents[3] / "docs" / "dispatch.md"
every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
# Every fifth in every run, all in CI.
faults_in_turn = pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.slow] if i % 5 else [], id=fault.what)
        for i, fault in enumerate(FAULTS)
    ],
)


def assert_caught(fault: Fault, device: Device, spec: SiteSpec):
    spec = dataclasses.replace(spec, **fault.spec)
    reason = why_wrong(spec, Choice.parse(fault.choice), device)
    assert reason is not None
    assert not reason.startswith("does not"), reason


@faults_in_turn
def test_it_is_caught(monkeypatch, fault):
    assert_caught(fault, plant(fault, monkeypatch, stand_ins.HOPPER), SMALL)


@pytest.mark.gpu
@every_fault
def test_it_is_caught_on_a_gpu(monkeypatch, fault):
    assert_caught(fault, plant(fault, monkeypatch, local_device()), LARGE)


@pytest.mark.parametrize("choice", sorted({fault.choice for fault in FAULTS}))
def test_nothing_is_found_without_a_fault(choice):
    assert why_wrong(SMALL, Choice.parse(choice), stand_ins.HOPPER) is None


@pytest.mark.gpu
@pytest.mark.parametrize("n", [256, 512, 2048])
@pytest.mark.parametrize("out", ["compute", "fp8"])
@pytest.mark.parametrize("choice", sorted({fault.choice for fault in FAULTS}))
def test_nothing_is_found_without_a_fault_on_a_gpu(choice, out, n):
    # Several tests run at a time on one GPU.
    m = LARGE.m if n < 2048 else LARGE.m // 4
    spec = dataclasses.replace(LARGE, m=m, n=n, k=n, out=out)
    found = why_wrong(spec, Choice.parse(choice))
    if found == NO_MEMORY:
        pytest.skip(f"this kernel {found}")
    assert found is None


# Inside the kernels, in the interpreter.

INSIDE = SiteSpec(80, 64, 128, "layer", "swish")


@pytest.fixture
def interpreter(interpret):  # noqa: F811
    jax.clear_caches()  # a launch is traced once for a shape, with a fault or without
    yield Device(platform="cpu", interpret=interpret)
    jax.clear_caches()


def _in_activation(activate):
    return lambda name, v: activate(name, v) * 1.01


def _at_another_argument(slope):
    return lambda name, v: slope(name, v + 0.05)


@pytest.mark.parametrize(
    "module, name, change, choice",
    [
        (dense_norm_kernel, "activate_scaled", _in_activation, "pallas bf16"),
        (norm_backward, "slope_scaled", _at_another_argument, "pallas bf16"),
    ],
    ids=["activation 1 % too large", "slope at another argument"],
)
def test_it_is_caught_inside_a_kernel(
    monkeypatch, interpreter, module, name, change, choice
):
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    assert why_wrong(INSIDE, Choice.parse(choice), interpreter) is not None


@pytest.mark.parametrize("choice", ["pallas fp8_rowwise"])
def test_nothing_is_found_inside_the_kernels(interpreter, choice):
    assert why_wrong(INSIDE, Choice.parse(choice), interpreter) is None


def test_the_page_lists_these_faults():
    page = DOCS.read_text().partition("| kind | planted |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    listed = {(kind, what) for kind, cell in rows for what in cell.split("; ")}
    assert listed - {("---", "---")} == {(fault.kind, fault.what) for fault in FAULTS}
