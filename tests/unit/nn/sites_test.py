"""What `list_sites` tells of a model: paths, sizes, what runs, why not, how often."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.nn.sites import Site
from loka_jax.ops.fm_lcb import FmLcbPlan
from loka_jax.ops.plan import resolve
from loka_jax.site import Choice, SiteSpec
from tests.support.nn import DELAYED, initialized, listed
from tests.support.stand_ins import CPU

X = jax.ShapeDtypeStruct((64, 16), jnp.float32)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, *, is_short=False):
        x = nn.Mlp((32, 20), recipe=DELAYED, name="mlp")(x)
        x = nn.Dense(16, recipe="bf16", name="wide")(x)
        if is_short:
            return x
        product = functools.partial(nn.Fp8DotGeneral, recipe="fp8_rowwise_bf16_drhs")
        x = linen.Dense(48, dtype=x.dtype, dot_general_cls=product, name="flax")(x)
        x = nn.Dense(32, recipe="fp8_blockwise", name="blocks")(x)
        pairs = (((1,), (1,)), ((0,), (0,)))
        x = x.reshape(-1, 8, 4)
        return nn.Fp8DotGeneral(name="batched")(x, x[:, :, :3], pairs)


WHOLE, ROWS = "xla fp8 e4m3 tensorwise", "xla fp8 e4m3 rowwise"
BF16 = ("xla bf16",) * 3
# By path: m, k, n, number of products; recipe; runs; why not in FP8.
SITES = {
    "mlp/dense_0": ((64, 16, 32, None), DELAYED, (WHOLE,) * 3, None),
    "mlp/dense_1": (
        *((64, 32, 20, None), DELAYED, BF16),
        "n=20 is too far below a multiple of 16",
    ),
    "wide": ((64, 20, 16, None), "bf16", BF16, "recipe bf16"),
    "flax/Fp8DotGeneral_0": (
        *((64, 16, 48, None), "fp8_rowwise_bf16_drhs"),
        *((ROWS, f"{ROWS} x tensorwise", "xla bf16"), None),
    ),
    "blocks": (
        *((64, 48, 32, None), "fp8_blockwise"),
        *(("xla bf16 on e4m3 blockwise operands",) * 3, None),
    ),
    "batched": (
        *((4, 8, 3, 64), "fp8_tensorwise", BF16),
        "a batched product (64 of them)",
    ),
}


def test_sites_tell_in_calling_order_what_they_are_and_what_runs():
    sites = nn.list_sites(Net(), X)
    found = {
        site.path: (
            (site.spec.m, site.spec.k, site.spec.n, site.batch),
            site.recipe,
            tuple(site.runs[role] for role in ("fwd", "dlhs", "drhs")),
            site.why_not,
        )
        for site in sites
    }
    assert found == SITES and list(found) == list(SITES)
    assert [s.is_fp8 for s in sites] == [s.why_not is None for s in sites]
    assert [s.has_choice for s in sites] == [True] * 5 + [False]
    assert [s.follows for s in sites] == [False, True] + [False] * 4
    assert nn.list_sites(Net(), X, is_short=True) == sites[:3]


class Flagged(linen.Module):
    @linen.compact
    def __call__(self, x, is_wide, *, mask):
        y = linen.Dense(32 if is_wide else 16)(x * mask)
        return y if is_wide else linen.Dense(16)(y)


def test_flags_stay_what_they_are_and_arrays_need_no_values():
    model = nn.convert(Flagged())
    for is_wide, sizes in ((True, [32]), (False, [16, 16])):
        sites = nn.list_sites(model, X, is_wide, mask=X)
        assert [site.spec.n for site in sites] == sizes


def test_a_row_has_the_columns_of_a_site():
    model = nn.Mlp((32, 48), recipe="fp8_rowwise", norm="layer", activation="swish")
    row = nn.list_sites(model, X)[1].as_row()
    assert row == {
        "path": "dense_1",
        **{"m": 64, "k": 32, "n": 48},
        **{"norm": "layer", "activation": "swish", "use_bias": False},
        "recipe": "fp8_rowwise",
        **{"fwd": ROWS, "dlhs": ROWS, "drhs": ROWS},
        "why_not": None,
        "why_not_fused": "no Hopper GPU",
        "has_choice": True,
        "count": 1,
        "follows": True,
    }


def site(recipe="bf16", spec=None, provider="xla", **attributes):
    spec = SiteSpec(**(dict(m=64, k=48, n=32) | (spec or {})))
    plan = resolve(spec, Choice.parse(f"{provider} {recipe}"), CPU)
    return Site(path="site", plan=plan, **attributes)


TAILS, PADDED = "xla bf16, tails", "xla bf16, padded, tails"


@pytest.mark.parametrize(
    "made, fwd, dlhs, why_not_fused",
    [
        (site(), *BF16[:2], None),  # nothing follows the product
        (site(spec={"use_bias": True}), *BF16[:2], "provider 'xla'"),
        (site(spec={"norm": "rms"}, provider="group"), TAILS, TAILS, None),
        (site(spec={"m": 65, "n": 40}, provider="group"), PADDED, PADDED, None),
        (site(spec={"norm": "rms"}, apart="its own"), *BF16[:2], "its own"),
        (site(together=FmLcbPlan(None, "k=8")), "pallas bf16", "xla bf16", "k=8"),
        (site(together=FmLcbPlan("n=3", None)), "xla bf16", "pallas bf16", "n=3"),
        (site(left="skip='*'"), "as written", "as written", None),
        (site(spec={"n": 47}), *BF16[:2], None),
        (site("fp8_rowwise", spec={"n": 47}), *[f"{ROWS}, padded"] * 2, None),
    ],
    ids=range(10),
)
def test_a_site_tells_what_runs_with_its_neighbours(made, fwd, dlhs, why_not_fused):
    assert made.runs == {"fwd": fwd, "dlhs": dlhs, "drhs": dlhs}
    assert made.why_not_fused == why_not_fused


class Twice(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(16, 32, rngs=nnx.Rngs(0))

    def __call__(self, x, few=None):
        return {"all": self.layer(x), "few": self.layer(x[:few])}


def test_calls_of_different_sizes_are_different_sites_of_an_nnx_model():
    model = nn.convert(Twice())
    sizes = [(s.path, s.spec.m, s.count) for s in nn.list_sites(model, X, few=48)]
    assert sizes == [("layer", 64, 1), ("layer", 48, 1)]
    assert [site.count for site in nn.list_sites(model, X)] == [2]


# Sites that run several times.


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
        axes = dict.fromkeys(self.collections, 0)
        spread = dict(variable_axes=axes, split_rngs={"params": True})
        scanned = linen.scan(block, length=5, **spread)
        return scanned(self.recipe, name="block")(x, None)[0]


ROWS_OF_64 = jax.ShapeDtypeStruct((32, 64), jnp.float32)


@pytest.mark.parametrize(
    "lift, count", [("scan", 5), ("scan of remat", 5), ("shared", 2)]
)
def test_a_site_that_runs_several_times_has_a_count(lift, count):
    for model in (Stack(lift), nn.convert(Stack(lift, None), recipe="fp8_rowwise")):
        assert {p: s.count for p, s in listed(model, ROWS_OF_64).items()} == {
            "block/dense": count
        }


def test_a_scan_that_names_the_states_has_one_for_each_step():
    with pytest.raises(ValueError, match="variable_axes of nn.scan or nn.vmap, "):
        initialized(Stack("scan", DELAYED), ROWS_OF_64)
    model = Stack("scan", DELAYED, ("params", OVERWRITE_WITH_GRADIENT))
    variables = initialized(model, ROWS_OF_64)
    (table,) = jax.tree.leaves(variables[OVERWRITE_WITH_GRADIENT])
    assert table.shape == (5, 3, 36)
