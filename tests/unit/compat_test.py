"""What lies beyond public APIs works in the versions that may be installed."""

import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax import compat

# Whoever raises a limit in pyproject.toml tries compat.py with the new version first.
TRIED = {"jax": ">=0.11.2,<0.12", "flax": ">=0.12.9,<0.13"}


def test_the_versions_that_may_be_installed_were_tried():
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    entries = tomllib.loads(text)["project"]["dependencies"]
    pins = dict(re.fullmatch(r"([\w-]+)(.*)", entry).groups() for entry in entries)
    assert {name: pins[name] for name in TRIED} == TRIED


def test_the_operands_and_jaxprs_of_a_scan_are_told_apart():
    def run(c, x, xs):
        return jax.lax.scan(lambda x, y: (x + c + y[0] * y[1][None], x), x, xs)

    xs = jnp.ones(4), jnp.ones((4, 2))
    (eqn,) = jax.make_jaxpr(run)(jnp.ones(3)[:, None], jnp.ones((3, 2)), xs).eqns
    consts, carry, parts = compat.scan_operands(eqn.params, [1, 2, 3, 4])
    assert (consts, carry, parts) == ([1], [2], [3, 4])
    (closed,) = compat.closed_jaxprs(eqn.params)
    shapes = [x.aval.shape for x in closed.jaxpr.invars]
    assert shapes == [(3, 1), (3, 2), (), (2,)]
    remat = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns[0]
    assert [x.jaxpr.eqns[0].primitive.name for x in compat.closed_jaxprs(remat.params)]


def test_mosaic_kernels_are_named_alike_whatever_was_lowered_before(monkeypatch):
    core = pytest.importorskip("jax.experimental.mosaic.gpu.core")
    monkeypatch.setattr(
        core.dialect, "get_or_set_dump_options", core.dialect.get_or_set_dump_options
    )
    compat.name_kernels_alike.__wrapped__()

    def lowered():
        def kernel(x, out):
            out[...] = x[...] + 1.0

        call = plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((128,), jnp.float32))
        traced = jax.jit(call).trace(jax.ShapeDtypeStruct((128,), jnp.float32))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    texts = [lowered() for _ in range(2)]
    assert "mosaic_gpu" in texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize("event", [compat.LOWERING_EVENT, compat.COMPILATION_EVENT])
def test_jax_tells_of_compilations(event):
    events = []
    listen = lambda name, seconds, **_: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + len(event))(1.5)
    assert event in events


def test_random_bits_are_of_a_kernel_where_they_are_asked_for():
    def lowered():
        traced = jax.jit(lambda key: jax.random.normal(key, (64,)))
        return traced.trace(jax.random.key(0)).lower(lowering_platforms=("cuda",))

    with compat.random_bits_by_kernel():
        by_kernel = lowered().as_text()
    assert "threefry2x32_ffi" in by_kernel
    assert "threefry2x32_ffi" not in lowered().as_text()
