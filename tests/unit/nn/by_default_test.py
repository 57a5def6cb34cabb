"""What runs in converted models for which nobody chose, and how often it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import chosen, nn
from loka_jax.chosen import Chosen
from loka_jax.nn import group as groups
from loka_jax.ops import run_site
from loka_jax.site import BF16, Choice
from tests.support import stand_ins
from tests.support.flow import Transformer, Wide, X
from tests.support.nn import initialized, listed, rounded

pytestmark = pytest.mark.usefixtures("as_users_do")
REASON = "it was said so"


@pytest.fixture
def choosing(monkeypatch):
    """Returns a function that sets what is chosen, by path; and what was asked."""
    asked = []

    def set_choices(**names):
        def choose(sites, in_float32):
            asked.append((sites, in_float32))
            return {
                path: Chosen(None if name is None else Choice.parse(name), REASON)
                for path, name in names.items()
            }

        monkeypatch.setattr(chosen, "_chooses", [choose])
        return asked

    return set_choices


def test_without_a_gpu_a_model_runs_as_written():
    plain = Transformer()
    model, variables = nn.convert(plain), initialized(plain, X)
    sites = listed(model, X)
    assert {site.runs["fwd"] for site in sites.values()} == {"as written"}
    assert sites["blocks/up"].why_not == "there is no GPU"
    assert sites["blocks/up"].group is not None and sites["blocks/up"].has_choice
    expected, found = (jax.jit(m.apply)(variables, X) for m in (plain, model))
    np.testing.assert_array_equal(expected, found)


def test_a_choice_or_recipe_stands_above_the_default():
    plan = (("blocks/up", Choice.parse("xla fp8_rowwise")),)
    sites = listed(nn.Planned(nn.convert(Transformer()), plan), X)
    assert sites["blocks/up"].is_fp8 and sites["blocks/up"].default is None
    assert sites["blocks/down"].runs["fwd"] == "as written"
    sites = listed(nn.convert(Transformer(), recipe="fp8_rowwise"), X)
    assert sites["blocks/down"].is_fp8 and sites["blocks/down"].default is None


def test_probe_observes_what_runs_as_written():
    with nn.probing(nn.ProbeConfig()):
        variables = jax.eval_shape(nn.convert(Wide()).init, jax.random.key(0), X)
    assert {*nn.by_path(variables[nn.PROBE])} == {"Dense_0", "Dense_1", "head"}


def test_sites_and_groups_run_what_is_chosen(choosing):
    asked = choosing(Dense_0="group bf16", Dense_1="group bf16", head=None)
    model, rows = nn.convert(Wide()), jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.triton, "why_not_installed", lambda: None)
        with nn.site_context(device=stand_ins.HOPPER):
            sites = listed(model, rows)
    assert [sites[x].in_group for x in ("Dense_0", "Dense_1")] == [True, True]
    assert sites["head"].why_not == sites["head"].default == REASON
    shown, in_float32 = asked[-1]
    assert [site.path for site in shown] == ["Dense_0", "Dense_1", "head"]
    assert shown[0].group == sites["Dense_0"].group is not None
    assert in_float32 == {"Dense_0", "Dense_1", "head"}


def test_a_site_says_why_it_is_not_in_its_group(choosing):
    def reasons(model, device=stand_ins.HOPPER, rows=4096):
        rows = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
        with nn.site_context(device=device):
            return listed(model, rows)["Dense_1"].not_joined

    choosing(Dense_0="group bf16", Dense_1="xla bf16", head="xla bf16")
    assert reasons(nn.convert(Wide())) == REASON
    forced = nn.convert(Wide(), recipe="bf16")
    plan = (("Dense_1", BF16),)
    assert reasons(nn.Planned(forced, plan)) == "its choice is xla bf16"
    rowwise = nn.convert(Wide(), recipe="fp8_rowwise")
    assert "does not scale every operand" in str(reasons(rowwise))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.triton, "why_not_installed", lambda: None)
        assert reasons(forced, device=stand_ins.CPU) == "no Hopper GPU"
        assert reasons(forced) is None


CALLED: list = []


class Stack(linen.Module):
    depth: int

    @linen.compact
    def __call__(self, x):
        CALLED.append(x.shape)
        for _ in range(self.depth):
            x = linen.relu(linen.LayerNorm()(linen.Dense(64)(x))) + x
        return linen.Dense(1)(x)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensorwise_delayed"])
def test_layers_alike_are_traced_once(recipe, monkeypatch):
    rows, traced = rounded(64, 64), []
    run = run_site.run_site

    def traces(depth):
        """Returns how often the model and its sites are traced for a gradient."""
        model = nn.convert(Stack(depth), recipe=recipe)
        variables = initialized(model, rows)
        jax.clear_caches()
        CALLED.clear()
        traced.clear()
        step = jax.grad(lambda v: jnp.sum(model.apply(v, rows)))
        jax.jit(step).trace(variables)
        return len(CALLED), len(traced)

    def counted(plan, *args, **options):
        traced.append(plan)
        return run(plan, *args, **options)

    alike = jax.jit(counted, static_argnames=("plan", "epsilon", "axis_names"))
    monkeypatch.setattr(nn.dense, "_run_alike", alike)
    assert traces(2) == traces(6) == (1, 2)
