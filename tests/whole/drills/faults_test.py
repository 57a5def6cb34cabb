"""`why_wrong` catches every fault planted in a site, and finds none where none is."""

import dataclasses
import pathlib
import re

import pytest

from loka_jax.measure.checking import NO_MEMORY, why_wrong
from loka_jax.ops.device import Device, local_device
from loka_jax.site import Choice, SiteSpec
from tests.drills.faults import FAULTS, Fault, plant
from tests.support import stand_ins

SMALL = SiteSpec(208, 64, 128, "layer", "swish", use_bias=True)
LARGE = dataclasses.replace(SMALL, m=65_488, k=256, n=256)  # fused in bfloat16 too
DOCS = pathlib.Path(__file__).parents[3] / "docs" / "dispatch.md"
CHOICES = sorted({fault.choice for fault in FAULTS})


def assert_caught(fault: Fault, device: Device, spec: SiteSpec):
    spec = dataclasses.replace(spec, **fault.spec)
    reason = why_wrong(spec, Choice.parse(fault.choice), device)
    assert reason is not None and not reason.startswith("does not"), reason


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.drill] if i % 4 else [], id=fault.what)
        for i, fault in enumerate(FAULTS)
    ],
)
def test_it_is_caught(monkeypatch, fault):
    assert_caught(fault, plant(fault, monkeypatch, stand_ins.HOPPER), SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_it_is_caught_on_a_gpu(monkeypatch, fault):
    assert_caught(fault, plant(fault, monkeypatch, local_device()), LARGE)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [256, 512, 2048])
@pytest.mark.parametrize("out", ["compute", "fp8"])
@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_is_found_without_a_fault_on_a_gpu(choice, out, n):
    # Several tests run at a time on one GPU.
    m = LARGE.m if n < 2048 else LARGE.m // 4
    spec = dataclasses.replace(LARGE, m=m, n=n, k=n, out=out)
    found = why_wrong(spec, Choice.parse(choice))
    if found == NO_MEMORY:
        pytest.skip(f"this kernel {found}")
    assert found is None


def test_the_page_lists_these_faults():
    page = DOCS.read_text().partition("| kind | planted |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    listed = {(kind, what) for kind, cell in rows for what in cell.split("; ")}
    assert listed - {("---", "---")} == {(fault.kind, fault.what) for fault in FAULTS}


CASES = [
    # A last partial tile, k != n, FP8 in and out, every norm and activation.
    ("xla bf16", SiteSpec(65, 24, 40, "rms", "hard_swish")),
    ("pallas fp8_rowwise", SiteSpec(144, 96, 512, "layer", "gelu", True)),
    ("pallas fp8_tensorwise_delayed", SiteSpec(208, 64, 96, "block", "relu")),
    ("xla fp8_blockwise", SiteSpec(80, 256, 32, "rms", "none", out="both")),
    ("pallas bf16", SiteSpec(65, 64, 128, "layer", "hard_swish", out="fp8")),
]


@pytest.mark.parametrize("name, spec", CASES, ids=lambda x: str(x).replace(" ", "-"))
def test_what_is_right_passes(name, spec):
    assert why_wrong(spec, Choice.parse(name), stand_ins.HOPPER) is None
