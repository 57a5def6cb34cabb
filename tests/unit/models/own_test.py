"""A user's own module in a run: called as written, kept by name, refused early."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from loka_jax.models import OwnModel, own_model
from loka_jax.train.folder.config_file import from_json
from loka_jax.train.settings import table_config
from tests.support.own_models import Dropping, Nnx, Plain, Remembering, Wrong

HERE = "tests.support.own_models"
DENSE, ROWS = jnp.ones((4, 3)), jnp.linspace(-1, 1, 4 * 2 * 8).reshape(4, 2, 8)


def test_it_computes_what_the_module_does():
    model = own_model(Plain(widths=(16, 32)), recipe="f32")
    variables = model.init(jax.random.key(0), DENSE, ROWS)
    (own,) = variables["params"].values()
    expected = Plain(widths=(16, 32)).apply({"params": own}, DENSE, ROWS)[:, 0]
    found = model.apply(variables, DENSE, ROWS)
    assert found.shape == (4,) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "given", [{"first_order": True}, {"norm": "block"}, {"dropout_rate": 0.1}]
)
def test_an_option_that_it_would_not_read_is_refused(given):
    (name,) = given
    option = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{option} is for loka_jax's own models"):
        OwnModel(own=f"{HERE}:Plain", **given)


def test_train_is_passed_on():
    model = OwnModel(own=f"{HERE}:Dropping", recipe="f32")
    variables = model.init(jax.random.key(0), DENSE, ROWS)

    def run(**options):
        return np.asarray(model.apply(variables, DENSE, ROWS, **options))

    rngs = {"dropout": jax.random.key(1)}
    assert not np.array_equal(run(train=True, rngs=rngs), run())
    assert own_model(Dropping(), recipe="f32") == model


def test_a_module_of_nnx_computes_what_it_does():
    model = own_model(functools.partial(Nnx, width=16), recipe="f32")
    variables = model.init(jax.random.key(0), DENSE, ROWS)
    assert {*variables} == {"params", "batch_stats"}
    expected = Nnx(3, 2, 8, 1, width=16, rngs=nnx.Rngs(9))
    (params,) = variables["params"].values()
    nnx.replace_by_pure_dict(state := nnx.state(expected, nnx.Param), params)
    nnx.update(expected, state)
    expected.eval()
    found = model.apply(variables, DENSE, ROWS)
    np.testing.assert_allclose(found, expected(DENSE, ROWS)[:, 0], rtol=1e-5)

    def trained(seed):
        options = dict(train=True, mutable=["batch_stats"])
        rngs = {"dropout": jax.random.key(seed)}
        return model.apply(variables, DENSE, ROWS, rngs=rngs, **options)

    logits, changed = trained(1)
    assert np.array_equal(logits, trained(1)[0])
    assert not np.array_equal(logits, trained(2)[0])
    (before,) = variables["batch_stats"].values()
    (after,) = changed["batch_stats"].values()
    assert not np.array_equal(after["norm"]["mean"], before["norm"]["mean"])


def test_a_module_of_nnx_may_have_several_tasks():
    model = own_model(Nnx, recipe="f32", num_tasks=2)
    found, _ = model.init_with_output(jax.random.key(0), DENSE, ROWS)
    assert found.shape == (4, 2)


def test_state_that_a_run_does_not_save_is_refused():
    model = OwnModel(own=f"{HERE}:Remembering", recipe="f32")
    with pytest.raises(
        ValueError, match="Remembering has a Cache at seen, which a run"
    ):
        model.init(jax.random.key(0), DENSE, ROWS)


def test_a_configuration_keeps_it_by_name():
    made = functools.partial(Nnx, width=8)
    for model in (Plain(widths=(8,)), f"{HERE}:Plain", Nnx, made):
        config = table_config(model)
        assert from_json(config.identity(), "here") == config
        assert config.name == "table_own"
    assert table_config(Plain(widths=(8,))).model.own_options == '{"widths": [8]}'


class Local(linen.Module):
    """A field that no file can hold."""

    f: object = None


@pytest.mark.parametrize(
    "model, why",
    [
        ("nowhere:Net", "'nowhere:Net' cannot be imported .ModuleNotFoundError"),
        (f"{HERE}:Plian", "is no Flax module, .* .did you mean 'Plain'"),
        (f"{HERE}:NoModel", "is no Flax module"),
        (3, "the model is a int, and must be a name"),
        (Remembering(), "does not keep what it was made with: give its class, or"),
        (type("Unnamed", (nnx.Module,), {}), "could not be read again"),
        (Local(f=jnp.ones(2)), "could not be read again from the run's folder"),
    ],
    ids=str,
)
def test_what_a_run_cannot_keep_is_refused(model, why):
    with pytest.raises(ValueError, match=why) as error:
        table_config(model)
    assert "\n" not in str(error.value)


def test_other_shapes_than_logits_are_refused():
    with pytest.raises(ValueError, match="return a logit for each"):
        own_model(Plain(), recipe="f32", num_tasks=2).init(
            jax.random.key(0), DENSE, ROWS
        )
    with pytest.raises(ValueError, match="return a logit for each"):
        own_model(Wrong(), recipe="f32").init(jax.random.key(0), DENSE, ROWS)
