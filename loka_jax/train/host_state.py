"""The host's state of a run: the part of a checkpoint that no device holds."""

import dataclasses
from typing import Any

from loka_jax.data import Position
from loka_jax.dispatch.drift import Watch
from loka_jax.optim import Plateau
from loka_jax.train.guard import Guard
from loka_jax.train.scale_watch import ScaleWatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The host's state of a run; saved with the device's state.

    Attributes:
        step: steps taken, including skipped ones.
        position: position of the next batch.
        examples: training examples seen.
        seconds: time spent training, without evaluations and checkpoints.
        plateau: the state of the plateau schedule and of early stopping.
        best: the best evaluation so far by `OptimConfig.best_by`, as in metrics.jsonl.
        demotions: a sentence for each site that fell back to bfloat16.
        returns: a sentence for each return to a checkpoint after a divergence.
        watch: the looks at delayed scales so far.
        guard: the losses so far.
        scale_watch: the amaxes that were far off their delayed scales so far.
    """

    step: int = 0
    position: Position
    examples: int = 0
    seconds: float = 0.0
    plateau: Plateau = Plateau()
    best: dict[str, Any] | None = None
    demotions: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    watch: Watch = Watch()
    guard: Guard = Guard()
    scale_watch: ScaleWatch = ScaleWatch()

    def to_json(self) -> dict[str, Any]:
        """Returns the progress as JSON values."""
        return dataclasses.asdict(self) | {"position": list(self.position)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Progress":
        """Returns the progress from the values of `to_json`.

        Raises:
            ValueError: for other values.
        """
        try:
            read = {
                "position": Position(*data["position"]),
                "plateau": Plateau(**data["plateau"]),
                "demotions": tuple(data["demotions"]),
                "returns": tuple(data["returns"]),
                "watch": Watch(**data["watch"]),
                "guard": Guard(**data["guard"]),
                "scale_watch": ScaleWatch.from_json(data["scale_watch"]),
            }
            return cls(**data | read)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the checkpoint has no progress of this version ({error}): use the "
                "version of loka_jax that wrote it."
            ) from None
