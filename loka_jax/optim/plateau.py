"""Learning rate reduction on plateaus and early stopping, as a pure state machine.

The measure is `OptimConfig.best_by`: NE, log loss (both better if lower) or AUC.
An evaluation that is not better than the best so far is a stall: it multiplies the
learning rates by `plateau_factor`, and the `plateau_patience`-th in a row ends the run.
With AUC this is the schedule of the BARS benchmark (FuxiCTR).
"""

import dataclasses
import math

from loka_jax.optim.config import OptimConfig

_MIN_GAIN = 1e-6  # a smaller gain is a stall, as in FuxiCTR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plateau:
    """The state after the evaluations so far; `dataclasses.asdict` gives JSON values.

    Attributes:
        stalls: evaluations since then.
        lr_scale: factor on the learning rates.
        stop: True once the patience is spent.
    """

    best: float | None = None
    stalls: int = 0
    lr_scale: float = 1.0
    stop: bool = False

    def after(self, value: float | None, config: OptimConfig) -> "Plateau":
        """Returns the state after an evaluation; an undefined value is a stall."""
        if _is_better(value, self.best, higher=config.best_by == "auc"):
            return dataclasses.replace(self, best=value, stalls=0)
        if config.plateau_patience is None:
            return self
        stalls = self.stalls + 1
        return dataclasses.replace(
            self,
            stalls=stalls,
            lr_scale=self.lr_scale * config.plateau_factor,
            stop=stalls >= config.plateau_patience,
        )


def _is_better(value: float | None, best: float | None, *, higher: bool) -> bool:
    """Returns whether a value is better than the best so far, if there is one."""
    if value is None or not math.isfinite(value):
        return False
    if best is None:
        return True
    gain = value - best if higher else best - value
    return gain > _MIN_GAIN
