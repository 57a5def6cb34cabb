"""Interactions among embeddings as modules: what they compute, list and show Probe."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.ops.device import HOPPER, Device
from tests import support

B, N, D = 6, 16, 8
CPU = Device(platform="cpu")


class Both(linen.Module):
    """A factorization machine with a learned Y, and one with a Y of each example."""

    @linen.compact
    def __call__(self, x):
        fm, lcb, _ = nn.FmLcb(4, 3, name="fm_lcb")(x)
        y = nn.Compress(4, name="y")(x).swapaxes(1, 2)  # [B, d, 4]
        return fm, lcb, nn.Fm(name="fm")(lcb, y[:, :3])


def reference(params, x):
    fm, lcb, own = [], [], []
    weight = np.asarray(params["fm_lcb"]["kernel"], np.float64)
    other = np.asarray(params["y"]["kernel"], np.float64)
    for x_i in np.asarray(x, np.float64):
        fm.append(x_i @ x_i.T @ weight[:, :4])
        lcb.append(weight[:, 4:].T @ x_i)
        own.append(lcb[-1] @ lcb[-1].T @ (x_i.T @ other)[:3])
    return np.stack(fm), np.stack(lcb), np.stack(own)


@pytest.mark.parametrize("observer", [None, nn.ProbeConfig()])
def test_they_follow_their_equations_observed_or_not(observer):
    x = support.normal(B, N, D)
    with nn.probing(observer):
        variables = Both().init(jax.random.key(0), x)
        out = Both().apply(variables, x)
    expected = reference(variables["params"], x)
    for found, exact in zip(out, expected, strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


def test_every_product_is_a_site_without_a_choice():
    sites = nn.list_sites(Both(), jax.ShapeDtypeStruct((B, N, D), jnp.bfloat16))
    assert [(s.path, s.spec.m, s.spec.k, s.spec.n, s.batch) for s in sites] == [
        ("fm_lcb/compress", D, N, 7, B),
        ("fm_lcb/fm", N, D, 4, B),
        ("y/compress", D, N, 4, B),
        ("fm/compress", D, 3, 4, B),
        ("fm/fm", 3, D, 4, B),
    ]
    assert not any(site.has_choice or site.is_fp8 for site in sites)
    assert sites[0].why_not == f"a batched product ({B} of them)"


@pytest.mark.parametrize(
    "k, implementation, device, runs, reason",
    [
        (16, None, HOPPER, ("pallas bf16", "pallas bf16"), None),
        (8, None, HOPPER, ("pallas bf16", "xla bf16"), "k=8 is not a positive"),
        (16, None, CPU, ("xla bf16", "xla bf16"), "no Hopper GPU"),
        (16, "xla", HOPPER, ("xla bf16", "xla bf16"), "provider 'xla'"),
    ],
)
def test_fm_and_lcb_say_what_runs(k, implementation, device, runs, reason):
    module = nn.FmLcb(k, 16, implementation=implementation)
    x = jax.ShapeDtypeStruct((B, 64, 32), jnp.bfloat16)
    with nn.site_context(device=device):
        sites = nn.list_sites(module, x)
    assert [site.path for site in sites] == ["compress", "fm"]
    for site in sites:
        assert (site.runs["fwd"], site.runs["dlhs"]) == runs
        assert site.runs["drhs"] == site.runs["dlhs"]
        assert (site.why_not_fused or "").startswith(reason or "")
        assert (site.why_not_fused is None) == (reason is None)


def test_probe_sees_the_operands_of_every_product():
    x = support.normal(64, N, D) + 0.5

    def loss(variables):
        return sum(jnp.sum(part**2) for part in Both().apply(variables, x))

    with nn.probing(nn.ProbeConfig()):
        variables = Both().init(jax.random.key(0), x)
        gradients = jax.grad(loss)(variables)
    stats = nn.by_path(nn.merge_stats(variables[nn.PROBE], gradients[nn.PROBE], CONFIG))
    assert set(stats) == {s.path for s in nn.list_sites(Both(), x)}

    weight = variables["params"]["fm_lcb"]["kernel"]
    seen = stats["fm_lcb/compress"]
    means = np.asarray(x).mean((0, 2))  # of the rows of X^T
    np.testing.assert_allclose(seen.lhs.moments.mean, means, atol=1e-4)
    columns = np.asarray(weight).mean(1)
    np.testing.assert_allclose(seen.rhs.moments.mean, columns, atol=1e-4)
    seen = stats["fm_lcb/fm"]
    means = np.asarray(x).mean((0, 1))
    np.testing.assert_allclose(seen.lhs.moments.mean, means, atol=1e-4)
    p = np.einsum("bnd,nk->bkd", x, weight[:, :4])
    np.testing.assert_allclose(seen.rhs.moments.mean, p.mean((0, 1)), atol=1e-4)

    # They do not change the gradients.
    plain = jax.grad(loss)({"params": variables["params"]})
    chex.assert_trees_all_close(gradients["params"], plain["params"], rtol=1e-4)


CONFIG = nn.ProbeConfig()
