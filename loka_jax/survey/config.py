"""The options of a survey of a trained model."""

import dataclasses

from loka_jax.dispatch.policy import Limits
from loka_jax.measure.site_errors import PAIRS
from loka_jax.options import require
from loka_jax.recipe import INITIALIZED, RECIPES, get_recipe

FP8_RECIPES = tuple(name for name in RECIPES if name.startswith("fp8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyConfig:
    """The options of a survey.

    Attributes:
        recipes: measured at every site, beside bfloat16.
        pairs: operands drawn for each of them.
        rows: of drawn and captured operands, at most.
        captured_batches: batches whose real operands are multiplied too; 0 for none.
        held_out_batches: of the validation data, at most, for the effect on the loss.
        times: measure times too, where there is a GPU.
        loss_recipe: whose effect on the loss is measured, one site at a time.
        seed: of the draws.
        limits: within which a candidate counts as safe and fast.
    """

    recipes: tuple[str, ...] = FP8_RECIPES
    pairs: int = PAIRS
    rows: int = 1024
    captured_batches: int = 16
    held_out_batches: int = 32
    times: bool = True
    loss_recipe: str = "fp8_tensorwise"
    seed: int = 0
    limits: Limits = Limits()

    def __post_init__(self):  # noqa: D105
        for name, least in {
            "pairs": 2,
            "rows": 16,
            "captured_batches": 0,
            "held_out_batches": 1,
            "seed": 0,
        }.items():
            value = getattr(self, name)
            option = f"--survey.{name.replace('_', '-')}"
            require(value >= least, option, value, f"at least {least}")
        for name in (*self.recipes, self.loss_recipe):
            get_recipe(name)
            require(
                not name.endswith(INITIALIZED), "recipe", name, f"without {INITIALIZED}"
            )
        require(
            not get_recipe(self.loss_recipe).is_delayed,
            "--survey.loss-recipe",
            self.loss_recipe,
            "one with current scales, such as fp8_tensorwise",
        )
