"""When looks are taken, read and forgotten, and what a look at a step sees."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np

from loka_jax.data import Position
from loka_jax.dispatch.drift import SiteDrift
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.group import Cross, Group, Member
from loka_jax.nn import Site
from loka_jax.ops.plan import resolve
from loka_jax.probe.site import Capture
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice, SiteSpec
from loka_jax.train.watch import looks
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.looks import Looks, Watched, watched
from tests.support import stand_ins
from tests.support.loop import start_state

DELAYED = "fp8_tensorwise_delayed_bf16_drhs"
PROGRESS = Progress(step=8, position=Position(0, 8, 0))


@dataclasses.dataclass(frozen=True)
class Seen:
    """A watch that remembers the looks that it was given, and warns of odd ones."""

    looks: tuple = ()
    warnings: tuple[str, ...] = ()

    def after(self, look, *rest):
        warnings = (f"look {look}",) * (look % 2)
        return Seen((*self.looks, (look, *rest)), (*self.warnings, *warnings))


def test_looks_at_scales_are_read_nine_steps_later_or_when_asked(monkeypatch):
    take_look = mock.Mock(side_effect=range(1, 99))
    monkeypatch.setattr(looks, "take_look", take_look)
    monkeypatch.setattr(looks, "named_sites", lambda state: state.sites)
    plan = SimpleNamespace(choice=SimpleNamespace(recipe="recipe"))
    run = SimpleNamespace(
        sites=[SimpleNamespace(path="a", plan=plan)],
        config=SimpleNamespace(loop=SimpleNamespace(batch_size=32)),
        splits=SimpleNamespace(train="data"),
    )
    batch, said = SimpleNamespace(dense=np.float32(5)), []
    state = SimpleNamespace(sites={"a": "scales"}, skipped=4)
    progress = dataclasses.replace(PROGRESS, scale_watch=Seen())
    own = Looks(said.append)
    for _ in range(8):
        progress = own.after_step(run, state, progress, batch)
    assert progress.scale_watch == Seen() and said == []
    progress = own.after_step(run, state, progress, batch)
    assert progress.scale_watch.looks == ((1, "data", 32),) and said == ["look 1"]
    options = {"step": 8, "position": PROGRESS.position, "skipped": 4}
    expected = mock.call({"a": "scales"}, {"a": "recipe"}, 5, **options)
    assert take_look.mock_calls == [expected] * 9
    progress = own.read(progress)
    assert [look for look, *_ in progress.scale_watch.looks] == list(range(1, 10))
    assert said == [f"look {i}" for i in (1, 3, 5, 7, 9)]
    own.after_step(run, state, progress, batch)
    own.drop()
    # A model without delayed scales has none to look at.
    own.after_step(run, SimpleNamespace(sites={}), progress, batch)
    assert own.read(progress) == progress and take_look.call_count == 10


def site_of(path, provider="xla", name=DELAYED, **options):
    spec = SiteSpec(64, 32, 48, "layer" if provider == "pallas" else "none")
    choice = Choice(provider, get_recipe(name))
    return Site(path=path, plan=resolve(spec, choice, stand_ins.HOPPER), **options)


# The first product of a layer of rank 48.
_PLAIN, _OTHER = (
    Member(path, SiteSpec(64, *size))
    for path, size in (("plain", (32, 48)), ("other", (48, 32)))
)
CROSSED = Group(
    rows=64,
    inputs=((32,),),
    layers=(Cross(reads=0, members=((_PLAIN, _OTHER),)),),
    outputs=(1,),
)


def test_sites_in_fp8_are_looked_at_and_those_that_left_it_as_they_were():
    sites = {
        "kernel": site_of("kernel", "pallas"),
        "plain": site_of("plain", "group", group=CROSSED),
        "bf16": site_of("bf16", name="bf16"),
    }
    asked = []

    def list_sites(plan, *, scales_initialized):
        asked.append((dict(plan.choices), scales_initialized))
        return tuple(sites.values())

    run = SimpleNamespace(plan=DispatchPlan(), list_sites=list_sites)
    left = {"choice": "xla fp8_rowwise"}
    drift = {"away": SiteDrift(left=left), "here": SiteDrift()}
    found = watched(run, dataclasses.replace(PROGRESS, drift=drift))
    assert asked == [({"away": Choice.parse("xla fp8_rowwise")}, True)]
    assert found.keys() == {"kernel", "plain"}
    recipe = get_recipe(DELAYED)
    assert found["plain"] == Watched(recipe, ("dlhs",)) and recipe.dlhs is not None
    # The kernel leaves out a cast; scales may be uninitialized in a look.
    assert found["kernel"].recipe == dataclasses.replace(recipe, dlhs=None)
    assert not found["kernel"].recipe.scales_initialized


ROWWISE, RECIPE = get_recipe("fp8_rowwise"), get_recipe(DELAYED)
SITES = {
    "a": Watched(ROWWISE, ()),
    "b": Watched(RECIPE, ("fwd", "dlhs")),
    "c": Watched(RECIPE, ()),
}


def test_a_look_returns_the_measures_of_each_site_by_its_casts(monkeypatch):
    def observe(state, batch):
        assert state.probe == {}
        relative_l2 = jnp.broadcast_to(jnp.float32([[1], [2]]), (2, 3))
        seen = dict(errors=SimpleNamespace(relative_l2=relative_l2), operands=batch)
        return dict.fromkeys(SITES, SimpleNamespace(**seen))

    def health(operands, error, recipe, *, fp8_results, limits):
        numbers = error, operands, float(recipe == RECIPE), len(fp8_results)
        return jnp.stack([jnp.broadcast_to(jnp.float32(x), 3) for x in numbers], 1)

    run, observe_step = mock.Mock(programs={}), mock.Mock(return_value=observe)
    parts = dict(observe_step=observe_step, parts_of=lambda run: 6)
    for name, part in dict(health=health, by_path=lambda seen: seen, **parts).items():
        monkeypatch.setattr(looks, name, part)
    state = dataclasses.replace(start_state(), probe={"site": jnp.ones(2)})
    look = looks.look_step(run, SITES)
    found = look(state, jnp.float32(7))
    assert looks.look_step(run, dict(SITES)) is look
    wanted = {"a": (1, 7, 0, 0), "b": (2, 7, 1, 2), "c": (2, 7, 1, 0)}
    for path, casts in wanted.items():
        np.testing.assert_allclose(found[path], [casts] * 3)
    observe_step.assert_called_once_with(
        run, Capture(recipes=(ROWWISE, RECIPE), max_rows=looks.MAX_ROWS, copies=6)
    )
