"""How far the errors of sites in FP8 move the loss of the whole model.

The error of a product does not tell how it propagates. So the model is evaluated on
held-out batches in bfloat16, with one site at a time in FP8, and with all sites in FP8,
or by a whole plan. The examples are the same, and their losses are compared one by one:
the difference varies far less than the loss itself. Errors of the backward pass do not
show here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from loka_jax import nn, xla
from loka_jax.data import Batch, Position
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import why_harmful
from loka_jax.measure.intervals import Interval, interval
from loka_jax.recipe import ROLES, GemmRecipe, get_recipe
from loka_jax.site import Choice
from loka_jax.train import tasks
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import logits_of, named_sites

ALL = "all sites"
LOSS_RECIPE = "fp8_tensorwise"  # of the site whose effect on the loss is measured


class Losses(NamedTuple):
    """The losses of the weighted examples, by task.

    Attributes:
        values: float64; 0 where an example has no label of a task.
        shares: of each value in the mean loss, which is the sum of their products:
            task_weight_t w_bt / sum_b w_bt, see `train.tasks`.
    """

    values: Float[np.ndarray, "N T"]
    shares: Float[np.ndarray, "N T"]

    @property
    def mean(self) -> float:
        """The mean loss."""
        return float(np.sum(self.shares * self.values))


def can_be_fp8(site: nn.Site) -> bool:
    """Returns True if a site's sizes allow FP8 and its recipe is not float32."""
    sizes = site.spec.gemm_sizes("fwd")
    is_product = site.recipe != "f32" and site.batch is None
    return is_product and xla.why_not(*sizes) is None


class Effect(NamedTuple):
    """What choices change of the mean loss on the same examples.

    Attributes:
        change: of the mean loss, with its 95 % interval over examples.
        moved: the mean absolute change of the examples' losses, in which errors of
            opposite signs do not cancel.
    """

    change: Interval
    moved: float
    loss: float
    examples: int

    @property
    def rise(self) -> Interval:
        """The relative change, with its interval."""
        return Interval(*(x / self.loss for x in self.change))


def sensitivity(run: Run, state: TrainState, max_batches: int) -> dict[str, Effect]:
    """Returns the effect of `LOSS_RECIPE`'s forward products, by path and for `ALL`.

    On as many held-out batches at most. Most moved first, `ALL` last.
    """
    choice = Choice("xla", get_recipe(LOSS_RECIPE))
    paths = [site.path for site in run.sites if can_be_fp8(site)]
    effect_of = effect_meter(run, state, max_batches)
    effects = {path: effect_of({path: choice}) for path in paths}
    effects = dict(sorted(effects.items(), key=lambda item: -item[1].moved))
    return effects | ({ALL: effect_of(dict.fromkeys(paths, choice))} if paths else {})


def effect_meter(
    run: Run, state: TrainState, max_batches: int
) -> Callable[[Mapping[str, Choice]], Effect]:
    """Returns a function from choices by path to their effect, against bfloat16.

    Other sites run in bfloat16. Delayed scales are those of the state, and current
    where it has none.
    """
    batches, delayed = held_out(run, max_batches), named_sites(state)
    plain = losses(run, state, batches, {})

    def effect_of(choices: Mapping[str, Choice]) -> Effect:
        runnable = {
            path: choice if path in delayed else _with_current_scales(choice)
            for path, choice in choices.items()
        }
        return compare(plain, losses(run, state, batches, runnable))

    return effect_of


def held_out(run: Run, max_batches: int) -> list[Batch]:
    """Returns the first batches of the validation data."""
    valid, size = run.splits.valid, run.config.loop.batch_size
    count = min(valid.num_batches(size), max_batches)
    return [valid.batch(Position(0, i, 0), size, shuffle=False) for i in range(count)]


def losses(
    run: Run, state: TrainState, batches: Sequence[Batch], choices: Mapping[str, Choice]
) -> Losses:
    """Returns the losses of all weighted examples in bfloat16, but for some sites."""
    model = run.config.model.clone(recipe="bf16")

    @jax.jit
    def step(state: TrainState, batch: Batch) -> tuple[Array, Array]:
        with nn.overriding(choices):
            logits = logits_of(model, run.placement.tables, state, batch)
        labels, weights = tasks.labels_and_weights(batch)
        labels = labels.astype(logits.dtype)
        return optax.sigmoid_binary_cross_entropy(logits, labels), weights

    parts = jax.device_get([step(state, batch) for batch in batches])
    values, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
    return shared(values, weights, run.config.optim.task_weights)


def shared(
    values: np.ndarray, weights: np.ndarray, task_weights: tuple[float, ...]
) -> Losses:
    """Returns the losses [B] or [B, T] of the examples that have a weight.

    Args:
        weights: of the same shape; 0 where an example has no label of a task.
        task_weights: of the tasks; equal ones if empty.
    """
    values, weights = (
        x.reshape(len(x), -1).astype(np.float64) for x in (values, weights)
    )
    is_weighted = np.any(weights > 0, axis=1)
    values, weights = values[is_weighted], weights[is_weighted]
    totals = np.sum(weights, axis=0)
    shares = weights / np.where(totals > 0, totals, 1.0)
    if task_weights:
        shares = shares * np.asarray(task_weights)
    return Losses(np.where(weights > 0, values, 0.0), shares)


def compare(plain: Losses, changed: Losses) -> Effect:
    """Returns how losses changed, example by example, by their shares in the mean.

    The interval is that of a ratio: of weighted losses over weights, both of which vary
    from example to example.
    """
    shares, difference = plain.shares, changed.values - plain.values
    by_task = np.sum(shares, axis=0)
    change = np.sum(shares * difference, axis=0)
    mean = change / np.where(by_task > 0, by_task, 1.0)
    # Equal to the differences themselves if weights are equal and there is one task.
    influence = np.sum(shares * (difference - mean), axis=1) * len(difference)
    moved = float(np.sum(np.abs(np.sum(shares * difference, axis=1))))
    seen = interval(np.sum(change) + influence)
    return Effect(seen, moved, plain.mean, len(difference))


def refusals(
    run: Run,
    state: TrainState,
    plan: DispatchPlan,
    *,
    limit: float,
    max_batches: int,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Returns the sites to give up in FP8, and why, for the plan to be accepted.

    Those with the largest effects by themselves go, until the upper end of the rise
    that the others cause together is below the limit.
    """
    left = {p: choice for p, choice in plan.choices if choice.recipe.fwd is not None}
    effect_of = effect_meter(run, state, max_batches)
    alone: dict[str, Effect] = {}
    refused: dict[str, str] = {}
    while left:
        effect = effect_of(left)
        rise, examples = effect.rise, effect.examples
        say(
            f"FP8 at {len(left)} sites changes the loss by {rise.mean:.4%} "
            f"({rise.low:.4%} to {rise.high:.4%}, {examples:,} examples)"
        )
        reason = why_harmful(rise, limit, examples)
        if reason is None:
            break
        alone = alone or {path: effect_of({path: x}) for path, x in left.items()}
        worst = max(left, key=lambda x: np.nan_to_num(alone[x].rise.high, nan=np.inf))
        refused[worst] = f"{reason}; here by {alone[worst].rise.mean:.4%}"
        say(f"{worst}: {refused[worst]}")
        del left[worst]
    return refused


def _with_current_scales(choice: Choice) -> Choice:
    def current(gemm: GemmRecipe | None) -> GemmRecipe | None:
        if gemm is None:
            return None
        casts = {"first": gemm.first, "second": gemm.second}
        casts = {k: dataclasses.replace(x, scaling="current") for k, x in casts.items()}
        return dataclasses.replace(gemm, **casts)

    gemms = {role: current(choice.recipe.gemm(role)) for role in ROLES}
    return dataclasses.replace(
        choice, recipe=dataclasses.replace(choice.recipe, **gemms)
    )
