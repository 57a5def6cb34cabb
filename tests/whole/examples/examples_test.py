"""The examples run, learn, and adopt FP8 where a GPU has it."""

import math
import pathlib
import runpy

import jax
import pytest

from loka_jax.dispatch import adopt as adopt_lib
from tests.support.adopting import Gpu, stood_in

FOLDER = pathlib.Path(__file__).parents[3] / "examples"
NAMES = ("linen_by_hand", "linen_train_state", "nnx_model")


def run(name, steps):
    """Returns the losses of an example, as in a user's process: tests are stricter."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return runpy.run_path(str(FOLDER / f"{name}.py"))["main"](steps=steps)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_learns(name):
    losses = run(name, 40)
    for name in ("last", "as written"):
        assert losses.get(name, losses["last"]) < 0.3 * losses["first"]
    assert losses.get("hit rate", 1.0) > 0.8


@pytest.mark.parametrize("name", NAMES)
def test_an_example_adopts_fp8_on_a_gpu(name, monkeypatch):
    plain, found = adopt_lib.adopt, []

    def adopt(*args, **options):
        found.append(plain(*args, **options))
        return found[-1]

    monkeypatch.setattr(adopt_lib, "adopt", adopt)
    with stood_in(Gpu()):
        losses = run(name, 2)
    (adopted,) = found
    assert any(choice.is_fp8 for _, choice in adopted.plan.choices)
    assert "run in FP8" in adopted.sentence
    assert math.isfinite(losses["last"])
