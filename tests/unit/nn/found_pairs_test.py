"""Dot products of pairs of vectors in programs that others wrote."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax import checked, nn
from loka_jax.nn import run_whole
from loka_jax.nn.conversion import Rules
from loka_jax.nn.found_groups import find
from loka_jax.nn.found_pairs import found_pairs
from loka_jax.nn.program import read_program
from loka_jax.nn.rewrite import run_program
from loka_jax.ops import interaction
from loka_jax.triton import launch
from tests.support.nn import rounded

N = 7
Z = rounded(4, N, 16)
LOWER, UPPER = np.tril_indices(N, -1), np.triu_indices(N)


def gram(z):
    return z @ z.swapaxes(1, 2)


def by_example(z):
    """As AlgoPerf's DLRM: an index of the example for each product."""
    rows, cols = (jnp.tile(x, len(z)) for x in jnp.triu_indices(N))
    examples = jnp.tile(jnp.arange(len(z))[:, None], [1, len(rows) // len(z)])
    return gram(z)[examples.reshape(-1), rows, cols].reshape(len(z), -1)


def by_einsum(z):
    flat = jnp.einsum("bnd,bmd->bnm", z, z).reshape(len(z), -1)
    rows, cols = jnp.tril_indices(N, -1)
    return jnp.take(flat, rows * N + cols, axis=1)


def in_rows(z):
    g = gram(z)
    return jnp.concatenate([g[:, i, : i + 1] for i in range(N)], axis=1)


FOUND = [
    (by_example, "i <= j"),
    (by_einsum, "i > j"),
    (in_rows, "i >= j"),
    (jax.vmap(lambda z: (z @ z.T)[jnp.triu_indices(N, 1)]), "i < j"),
    (lambda z: gram(z)[:, np.tril(np.ones((N, N), bool))], "i >= j"),
    (lambda z: gram(z).swapaxes(1, 2)[:, *LOWER][:, ::-1], "i > j"),
]
NOT_FOUND = [
    lambda z: gram(z).reshape(len(z), -1),
    lambda z: jax.nn.relu(gram(z))[:, *UPPER],
    lambda z: (2 * gram(z))[:, *UPPER],
    lambda z: gram(z)[:, LOWER[0][::-1], LOWER[1][::-1]],
    lambda z: jnp.roll(gram(z), 1, axis=0)[:, *UPPER],
    lambda z: gram(z.astype(jnp.int32))[:, *UPPER],
    lambda z: gram(z.astype(jnp.complex64))[:, *UPPER],
    lambda z: (z @ z[::-1].swapaxes(1, 2))[:, *UPPER],
    lambda z: [jnp.sum(g := gram(z)), g[:, *UPPER]],
]


def pairs_in(function):
    closed = jax.make_jaxpr(function)(Z)
    origins = [None for _ in (*closed.consts, Z)]
    program = read_program(closed.jaxpr, origins, closed.consts)
    found = [found_pairs(x) for x in program.steps if x.name == "dot_general"]
    return [x and x.pairs for x in found]


@pytest.mark.parametrize("function, pairs", FOUND)
def test_pairs_are_known_by_what_a_program_computes(function, pairs):
    assert pairs_in(function)[0] == pairs


@pytest.mark.parametrize("function", NOT_FOUND)
def test_other_products_of_data_are_left(function):
    assert set(pairs_in(function)) == {None}


@pytest.fixture
def served(monkeypatch):
    """Lets XLA run what kernels run on a GPU, bfloat16 alone."""

    def why_not(shape, dtype):
        assert len(shape) == 3
        return None if dtype == jnp.bfloat16 else "not bfloat16"

    monkeypatch.setattr(run_whole, "why_not_by_kernel", why_not)


def model(function, parameters, z):
    """A product, the pairs of its results, and a product of these."""
    z = jnp.tanh(z @ parameters["first"])
    return function(z) @ parameters["second"]


@pytest.mark.parametrize("function", [FOUND[0][0], FOUND[3][0]])
def test_values_and_gradients_are_those_as_written(served, function):
    run = functools.partial(model, function)
    columns = jax.eval_shape(function, Z).shape[1]
    parameters = {
        "first": rounded(16, 32, seed=1, scale=0.3),
        "second": rounded(columns, 24, seed=2),
    }

    def of(f):
        loss = lambda p, z: jnp.mean(f(p, z) ** 2)  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))

    def call(parameters, z):
        return run(parameters, z)

    models = [nn.convert(call, recipe=x) for x in ("f32", "bf16")]
    exact, same, ours = jax.jit(lambda p, z: [of(f)(p, z) for f in (call, *models)])(
        parameters, Z
    )
    for x, y, z in zip(*map(jax.tree.leaves, (exact, same, ours)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert np.linalg.norm(x - z) < 2.0**-6 * np.linalg.norm(x)
    (site,) = (x for x in nn.list_sites(models[1], parameters, Z) if x.batch)
    assert set(site.runs.values()) == {"triton dot_features"} and site.left is None
    (site,) = (x for x in nn.list_sites(models[0], parameters, Z) if x.batch)
    assert "not bfloat16" in site.why_not and site.runs["fwd"] == "as written"


def test_pairs_that_are_skipped_run_as_written(served):
    def call(parameters, z):
        return by_einsum(z @ parameters["first"])

    parameters = {"first": rounded(16, 32)}
    skipping = nn.convert(call, recipe="bf16", skip="dot_general")
    sites = nn.list_sites(skipping, parameters, Z)
    assert [x.left for x in sites if x.batch] == ["a product of data and data"]


def test_examples_stay_where_they_are_on_a_mesh_with_explicit_axes(monkeypatch):
    reason = "traces the kernel"
    pytest.importorskip("jax_triton", reason=reason, exc_type=ImportError)
    for module in (interaction, launch):
        monkeypatch.setattr(module, "why_not_here", lambda: None)
    monkeypatch.setattr(checked, "why_wrong", lambda *families: None)
    mesh = jax.make_mesh((1,), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    z = jax.ShapeDtypeStruct(Z.shape, Z.dtype, sharding=sharding)
    with jax.set_mesh(mesh):
        closed = jax.make_jaxpr(by_einsum)(z)
        program = read_program(closed.jaxpr, [None for _ in closed.in_avals])
        find(program, lambda path, scope: None)
        rules = Rules((nn.convert(by_einsum, recipe="bf16"),))

        def run(z):
            (out,) = run_program(program, [z], rules, {})
            return jnp.sum(out**2), out

        gradient, out = jax.eval_shape(jax.grad(run, has_aux=True), z)
    assert out.sharding.spec == P("data", None)
    assert gradient.sharding.spec == P("data", None, None)
