"""Axes, the configurations that they make, and what is left out and why."""

import dataclasses

import pytest

from loka_jax.search import space
from tests.support.configs import tiny


def axes(*entries, devices=1, config=None):
    return space.axes_of(config or tiny("fp8_dlrm"), entries, devices)


def test_only_what_changes_speed_alone_comes_by_itself():
    (steps,) = axes()
    assert steps.name == "steps-per-call" and steps.own == "1"
    assert steps.values["8"] == {"loop.steps-per-call": 8}
    assert [axis.name for axis in axes(devices=8)] == ["steps-per-call", "mesh"]
    assert {"recipe", "mods", "sync"} <= set(space.left_out(axes()))
    assert "recipe" not in space.left_out(axes("recipe"))


def test_values_are_those_of_the_options_that_they_set():
    by_name = {axis.name: axis for axis in axes("recipe", "mods", "batch-size=64,128")}
    assert by_name["recipe"].values["bf16"] == {"recipe": "bf16", "plan": "off"}
    assert by_name["recipe"].own == "auto"
    assert by_name["mods"].values["loka"]["bias"] is False
    assert by_name["mods"].own == "none"
    assert by_name["batch-size"].own == "128"
    assert axes("batch-size=64,256")[1].own == space.OWN
    (_, mesh, sync) = axes("mesh=2x4", "sync=gradients,16", devices=8)
    assert mesh.values["2x4"] == {"mesh.replicas": 2, "mesh.shards": 4}
    assert list(sync.values["gradients"]) == ["mesh.sync-every", "mesh.sync"]
    (_, widths) = axes("top-mlp=32 16,8")
    assert widths.values["8"] == {"top-mlp": (8,)} and widths.own == "32 16"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("recipes", "--space recipes is no axis (did you mean 'recipe'?)"),
        ("optim.lrr=1,2", "there is no option 'optim.lrr' (did you mean 'optim.lr'?)"),
        ("batch-size=many", "--space batch-size=many: it is wrong (Expected int"),
        ("mods=all", "mods=all must be one of none, loka."),
    ],
)
def test_a_wrong_entry_is_one_sentence(entry, said):
    with pytest.raises(ValueError) as error:
        axes(entry)
    assert said in str(error.value)


def test_points_are_the_users_own_first_and_what_the_configuration_takes():
    config = tiny("fp8_dlrm")
    found = axes("microbatches=1,3", "mods", "steps-per-call=1,2", config=config)
    points, refused = space.points_of(config, found)
    assert points[0] == (
        {"steps-per-call": "1", "microbatches": "1", "mods": "none"},
        config,
    )
    assert len(points) == 4 and len({str(point.choices) for point in points}) == 4
    ((why, count),) = refused.items()
    assert "must be a multiple of --loop.microbatches 3" in why and count == 4
    both = points[-1].config
    assert both.model.norm == "block" and both.loop.steps_per_call == 2


def test_averages_need_groups_and_a_batch_its_devices():
    config = space.with_mesh(tiny("fp8_dlrm"))
    found = axes("mesh=1x1,2x4", "sync=gradients,1", "batch-size=128,12", config=config)
    points, refused = space.points_of(config, found)
    assert {str(point.choices["mesh"]) for point in points} == {"1x1", "2x4"}
    reasons = " ".join(refused)
    assert "one group of devices" in reasons and "a multiple of 8 devices" in reasons
    averaging = [p.config.mesh for p in points if p.choices["sync"] == "1"]
    assert averaging and all(
        (mesh.sync, mesh.replicas) == ("weights", 2) for mesh in averaging
    )


def test_an_option_of_the_run_itself_stays():
    config = dataclasses.replace(tiny("fp8_dlrm"), seed=3)
    points, _ = space.points_of(config, axes("recipe=bf16", config=config))
    assert {point.config.seed for point in points} == {3}
