"""What drift changes in a plan: a cross network that is one operation as a whole."""

import dataclasses

import pytest

from experiments.configs import get_config
from loka_jax import triton
from loka_jax.data import Position
from loka_jax.dispatch.drift import HOME_LOOKS, LOOKS, SiteDrift, Watch
from loka_jax.site import BF16
from loka_jax.train import build
from loka_jax.train.watch import replan
from loka_jax.train.watch.host_state import Progress

PROGRESS = Progress(step=80, position=Position(0, 80, 0))
CROSS = ["cross/u_0", "cross/u_1"]


@pytest.fixture
def run(monkeypatch):
    """A run of a cross network, which may be one operation, and of layers beside it."""
    monkeypatch.setattr(triton, "why_not_installed", lambda: None)
    config = get_config("fp8_dcnv2_tiny")
    options = dict(num_cross_layers=2, recipe="fp8_tensorwise_delayed")
    model = config.model.clone(**options, fused_wide=True)
    return build.build(dataclasses.replace(config, model=model, plan="off"))


def after(run, progress, **sites):
    """Returns what follows looks at sites of the cross network, by their names."""
    looks = {path: SiteDrift(looks=9) for path in (*CROSS, "deep_mlp/dense_0")}
    looks |= progress.drift.sites
    for name, changes in sites.items():
        looks[f"cross/{name}"] = dataclasses.replace(looks[f"cross/{name}"], **changes)
    return replan.after_drift(
        run, {}, dataclasses.replace(progress, drift=Watch(sites=looks))
    )


def test_a_cross_network_leaves_fp8_and_returns_as_a_whole(run):
    change, progress = after(run, PROGRESS, u_1=dict(off=LOOKS, why="it grew"))
    choices = dict(change.plan.choices)
    assert {path: choices[path] for path in CROSS} == dict.fromkeys(CROSS, BF16)
    assert set(choices) == set(CROSS)
    assert change.said == (
        "step 80: cross/u_1 runs in bfloat16 now: it grew.",
        "step 80: cross/u_0 runs in bfloat16 now: cross/u_1 has drifted, and its cross "
        "network is one operation.",
    )
    demoted = run.replanned(change.plan)
    # The one that had to follow is home first, and waits for the other.
    assert after(demoted, progress, u_0=dict(home=HOME_LOOKS)) is None
    home = dict(home=HOME_LOOKS)
    change, progress = after(demoted, progress, u_0=home, u_1=home)
    choices = dict(change.plan.choices)
    assert all(choices[path].name == "xla fp8_tensorwise_delayed" for path in CROSS)
    assert not progress.drift.away


def test_sites_that_run_apart_leave_fp8_alone(run):
    model = run.config.model.clone(fused_wide=False)
    apart = build.build(dataclasses.replace(run.config, model=model))
    change, _ = after(apart, PROGRESS, u_1=dict(off=LOOKS, why="it grew"))
    assert [path for path, _ in change.plan.choices] == ["cross/u_1"]
