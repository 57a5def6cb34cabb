"""Interactions among embeddings as modules: what they compute, list and show Probe."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.ops.device import HOPPER, Device
from tests import support
from tests.support.nn import initialized, listed

B, N, D = 6, 7, 5
CPU = Device(platform="cpu")


class Both(linen.Module):
    """A factorization machine with a learned Y, and one with a Y of each example."""

    @linen.compact
    def __call__(self, x):
        fm, lcb, _ = nn.FmLcb(4, 3, name="fm_lcb")(x)
        y = nn.Compress(2, name="y")(x).swapaxes(1, 2)  # [B, d, 2]
        return fm, lcb, nn.Fm(name="fm")(lcb, y[:, :3])


def test_observed_or_not_they_compute_the_same():
    x = support.normal(B, N, D)
    variables = initialized(Both(), x)

    @jax.jit
    def run(variables, x):
        plain = Both().apply(variables, x)
        with nn.probing(nn.ProbeConfig()):
            return plain, Both().apply(variables, x)

    plain, observed = run(variables, x)
    chex.assert_trees_all_close(observed, plain, rtol=1e-4, atol=1e-4)
    weight, other = (variables["params"][x]["kernel"] for x in ("fm_lcb", "y"))
    xt = np.swapaxes(x, 1, 2)
    fm, lcb = x @ (xt @ weight[:, :4]), np.swapaxes(xt @ weight[:, 4:], 1, 2)
    own = lcb @ (np.swapaxes(lcb, 1, 2) @ (xt @ other)[:, :3])
    chex.assert_trees_all_close(plain, (fm, lcb, own), rtol=1e-3, atol=1e-4)


def test_every_product_is_a_site_without_a_choice():
    sites = nn.list_sites(Both(), jax.ShapeDtypeStruct((B, N, D), jnp.bfloat16))
    assert [(s.path, s.spec.m, s.spec.k, s.spec.n, s.batch) for s in sites] == [
        ("fm_lcb/compress", D, N, 7, B),
        ("fm_lcb/fm", N, D, 4, B),
        ("y/compress", D, N, 2, B),
        ("fm/compress", D, 3, 2, B),
        ("fm/fm", 3, D, 2, B),
    ]
    assert not any(site.has_choice or site.is_fp8 for site in sites)
    assert sites[0].why_not == f"a batched product ({B} of them)"
    # A choice, too, is taken without its casts.
    x = jnp.ones((B, 16, 16))
    with nn.overriding({"fm_lcb/fm": "fp8_rowwise"}):
        site = listed(Both(), x)["fm_lcb/fm"]
    assert site.recipe == "fp8_rowwise" and set(site.runs.values()) == {"xla bf16"}


@pytest.mark.parametrize(
    "k, implementation, device, runs, reason",
    [
        (16, None, HOPPER, ["pallas bf16"] * 3, ""),
        (8, None, HOPPER, ["pallas bf16", "xla bf16", "xla bf16"], "k=8 is not"),
        (16, None, CPU, ["xla bf16"] * 3, "no Hopper GPU"),
        (16, "xla", HOPPER, ["xla bf16"] * 3, "provider 'xla'"),
    ],
)
def test_fm_and_lcb_say_what_runs(k, implementation, device, runs, reason):
    module = nn.FmLcb(k, 16, implementation=implementation)
    x = jax.ShapeDtypeStruct((B, 64, 32), jnp.bfloat16)
    with nn.site_context(device=device):
        sites = nn.list_sites(module, x)
    assert [site.path for site in sites] == ["compress", "fm"]
    for site in sites:
        assert [site.runs[role] for role in ("fwd", "dlhs", "drhs")] == runs
        assert (site.why_not_fused or "").startswith(reason)
        assert (site.why_not_fused is None) == (not reason)


def test_x_is_a_residual_where_the_backward_kernel_runs_and_is_asked():
    x = jax.ShapeDtypeStruct((B, 64, 32), jnp.bfloat16)
    for k, joined in ((16, (32, 32)), (16, ()), (8, (32, 32))):
        init = functools.partial(nn.FmLcb(k, 16).init_with_output, jax.random.key(0))
        with nn.site_context(device=HOPPER):
            out, _ = jax.eval_shape(lambda x: init(x, joined), x)  # noqa: B023
        assert isinstance(out[2], nn.Residual) == (k == 16 and joined != ())
        assert [part.shape for part in out[:2]] == [(B, 64, k), (B, 16, 32)]


# Attention; its equation and its sites are in tests of models.


def test_float32_is_multiplied_as_float32_and_shares_are_summed_in_it():
    def operations(dtype, recipe):
        module = nn.SelfAttention(3, recipe=recipe)
        x = jnp.zeros((2, 5, 12), dtype)
        apply = functools.partial(module.apply, initialized(module, x))
        return jax.make_jaxpr(apply)(x).jaxpr.eqns

    batched = [
        eqn.params["precision"]
        for eqn in operations(jnp.float32, "f32")
        if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0]
    ]
    assert batched == [(jax.lax.Precision.HIGHEST,) * 2] * 2
    exps = [e for e in operations(jnp.bfloat16, "bf16") if e.primitive.name == "exp"]
    assert [eqn.outvars[0].aval.dtype for eqn in exps] == [jnp.float32]


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 heads do not divide vectors of 12"):
        nn.list_sites(nn.SelfAttention(5), jnp.zeros((2, 5, 12)))
