"""Sites that run several times are listed once, with a count."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT

X = jnp.ones((32, 64))


class Block(linen.Module):
    recipe: str | None

    @linen.compact
    def __call__(self, x, _):
        if self.recipe is None:
            return linen.Dense(64, name="dense")(x), None
        return nn.Dense(64, recipe=self.recipe, name="dense")(x).astype(x.dtype), None


class Stack(linen.Module):
    lift: str
    recipe: str | None = "fp8_rowwise"
    collections: tuple[str, ...] = ("params",)

    @linen.compact
    def __call__(self, x):
        if self.lift == "shared":
            block = Block(self.recipe, name="block")
            return block(block(x, None)[0], None)[0]
        block = linen.remat(Block) if self.lift == "scan of remat" else Block
        axes = {name: 0 for name in self.collections}
        spread = dict(variable_axes=axes, split_rngs={"params": True})
        if self.lift == "broadcast":
            spread = dict(variable_broadcast="params", split_rngs={"params": False})
        scanned = linen.scan(block, length=5, **spread)
        return scanned(self.recipe, name="block")(x, None)[0]


@pytest.mark.parametrize(
    "lift, count", [("scan", 5), ("scan of remat", 5), ("broadcast", 5), ("shared", 2)]
)
def test_a_site_that_runs_several_times_has_a_count(lift, count):
    for model in (Stack(lift), nn.convert(Stack(lift, None), recipe="fp8_rowwise")):
        (site,) = nn.list_sites(model, X)
        assert (site.path, site.count) == ("block/dense", count)
        assert site.as_row()["count"] == count


def test_calls_of_different_sizes_are_different_sites():
    class Twice(linen.Module):
        @linen.compact
        def __call__(self, x):
            dense = nn.Dense(64, name="dense")
            return dense(x), dense(x[:16])

    sites = nn.list_sites(Twice(), X)
    assert [(s.spec.m, s.count) for s in sites] == [(32, 1), (16, 1)]


def test_delayed_scales_pass_through_a_scan_that_names_them():
    with pytest.raises(ValueError, match="variable_axes=.'params': 0, '_overwrite"):
        Stack("scan", "fp8_tensorwise_delayed").init(jax.random.key(0), X)
    names = ("params", OVERWRITE_WITH_GRADIENT)
    model = Stack("scan", "fp8_tensorwise_delayed", names)
    variables = model.init(jax.random.key(0), X)
    (table,) = jax.tree.leaves(variables[OVERWRITE_WITH_GRADIENT])
    assert table.shape == (5, 3, 17)
    loss = lambda v: jnp.sum(model.apply(v, X).astype(jnp.float32) ** 2)  # noqa: E731
    (after,) = jax.tree.leaves(jax.grad(loss)(variables)[OVERWRITE_WITH_GRADIENT])
    assert jnp.all(after[:, :, 1] > 0)
    nn.check_scales(variables)
    ruined = jax.tree.map(lambda x: x.at[3, ...].set(-2), variables)
    with pytest.raises(ValueError, match="lhs at site 'block/dense' is -2"):
        nn.check_scales({OVERWRITE_WITH_GRADIENT: ruined[OVERWRITE_WITH_GRADIENT]})
