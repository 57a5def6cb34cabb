"""What lies beyond public APIs works in the versions that may be installed."""

import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import compat

# Whoever raises a limit in pyproject.toml tries compat.py with the new version first.
TRIED = {"jax": ">=0.11.2,<0.12", "flax": ">=0.12.9,<0.13"}


def test_the_versions_that_may_be_installed_were_tried():
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    entries = tomllib.loads(text)["project"]["dependencies"]
    pins = dict(re.fullmatch(r"([\w-]+)(.*)", entry).groups() for entry in entries)
    assert {name: pins[name] for name in TRIED} == TRIED


def test_a_layer_multiplies_otherwise_within_the_block_alone():
    x = jnp.ones((2, 3))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            layer = linen.Dense(4, use_bias=False)
            zero = lambda *args, **_: 0 * jax.lax.dot_general(*args)  # noqa: E731
            own = lambda *args, **_: 2 * jax.lax.dot_general(*args)  # noqa: E731
            with compat.dot_general_set(layer, own):
                with compat.dot_general_set(layer, zero):
                    pass
                doubled = layer(x)
            return doubled, layer(x)

    (doubled, plain), _ = Model().init_with_output(jax.random.key(0), x)
    assert jnp.any(plain != 0)
    np.testing.assert_array_equal(doubled, 2 * plain)


@pytest.mark.parametrize("event", [compat.LOWERING_EVENT, compat.COMPILATION_EVENT])
def test_jax_tells_of_compilations(event):
    events = []
    listen = lambda name, seconds, **_: events.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + len(event))(1.5)
    assert event in events
