"""The examples run, and learn."""

import pathlib
import runpy

import jax
import pytest

FOLDER = pathlib.Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["linen_by_hand", "linen_train_state", "nnx_model"])
def test_an_example_learns(name):
    # As in a user's process: the tests are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        losses = runpy.run_path(str(FOLDER / f"{name}.py"))["main"](steps=40)
    for name in ("last", "as written", "planned"):
        assert losses.get(name, losses["last"]) < 0.3 * losses["first"]
    assert losses.get("hit rate", 1.0) > 0.8
