"""What is looked at of a site, and a cross network that saturates by its products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.data import Position
from loka_jax.dispatch.drift import LOOKS, SETTLING
from loka_jax.ops.plan import resolve
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec
from loka_jax.train.build import build
from loka_jax.train.watch import drift_looks, replan
from loka_jax.train.watch.drift_looks import look_step, measured, watched
from loka_jax.train.watch.host_state import Progress
from tests.support import stand_ins

DELAYED = "fp8_tensorwise_delayed_bf16_drhs"
PROGRESS = Progress(step=8, position=Position(0, 8, 0))
V, U = "cross/v_0", "cross/u_0"


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "by layers"])
def run(request):
    config = get_config("fp8_mlperf_dcnv2_tiny")
    model = config.model.clone(
        num_cross_layers=1, recipe=DELAYED, fused_wide=request.param
    )
    return build(dataclasses.replace(config, model=model, plan="off"))


def test_casts_that_the_kernels_leave_out_are_not_looked_at(run):
    choice, spec = Choice("pallas", get_recipe(DELAYED)), SiteSpec(64, 32, 48, "layer")
    site = nn.Site(path="site", plan=resolve(spec, choice, stand_ins.HOPPER))
    run = dataclasses.replace(run, list_sites=lambda *_, **__: (site,))
    found = watched(run, PROGRESS)["site"].recipe
    assert found.fwd == choice.recipe.fwd is not None
    assert found.dlhs is None and choice.recipe.dlhs is not None


def aligned(state):
    """Returns a state whose cross network multiplies equal numbers of one sign.

    Its operands are no larger than before, but all products of z add up.
    """
    params = jax.tree.map(lambda x: x, state.params)
    for path, rows_share in ((V, 1.0), (U, 0.5)):
        _, name = path.split("/")
        kernel = params["cross"][name]["kernel"]
        size = kernel.shape[0] ** -rows_share
        params["cross"][name]["kernel"] = jnp.full_like(kernel, size)
    table = jnp.abs(state.table)
    table = jnp.full_like(table, jnp.mean(table))
    return dataclasses.replace(state, params=params, table=table)


def test_a_cross_network_whose_products_saturate_leaves_fp8(run):
    is_fused = run.model.fused_wide
    sites = watched(run, PROGRESS)
    expected = {V: ("dlhs",), U: ("fwd",)} if is_fused else {}
    assert {k: x.fp8_results for k, x in sites.items() if x.fp8_results} == expected
    look, state = look_step(run, sites), run.init()
    assert look is not None
    size = run.config.loop.batch_size
    batch = run.splits.train.batch(Position(0, 0, 0), size, shuffle=True)
    watch = PROGRESS.drift
    for seen in [state] * SETTLING + [aligned(state)] * LOOKS:
        assert not watch.drifted
        watch = watch.after(measured(look(seen, batch)), steps=64)
    assert (U in watch.drifted) == is_fused
    if not is_fused:
        return
    assert watch.drifted[U].startswith("the error of its fwd is ")
    progress = dataclasses.replace(PROGRESS, drift=watch)
    followed = replan.after_drift(run, state.probe, progress)
    assert followed is not None
    change, progress = followed
    # Layer by layer the other products leave in bfloat16.
    assert dict(change.plan.choices)[U].name == "xla bf16"
    now = run.list_sites(change.plan, scales_initialized=True)
    assert not any(site.fp8_results for site in now)
    # The network is looked at as it ran, until it is back.
    assert watched(run.replanned(change.plan), progress) == sites
    assert np.isfinite(measured(look(state, batch))[U][0]).all()


def looked_at(microbatches=1, shards=1):
    """Returns what a look sees in a DLRM after five steps of 256 examples, by path."""
    config = get_config("fp8_dlrm_tiny")
    config = dataclasses.replace(
        config,
        model=config.model.clone(recipe="fp8_tensorwise_delayed"),
        loop=dataclasses.replace(
            config.loop, batch_size=256, microbatches=microbatches
        ),
        mesh=dataclasses.replace(config.mesh, replicas=1, shards=shards),
        plan="off",
    )
    run = build(config)
    batches = [run.read(run.splits.train, i) for i in range(6)]
    state = run.first_step(run.init(), batches[0])
    for batch in batches[1:5]:
        state = run.step(state, batch)
    look = look_step(run, watched(run, PROGRESS))
    assert look is not None
    return measured(look(state, batches[5]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "rows"),
    [({"microbatches": 8}, 256), ({"shards": 4}, 256), ({}, 32)],
    ids=["microbatches", "devices", "some rows"],
)
def test_a_look_at_a_part_sees_gradients_as_large_as_the_step_has(
    monkeypatch, parts, rows
):
    if jax.device_count() < parts.get("shards", 1):
        pytest.skip("needs four devices")
    whole = looked_at()
    monkeypatch.setattr(drift_looks, "MAX_ROWS", rows)
    seen = looked_at(**parts)
    assert seen.keys() == whole.keys() and len(seen) == 3
    for path, measures in whole.items():
        error, flushed, level, _ = measures.T
        found = seen[path].T
        # Of the mean loss of a part, g would be 4 or 8 times as large, and clipped.
        np.testing.assert_array_equal(found[0], error, err_msg=path)
        np.testing.assert_allclose(found[1], flushed, atol=0.02, err_msg=path)
        np.testing.assert_allclose(found[2], level, atol=1, err_msg=path)
