"""The host's state of a run: the part of a checkpoint that no device holds."""

import dataclasses
from typing import Any

from loka_jax.data import Position
from loka_jax.dispatch.drift import Watch
from loka_jax.optim import Plateau
from loka_jax.train.watch.guard import Guard
from loka_jax.train.watch.scale_watch import ScaleWatch


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
        changes: a sentence for each site that left FP8, or entered it.
        returns: a sentence for each return to a checkpoint after a divergence.
        drift: the looks at the operands of FP8 sites so far.
        planned: the decisions on sites that have drifted, as JSON values by path.
        unsafe: paths of the sites that live errors have demoted.
        broken: paths of the sites whose kernels did not compile.
        replanned: the step of the newest change of the plan.
        guard: the losses so far.
        scale_watch: the amaxes that were far off their delayed scales so far.
        days: the quality on each day's training rows before it was trained on them, in
            a run that goes on from another one; see `train.next_day`.
    """

    step: int = 0
    position: Position
    examples: int = 0
    seconds: float = 0.0
    plateau: Plateau = Plateau()
    best: dict[str, Any] | None = None
    changes: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    drift: Watch = Watch()
    planned: dict[str, Any] = dataclasses.field(default_factory=dict)
    unsafe: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    replanned: int = 0
    guard: Guard = Guard()
    scale_watch: ScaleWatch = ScaleWatch()
    days: tuple[dict[str, Any], ...] = ()

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
                "changes": tuple(data["changes"]),
                "returns": tuple(data["returns"]),
                "unsafe": tuple(data["unsafe"]),
                "broken": tuple(data["broken"]),
                "drift": Watch.from_json(data["drift"]),
                "guard": Guard(**data["guard"]),
                "scale_watch": ScaleWatch.from_json(data["scale_watch"]),
                "days": tuple(data["days"]),
            }
            return cls(**data | read)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the checkpoint has no progress of this version ({error}): use the "
                "version of loka_jax that wrote it."
            ) from None
