"""What runs at each site of an exported program: a plan for its platform and batch.

    cpu     the recipes of the run's plan, by XLA
    cuda    on a GPU: what Dispatch chooses at this batch size for the forward pass;
            without one: as on a CPU, so that the program runs on every GPU

JAX promises that programs with Pallas's Mosaic kernels can be read later; it promises
nothing of Triton's, so in a program these have their XLA twins.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import jax

from loka_jax import nn, triton
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.first_use import check_plan
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn.context import site_context
from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import resolve
from loka_jax.predict.trained import Trained
from loka_jax.site import Choice
from loka_jax.train.step import past_first_steps

Platform = Literal["cpu", "cuda"]
PlanName = Literal["auto", "saved", "off"]
_BETWEEN = "operations between sites"
NO_TRITON = "JAX promises nothing of Triton's kernels in exported programs"


class Form(NamedTuple):
    """A program to export.

    Attributes:
        device: that kernels are planned for.
        runs: by site, what runs there.
        twins: by site, which kernel XLA stands in for, and why.
    """

    platform: Platform
    batch_size: int
    model: nn.Planned
    device: Device
    runs: dict[str, str]
    twins: dict[str, str]


def make_form(
    trained: Trained,
    platform: Platform,
    batch_size: int,
    plan: DispatchPlan,
    *,
    by_xla: bool = False,
) -> Form:
    """Returns the form of a program, with XLA in place of what cannot be exported.

    Args:
        by_xla: no kernels for this machine's GPU, which run where nothing is chosen.
    """
    device = _any_device(platform) if by_xla else _device_of(platform)
    with tracing(device) as left_out:
        sites = trained.network.list_sites(DispatchPlan(), batch_size)
        specs = {site.path: site.spec for site in sites}
        choices, twins = [], {}
        for path, choice in plan.choices:
            reason = NO_TRITON
            if choice.provider != "triton":
                reason = resolve(specs[path], choice, device).why_not
            if reason is not None:
                twins[path] = f"{choice.name}: {reason}"
                choice = Choice("xla", choice.recipe)
            choices.append((path, choice))
        model = nn.Planned(trained.config.model, tuple(choices))
        model = past_first_steps(model, trained.state)
        inputs = trained.network.inputs(batch_size)
        runs = {s.path: s.runs["fwd"] for s in nn.list_sites(model, *inputs)}
    if left_out and platform == "cuda":
        twins[_BETWEEN] = f"triton: {NO_TRITON}"
    return Form(platform, batch_size, model, device, runs, twins)


@contextlib.contextmanager
def tracing(device: Device) -> Iterator[list[str]]:
    """Plans sites for a device, without Triton's kernels, while they are traced.

    Yields a list, which grows by an entry for each operation that would have had one.
    """
    with site_context(device=device), triton.left_out() as left_out:
        yield left_out


def runs_here(platform: Platform) -> bool:
    """Returns whether JAX's default device is of that platform."""
    return {"cpu": "cpu", "cuda": "gpu"}[platform] == jax.default_backend()


def plan_of(
    name: PlanName,
    saved: DispatchPlan,
    trained: Trained,
    form: tuple[Platform, int],
    say: Callable[[str], None],
) -> DispatchPlan:
    """Returns the plan of a program by its name, see `export_run`."""
    platform, batch_size = form
    if name == "off":
        return DispatchPlan()
    if name == "saved" or platform == "cpu" or not runs_here(platform):
        return saved
    sites = trained.network.list_sites(DispatchPlan(), batch_size)
    options, performance = trained.config.dispatch, local_performance().performance
    make_plan = functools.partial(
        plans.make_plan,
        sites,
        limits=options.limits,
        rules=options.by_pattern,
        config=trained.source,
        roles=("fwd",),
    )
    if performance is None:
        return make_plan(None)
    how = make_plan, sites, performance, options.check_seconds, say
    return check_plan(*how, pass_name="inference").plan


def _device_of(platform: Platform) -> Device:
    return local_device() if runs_here(platform) else _any_device(platform)


def _any_device(platform: Platform) -> Device:
    """Returns a device without kernels of its own: its programs run on all others."""
    return Device(platform="cpu" if platform == "cpu" else "gpu")
