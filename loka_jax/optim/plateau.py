"""Learning rate reduction on plateaus and early stopping, as a pure state machine.

An evaluation whose AUC is not better than the best so far is a stall: it multiplies the
learning rates by `plateau_factor`, and the `plateau_patience`-th in a row ends the run.
This is the schedule of the BARS benchmark (FuxiCTR).
"""

import dataclasses

from loka_jax.optim.config import OptimConfig

_MIN_GAIN = 1e-6  # a smaller gain in AUC is a stall, as in FuxiCTR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plateau:
    """The state after the evaluations so far; `dataclasses.asdict` gives JSON values.

    Attributes:
        best_auc: the best AUC so far, or None.
        stalls: evaluations since then.
        lr_scale: factor on the learning rates.
        stop: True once the patience is spent.
    """

    best_auc: float | None = None
    stalls: int = 0
    lr_scale: float = 1.0
    stop: bool = False

    def after(self, auc: float | None, config: OptimConfig) -> "Plateau":
        """Returns the state after an evaluation; an undefined AUC counts as a stall."""
        if auc is not None and auc > (self.best_auc or 0.0) + _MIN_GAIN:
            return dataclasses.replace(self, best_auc=auc, stalls=0)
        if config.plateau_patience is None:
            return self
        stalls = self.stalls + 1
        return dataclasses.replace(
            self,
            stalls=stalls,
            lr_scale=self.lr_scale * config.plateau_factor,
            stop=stalls >= config.plateau_patience,
        )
