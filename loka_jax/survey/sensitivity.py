"""How far the error of one site in FP8 moves the loss of the whole model.

Errors of a product do not tell how they propagate. So the model is evaluated on
held-out batches in bfloat16, with one site at a time in FP8, and with all of them.
Examples are the same, so that differences of their losses count.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from loka_jax import nn, xla
from loka_jax.data import Batch, Position
from loka_jax.measure.intervals import interval
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import logits_of

ALL = "all sites"


def can_be_fp8(site: nn.Site) -> bool:
    """Returns True for a site whose sizes FP8 takes, and that is not float32."""
    sizes = site.spec.gemm_sizes("fwd")
    return site.recipe != "f32" and xla.why_not(*sizes) is None


def sensitivity(
    run: Run, state: TrainState, *, recipe: str, max_batches: int
) -> dict[str, dict[str, float]]:
    """Returns by path, and for `ALL`, what FP8 in the forward product does to the loss.

    Args:
        run: the model and its validation data.
        state: the trained model.
        recipe: of the site that is in FP8, with current scales.
        max_batches: held-out batches at most.

    Returns:
        `change`, `low` and `high`: of the mean loss, with its 95 % interval over
        examples; `relative`: change over loss; `moved`: the mean of the absolute
        changes of the examples' losses, which errors of either sign do not cancel in;
        `loss`: in bfloat16. Most moved first, `ALL` last.
    """
    paths = [site.path for site in run.sites if can_be_fp8(site)]
    valid, size = run.splits.valid, run.config.loop.batch_size
    count = min(valid.num_batches(size), max_batches)
    batches = [
        valid.batch(Position(0, i, 0), size, shuffle=False) for i in range(count)
    ]
    plain = _losses(run, state, batches, {})
    found = {}
    for path in paths:
        losses = _losses(run, state, batches, {path: recipe})
        found[path] = _compare(plain, losses)
    found = dict(sorted(found.items(), key=lambda item: -item[1]["moved"]))
    if paths:
        losses = _losses(run, state, batches, dict.fromkeys(paths, recipe))
        found[ALL] = _compare(plain, losses)
    return found


def _losses(
    run: Run, state: TrainState, batches: Sequence[Batch], recipes: dict[str, str]
) -> np.ndarray:
    """Returns the losses of all examples with a weight, some sites in other recipes."""
    step = jax.jit(_loss_step(run, recipes))
    parts = [step(state, batch) for batch in batches]
    return np.concatenate(
        [
            np.asarray(losses)[np.asarray(batch.weights) > 0]
            for losses, batch in zip(parts, batches, strict=True)
        ]
    )


def _loss_step(
    run: Run, recipes: dict[str, str]
) -> Callable[[TrainState, Batch], Float[Array, "B"]]:
    model = run.model.clone(recipe="bf16")

    def step(state: TrainState, batch: Batch) -> Float[Array, "B"]:
        with nn.overriding(recipes):
            logits = logits_of(model, run.tables, state, batch)
        labels = jnp.asarray(batch.labels).astype(logits.dtype)
        return optax.sigmoid_binary_cross_entropy(logits, labels)

    return step


def _compare(plain: np.ndarray, changed: np.ndarray) -> dict[str, Any]:
    difference = changed.astype(np.float64) - plain.astype(np.float64)
    change = interval(difference)
    loss = float(np.mean(plain, dtype=np.float64))
    return {
        "change": change.mean,
        "low": change.low,
        "high": change.high,
        "relative": change.mean / loss,
        "moved": float(np.mean(np.abs(difference))),
        "loss": loss,
    }
