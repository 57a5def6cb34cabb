"""The examples run, learn, and are short."""

import pathlib
import runpy

import jax
import pytest

FOLDER = pathlib.Path(__file__).parents[3] / "examples"
MODELS = ("linen_by_hand", "linen_train_state", "nnx_model")


@pytest.mark.parametrize("name", MODELS)
def test_an_example_learns(name):
    # As in a user's process: the tests are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        losses = runpy.run_path(str(FOLDER / f"{name}.py"))["main"](steps=40)
    assert losses["last"] < 0.3 * losses["first"]
    if "as written" in losses:
        assert losses["as written"] < 0.3 * losses["first"]
    if "planned" in losses:
        assert losses["planned"] < 0.3 * losses["first"]
    assert losses.get("hit rate", 1.0) > 0.8


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_one_page(path):
    assert len(path.read_text().splitlines()) <= 80
