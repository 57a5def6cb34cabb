"""One call plans a model of one's own by its live errors, and sets its scales."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.dispatch import adopt as adopt_lib
from loka_jax.dispatch.adopt import adopt
from loka_jax.dispatch.policy import Limits
from loka_jax.scaling import DelayedScaling
from loka_jax.site import BF16
from tests.support.adopting import DELAYED, Gpu, stood_in
from tests.support.nn import rounded

pytestmark = pytest.mark.usefixtures("as_users_do")


class Ranker(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.LayerNorm()(linen.Dense(32)(x)))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(1, name="head")(linen.Dense(16)(x))[:, 0]


def loss(model, variables, batch):
    x, y = batch
    rngs = {"dropout": jax.random.key(3)}
    z = model.apply(variables, x, train=True, rngs=rngs)
    return jnp.mean((z - y) ** 2), z  # further results are nobody's concern


BATCHES = [(x, x[:, 0]) for x in (rounded(64, 32, seed=i) for i in range(3))]


@pytest.fixture(scope="module")
def ranker():
    model = nn.convert(Ranker(), skip="head")
    return model, model.init(jax.random.key(0), BATCHES[0][0])


def choices(adopted):
    return {path: choice.name for path, choice in adopted.plan.choices}


def adopted_on(gpu, ranker, said=None, **options):
    """Returns what a GPU adopts, which says what is said there."""
    with stood_in(gpu):
        say = (lambda text: None) if said is None else said.append
        return adopt(*ranker, loss, BATCHES, say=say, **options)


def test_a_model_leaves_in_fp8_with_its_scales_set(ranker):
    said = []
    adopted = adopted_on(Gpu(), ranker, said)
    # What a head reads has no FP8 in its dlhs, and no candidate without was timed.
    assert choices(adopted) == {"Dense_0": DELAYED, "Dense_1": BF16.name}
    (table,) = jax.tree.leaves(adopted.variables[nn.OVERWRITE_WITH_GRADIENT])
    assert np.all(DelayedScaling(table).factors > 0)
    assert said[0].startswith("Looking for FP8 at 2 sites, for 180 seconds at most")
    assert said[-1].splitlines()[-1] == adopted.sentence
    assert adopted.sentence.startswith("1 of 3 sites run in FP8")
    assert "50% faster" in adopted.sentence
    assert all(len(line) <= 100 for line in said[-1].splitlines()[:-2])

    # It trains, by any optimizer of all variables, and runs no guard of first steps.
    model, variables = adopted.model, adopted.variables
    sites = nn.sites_of(functools.partial(loss, model), variables, BATCHES[0])
    recipes = {site.path: site.plan.choice.recipe for site in sites}
    assert recipes["Dense_0"].scales_initialized
    optimizer = nn.overwriting(optax.sgd(0.1))
    state = optimizer.init(variables)
    gradients = jax.jit(jax.grad(functools.partial(loss, model), has_aux=True))
    updates, _ = optimizer.update(gradients(variables, BATCHES[0])[0], state, variables)
    after = optax.apply_updates(variables, updates)
    assert np.isfinite(loss(model, after, BATCHES[0])[0])


def initialized(sites):
    return {x.path for x in sites if x.plan.choice.recipe.scales_initialized}


def test_with_no_seconds_recipes_stay_and_scales_are_set():
    model = nn.convert(Ranker(), recipe="fp8_tensorwise_delayed", skip="head")
    variables = jax.jit(model.init)(jax.random.key(0), BATCHES[0][0])
    adopted = adopt(model, variables, loss, BATCHES, seconds=0.0, say=lambda text: None)
    assert not adopted.plan.choices and "keep their recipes" in adopted.sentence
    tables = jax.tree.leaves(adopted.variables[nn.OVERWRITE_WITH_GRADIENT])
    assert all(np.all(DelayedScaling(table).factors > 0) for table in tables)
    of_loss = functools.partial(loss, adopted.model)
    sites = nn.sites_of(of_loss, adopted.variables, BATCHES[0])
    assert initialized(sites) == {"Dense_0", "Dense_1"}


class TwoParts(nnx.Module):
    """Of which a loss may run the first alone."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_with_no_seconds_an_nnx_model_keeps_its_recipes_too():
    def of_both(model, batch):
        return jnp.mean((model(batch[0])[:, 0] - batch[1]) ** 2)

    rows, recipe = BATCHES[0][0], "fp8_tensorwise_delayed"
    model = nn.convert(TwoParts(nnx.Rngs(0)), rows, recipe=recipe)
    how = dict(seconds=0.0, say=lambda text: None)
    adopted = adopt(model, None, of_both, BATCHES, **how)
    assert initialized(nn.list_sites(adopted.model, rows)) == {"up", "down"}
    tables = jax.tree.leaves(nnx.state(adopted.model, nn.Fp8State))
    assert all(np.all(DelayedScaling(table).factors > 0) for table in tables)

    # Scales that no batch would set make zeros of what their site returns.
    def of_first(model, batch):
        return jnp.mean((model.up(batch[0])[:, 0] - batch[1]) ** 2)

    with pytest.raises(ValueError, match="does not run the sites down, .*`skip`"):
        adopt(model, None, of_first, BATCHES, **how)
    assert adopt(adopted.model, None, of_first, BATCHES, **how)  # they are set


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_delayed_scales_that_the_loss_does_not_set_are_refused(seconds):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x, whole=True):
            x = linen.Dense(32, name="first")(x)
            return linen.Dense(16, name="second")(x) if whole else x

    def of_first(model, variables, batch):
        z = model.apply(variables, batch[0], whole=False)[:, 0]
        return jnp.mean((z - batch[1]) ** 2)

    model = nn.convert(Model(), recipe="fp8_tensorwise_delayed")
    variables = jax.jit(model.init)(jax.random.key(0), BATCHES[0][0])
    with pytest.raises(ValueError, match="does not run the sites second, .*`skip`"):
        adopt(model, variables, of_first, BATCHES, seconds=seconds)


def test_a_plan_is_a_file_of_a_model_and_its_device(ranker, tmp_path):
    path = tmp_path / "plan.json"
    adopted = adopted_on(Gpu(), ranker)
    adopted.save(path)
    followed = adopt(*ranker, loss, BATCHES, plan=path, say=print)
    assert choices(followed) == choices(adopted) and f"{path}" in followed.sentence
    assert jax.tree.leaves(followed.variables[nn.OVERWRITE_WITH_GRADIENT])
    # Of other rows, of another device, and what is no plan.
    halves = [jax.tree.map(lambda x: x[:32], batch) for batch in BATCHES]
    with pytest.raises(ValueError, match="64 x .* and here is 32 x .*leave `plan` out"):
        adopt(*ranker, loss, halves, plan=path)
    text = path.read_text()
    path.write_text(text.replace('"kernels": "', '"kernels": "0'))
    with pytest.raises(ValueError, match="the kernels have changed since"):
        adopt(*ranker, loss, BATCHES, plan=path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="not a plan of adopt"):
        adopt(*ranker, loss, BATCHES, plan=path)
    path.write_text(text.replace(DELAYED, "pallas bf16"))
    with pytest.raises(ValueError, match="kernels for a Hopper GPU at Dense_0"):
        adopt(*ranker, loss, BATCHES, plan=path)


@pytest.mark.parametrize(
    "gpu, options, text",
    [
        (Gpu(plan_us=299.0), {}, "would not be computed faster"),
        (Gpu({BF16.name: 2.0, DELAYED: 1.95}), {}, "no kernel in FP8 is faster"),
        (Gpu(), {"limits": Limits(healthy=0.01)}, r"above the limits \(Dense_0: "),
    ],
)
def test_what_keeps_fp8_out_is_said(ranker, gpu, options, text):
    adopted = adopted_on(gpu, ranker, **options)
    assert not any(choice.is_fp8 for _, choice in adopted.plan.choices)
    assert adopted.sentence.startswith("No site runs in FP8: ")
    assert re.search(text, adopted.sentence)


def test_all_processes_follow_the_first(ranker, monkeypatch):
    sent = []

    def first_says(text):
        sent.append(text)
        return text

    def told(text):
        del text
        return sent.pop(0)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(adopt_lib, "same_text", first_says)
    first = adopted_on(Gpu(), ranker)
    # Another one has measured that no FP8 is fast, and that its step is slower by it.
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(adopt_lib, "same_text", told)
    other = adopted_on(Gpu({BF16.name: 2.0, DELAYED: 1.95}, plan_us=400.0), ranker)
    assert not sent and choices(other) == choices(first)
    assert other.sentence == first.sentence


def test_kernels_of_ours_without_fp8_are_told_apart(ranker):
    other = "xla f32"  # stands for a kernel in bfloat16 that runs here
    adopted = adopted_on(Gpu({BF16.name: 2.0, other: 1.0}), ranker)
    assert adopted.sentence.startswith("No site runs in FP8: no kernel in FP8 is")
    assert (
        "By our kernels the gradients of a batch are computed 50%" in adopted.sentence
    )


def test_without_a_gpu_the_model_runs_as_it_was_given(ranker):
    adopted = adopt(*ranker, loss, BATCHES, say=lambda text: None)
    assert "a CPU only emulates it" in adopted.sentence and not adopted.plan.choices
    with pytest.raises(ValueError, match="was given 2 batches.* give it more"):
        adopt(*ranker, loss, BATCHES[:2])
    with pytest.raises(ValueError, match="calls no `apply` of the model"):
        with stood_in(Gpu()):
            adopt(*ranker, lambda _, *args: loss(ranker[0], *args), BATCHES)
    with pytest.raises(ValueError, match="Linen model must be all that init"):
        adopt(ranker[0], None, loss, BATCHES)
