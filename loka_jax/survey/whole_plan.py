"""The rise of the loss that a whole plan causes, on held-out examples.

Each example's loss under the plan is compared with its loss in bfloat16: the difference
varies far less than the loss itself. Errors of the backward pass do not show here.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import why_harmful
from loka_jax.measure.intervals import Interval
from loka_jax.recipe import Cast, GemmRecipe, Recipe
from loka_jax.site import Choice
from loka_jax.survey.sensitivity import compare, held_out, losses
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import named_sites


class Effect(NamedTuple):
    """The relative rise of the loss that choices cause.

    Attributes:
        rise: with its 95 % interval.
        examples: from which it was measured.
    """

    rise: Interval
    examples: int


def effect_of(
    run: Run, state: TrainState, choices: Mapping[str, Choice], *, max_batches: int
) -> Effect:
    """Returns the effect of choices on the loss of a trained model, against bfloat16.

    Args:
        run: the model and its validation data.
        state: the trained model.
        choices: by path; other sites run in bfloat16. Delayed scales are those of the
            state, and current where it has none.
        max_batches: held-out batches at most.
    """
    delayed = named_sites(state)
    runnable = {
        path: choice if path in delayed else _with_current_scales(choice)
        for path, choice in choices.items()
    }
    batches = held_out(run, max_batches)
    plain = losses(run, state, batches, {})
    result = compare(plain, losses(run, state, batches, runnable))
    rise = Interval(*(result[x] / result["loss"] for x in ("change", "low", "high")))
    return Effect(rise, len(plain.values))


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

    The sites with the largest effects by themselves, until the upper end of the rise
    that the others cause together is below the limit.

    Args:
        run: the model and its validation data.
        state: the trained model.
        plan: of its sites.
        limit: on the relative rise of the loss.
        max_batches: held-out batches at most.
        say: takes a line on the plan.
    """
    left = {p: choice for p, choice in plan.choices if choice.recipe.fwd is not None}
    alone: dict[str, Effect] = {}
    refused: dict[str, str] = {}
    while left:
        rise, examples = effect_of(run, state, left, max_batches=max_batches)
        say(
            f"FP8 at {len(left)} sites changes the loss by {rise.mean:.4%} "
            f"({rise.low:.4%} to {rise.high:.4%}, {examples:,} examples)"
        )
        reason = why_harmful(rise, limit, examples)
        if reason is None:
            break
        alone = alone or {
            path: effect_of(run, state, {path: choice}, max_batches=max_batches)
            for path, choice in left.items()
        }
        worst = max(left, key=lambda path: _upper(alone[path]))
        refused[worst] = f"{reason}; here by {alone[worst].rise.mean:.4%}"
        say(f"{worst}: {refused[worst]}")
        del left[worst]
    return refused


def _upper(effect: Effect) -> float:
    return math.inf if math.isnan(effect.rise.high) else effect.rise.high


def _with_current_scales(choice: Choice) -> Choice:
    if not choice.recipe.is_delayed:
        return choice
    fwd, dlhs, drhs = (
        None if gemm is None else _current_gemm(gemm)
        for gemm in (choice.recipe.fwd, choice.recipe.dlhs, choice.recipe.drhs)
    )
    recipe: Recipe = dataclasses.replace(choice.recipe, fwd=fwd, dlhs=dlhs, drhs=drhs)
    return dataclasses.replace(choice, recipe=recipe)


def _current_gemm(gemm: GemmRecipe) -> GemmRecipe:
    def current(cast: Cast) -> Cast:
        return dataclasses.replace(cast, scaling="current")

    return dataclasses.replace(
        gemm, first=current(gemm.first), second=current(gemm.second)
    )
