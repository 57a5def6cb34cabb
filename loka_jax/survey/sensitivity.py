"""How far the error of one site in FP8 moves the loss of the whole model.

The error of a product does not tell how it propagates. So the model is evaluated on
held-out batches in bfloat16, with one site at a time in FP8, and with all sites in FP8.
The examples are the same, so that their losses can be compared one by one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from loka_jax import nn, xla
from loka_jax.data import Batch, Position
from loka_jax.measure.intervals import interval
from loka_jax.site import Choice
from loka_jax.train import tasks
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import logits_of

ALL = "all sites"


def can_be_fp8(site: nn.Site) -> bool:
    """Returns True if a site's sizes allow FP8 and its recipe is not float32."""
    sizes = site.spec.gemm_sizes("fwd")
    return site.recipe != "f32" and xla.why_not(*sizes) is None


def sensitivity(
    run: Run, state: TrainState, *, recipe: str, max_batches: int
) -> dict[str, dict[str, float]]:
    """Returns the effect of FP8 forward products on the loss, by path and for `ALL`.

    Args:
        run: the model and its validation data.
        state: the trained model.
        recipe: of the site that is in FP8, with current scales.
        max_batches: held-out batches at most.

    Returns:
        `change`, `low` and `high`: of the mean loss, with its 95 % interval over
        examples; `relative`: change over loss; `moved`: the mean absolute change of the
        examples' losses, in which errors of opposite signs do not cancel; `loss`: in
        bfloat16. Most moved first, `ALL` last.
    """
    paths = [site.path for site in run.sites if can_be_fp8(site)]
    batches = held_out(run, max_batches)
    plain = losses(run, state, batches, {})
    effects = {}
    for path in paths:
        changed = losses(run, state, batches, {path: recipe})
        effects[path] = compare(plain, changed)
    effects = dict(sorted(effects.items(), key=lambda item: -item[1]["moved"]))
    if paths:
        changed = losses(run, state, batches, dict.fromkeys(paths, recipe))
        effects[ALL] = compare(plain, changed)
    return effects


def held_out(run: Run, max_batches: int) -> list[Batch]:
    """Returns the first batches of the validation data."""
    valid, size = run.splits.valid, run.config.loop.batch_size
    count = min(valid.num_batches(size), max_batches)
    return [valid.batch(Position(0, i, 0), size, shuffle=False) for i in range(count)]


def losses(
    run: Run,
    state: TrainState,
    batches: Sequence[Batch],
    recipes: Mapping[str, str | Choice],
) -> np.ndarray:
    """Returns the losses of all weighted examples in bfloat16.

    Args:
        run: the model.
        state: the trained model.
        batches: of examples.
        recipes: of sites that run otherwise, or choices, by path.
    """
    step = jax.jit(_loss_step(run, recipes))
    parts = [step(state, batch) for batch in batches]
    return np.concatenate(
        [
            np.asarray(part)[np.asarray(batch.weights) > 0]
            for part, batch in zip(parts, batches, strict=True)
        ]
    )


def _loss_step(
    run: Run, recipes: Mapping[str, str | Choice]
) -> Callable[[TrainState, Batch], Float[Array, "B"]]:
    model = run.model.clone(recipe="bf16")
    task_weights = run.config.optim.task_weights
    total = functools.partial(tasks.total_loss, task_weights=task_weights)

    def step(state: TrainState, batch: Batch) -> Float[Array, "B"]:
        with nn.overriding(recipes):
            logits = logits_of(model, run.tables, state, batch)
        labels, weights = tasks.labels_and_weights(batch)
        values = optax.sigmoid_binary_cross_entropy(logits, labels.astype(logits.dtype))
        if values.ndim == 1:
            return values
        return jax.vmap(total)(jnp.where(weights > 0, values, 0.0))

    return step


def compare(plain: np.ndarray, changed: np.ndarray) -> dict[str, float]:
    """Returns how losses changed, as `sensitivity` does, example by example."""
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
