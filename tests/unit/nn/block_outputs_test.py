"""TWEO's term of models of Linen and NNX against numpy, and what is a block."""

import functools

import jax
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.models import Dcnv2, own_model
from loka_jax.nn import interaction
from tests import support
from tests.support.nn import record_calls
from tests.support.own_models import Block, NnxStacked, Plain, Stacked

DENSE, ROWS = support.normal(4, 3), support.normal(4, 2, 8, seed=1)


def seen(model, variables, *args):
    """Returns what the blocks of a model leave."""
    with nn.seeing_blocks():
        _, found = model.apply(variables, *args, mutable=[nn.BLOCKS])
    return found.get(nn.BLOCKS)


def penalty(model, variables, *args):
    """Returns the penalty of a model's blocks, and the number of these."""
    found = jax.jit(functools.partial(seen, model))(variables, *args)
    return float(nn.penalty(found)), len(jax.tree.leaves(found))


def expected_of(first, blocks):
    """Returns that of `Stacked`, of the parameters of its layers."""
    x = np.concatenate([DENSE, np.reshape(ROWS, (4, -1))], axis=1).astype(np.float64)
    x, terms = x @ first["kernel"] + first["bias"], []
    for norm, dense in blocks:
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x + (y * norm["scale"] + norm["bias"]) @ dense["kernel"] + dense["bias"]
        terms.append(np.mean(np.abs(x / 3) ** 4))
    return np.mean(terms)


def drawn(model):
    """Returns variables of which no output is small."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), DENSE, ROWS)
    draws = np.random.default_rng(0)
    return jax.tree.map(lambda x: 0.5 * draws.normal(size=x.shape).astype("f4"), shapes)


@pytest.mark.parametrize("is_own", [False, True])
def test_blocks_of_linen_have_the_mean_of_their_fourth_powers(is_own):
    model = own_model(Stacked(), recipe="f32") if is_own else Stacked()
    variables = drawn(model)
    params = variables["params"]
    params = next(iter(params.values())) if is_own else params
    blocks = [
        (x["LayerNorm_0"], x["Dense_0"]) for x in (params["Block_0"], params["Block_1"])
    ]
    found, count = penalty(model, variables, DENSE, ROWS)
    assert count == 2
    np.testing.assert_allclose(found, expected_of(params["Dense_0"], blocks), rtol=1e-5)


def test_blocks_of_nnx_have_the_mean_of_their_fourth_powers():
    model = own_model(NnxStacked, recipe="f32")
    variables = drawn(model)
    (params,) = variables["params"].values()
    blocks = [(x["norm"], x["dense"]) for x in params["blocks"].values()]
    found, count = penalty(model, variables, DENSE, ROWS)
    assert count == 2
    np.testing.assert_allclose(found, expected_of(params["first"], blocks), rtol=1e-5)


def test_outputs_are_seen_only_if_asked_for():
    variables = drawn(Stacked())
    _, found = Stacked().apply(variables, DENSE, ROWS, mutable=[nn.BLOCKS])
    assert not found
    assert nn.BLOCKS not in drawn(own_model(NnxStacked, recipe="f32"))


def test_networks_that_run_as_one_operation_are_blocks_all_the_same(monkeypatch):
    calls = record_calls(monkeypatch, (interaction, "run_group"))
    model = Dcnv2(bottom_mlp=(8,), deep_mlp=(32,), recipe="bf16")
    args = support.normal(32, 16), support.normal(32, 5, 8)
    grouped = model.clone(implementation="group")
    variables = jax.eval_shape(grouped.init, jax.random.key(0), *args)
    assert len(calls) == 1

    def counted(model):
        return jax.eval_shape(functools.partial(seen, model), variables, *args)

    found = counted(grouped)
    assert found == counted(model.clone(implementation="xla"))
    assert len(jax.tree.leaves(found)) == 2


class Scanned(linen.Module):
    axes: tuple[str, ...]

    @linen.compact
    def __call__(self, x):
        def body(block, x, _):
            return block(x), None

        axes = dict.fromkeys(("params", *self.axes), 0)
        scan = linen.scan(body, axes, split_rngs={"params": True}, length=3)
        return scan(Block(), x, None)[0]


def test_blocks_under_a_scan_are_seen_or_it_says_why_not():
    x = support.normal(4, 16)
    variables = Scanned(()).init(jax.random.key(0), x)
    found, _ = penalty(Scanned((nn.BLOCKS,)), variables, x)
    outputs, y = [], x
    for i in range(3):
        layer = jax.tree.map(lambda x: x[i], variables["params"]["Block_0"])  # noqa: B023
        y = Block().apply({"params": layer}, y)
        outputs.append(np.mean((np.asarray(y, np.float64) / 3) ** 4))
    np.testing.assert_allclose(found, np.mean(outputs), rtol=1e-5)
    with pytest.raises(ValueError, match=r"Block_0 returns.* variable_axes=\{'blocks'"):
        penalty(Scanned(()), variables, x)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="--optim.tweo could keep small: leave it out"):
        penalty(Plain(), drawn(Plain()), DENSE, ROWS)
