import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from loka_jax import nn

DELAYED = "fp8_tensorwise_delayed"


class Net(linen.Module):
    """A site of each kind."""

    @linen.compact
    def __call__(self, x):
        x = nn.Mlp((32, 20), recipe=DELAYED, name="mlp")(x)
        x = nn.Dense(16, recipe="bf16", name="wide")(x)
        product = functools.partial(nn.Fp8DotGeneral, recipe="fp8_rowwise_bf16_drhs")
        x = linen.Dense(48, dtype=x.dtype, dot_general_cls=product, name="flax")(x)
        x = nn.Dense(16, recipe="fp8_blockwise", name="blocks")(x)
        pairs = (((1,), (1,)), ((0,), (0,)))
        return nn.Fp8DotGeneral(name="batched")(x[:, :, None], x[:, :, None], pairs)


@pytest.fixture(scope="module")
def sites():
    return {s.path: s for s in nn.list_sites(Net(), jnp.ones((64, 16)))}


def test_sites_are_named_by_module_path_in_calling_order(sites):
    assert list(sites) == [
        "mlp/dense_0",
        "mlp/dense_1",
        "wide",
        "flax/Fp8DotGeneral_0",
        "blocks",
        "batched",
    ]


def test_a_site_knows_its_sizes_and_recipe(sites):
    site = sites["flax/Fp8DotGeneral_0"]
    assert (site.spec.m, site.spec.k, site.spec.n) == (64, 16, 48)
    assert site.recipe == "fp8_rowwise_bf16_drhs"


@pytest.mark.parametrize(
    "path, texts",
    [
        (
            "mlp/dense_0",
            (
                "xla fp8 e4m3 tensorwise",
                "xla fp8 e4m3 tensorwise",
                "xla fp8 e4m3 tensorwise",
            ),
        ),
        ("mlp/dense_1", ("xla bf16",) * 3),
        ("wide", ("xla bf16",) * 3),
        (
            "flax/Fp8DotGeneral_0",
            (
                "xla fp8 e4m3 rowwise",
                "xla fp8 e4m3 rowwise x tensorwise",
                "xla bf16",
            ),
        ),
        ("blocks", ("xla bf16 on e4m3 blockwise operands",) * 3),
    ],
)
def test_a_site_tells_what_runs_for_each_role(sites, path, texts):
    site = sites[path]
    assert tuple(site.runs.values()) == texts


@pytest.mark.parametrize(
    "path, reason",
    [
        ("mlp/dense_0", None),
        ("mlp/dense_1", "n=20 is too far below a multiple of 16"),
        ("wide", "recipe bf16"),
        ("flax/Fp8DotGeneral_0", None),
        ("blocks", None),
        ("batched", "a batched product (64 of them)"),
    ],
)
def test_a_site_that_is_not_fp8_tells_why(sites, path, reason):
    assert sites[path].why_not == reason
    assert sites[path].is_fp8 == (reason is None)


def test_shapes_alone_list_the_same_sites(sites):
    shape = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    assert nn.list_sites(Net(), shape) == tuple(sites.values())


def test_sites_are_listed_only_for_the_model_that_is_asked():
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    jax.eval_shape(Net().init, jax.random.key(0), shape)
    assert len(nn.list_sites(Net(), shape)) == 6


def test_keyword_arguments_reach_the_model():
    sites = nn.list_sites(
        nn.Mlp((32,), recipe="bf16", norm="layer"), jnp.ones((16, 16)), train=False
    )
    assert [site.path for site in sites] == ["dense_0"]


@pytest.mark.parametrize(
    "recipe, fused, text",
    [
        (DELAYED, False, "xla fp8 e4m3 tensorwise, padded"),
        (f"{DELAYED}:initialized", True, "xla fp8 e4m3 tensorwise, padded, tails"),
        ("bf16", True, "xla bf16, padded, tails"),
        ("bf16", False, "xla bf16"),
    ],
)
def test_sites_of_sizes_that_are_no_multiples_of_16_say_that_they_are_padded(
    recipe, fused, text
):
    mlp = nn.Mlp((1039, 32), recipe=recipe, fused=fused)
    sites = nn.list_sites(mlp, jax.ShapeDtypeStruct((64, 271), jnp.float32))
    assert [site.runs["fwd"] for site in sites] == [text] * 2
