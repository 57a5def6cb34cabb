"""The trials of a search: a JSON file that grows, for several searches at once.

config, device ...   of the runs, as in a record of a run
trials               one for each point that was tried, whatever came of it
"""

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any, Literal

from loka_jax import jsonfile
from loka_jax.dispatch.table import locked

MAX_BYTES = 64 << 20
type Status = Literal["ok", "memory", "crash", "hang", "killed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A point of a space, and what is predicted for it before anything runs.

    Attributes:
        choices: the value of each axis.
        batch_size: examples of a step.
        us: predicted microseconds of a step, by part.
        memory_share: predicted memory over what a device has.
    """

    choices: dict[str, str]
    batch_size: int
    us: dict[str, float]
    memory_share: float = 0.0

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """What tells a point from the others of its space."""
        return tuple(sorted(self.choices.items()))

    @property
    def step_us(self) -> float:
        """The predicted microseconds of a step."""
        return sum(self.us.values())

    @property
    def predicted(self) -> float:
        """The predicted examples per second."""
        return 1e6 * self.batch_size / self.step_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a trial.

    Attributes:
        rates: examples per second between two log lines, without compilation.
        why: a sentence, if it is not ok.
        seconds: of the whole trial.
    """

    status: Status
    rates: tuple[float, ...] = ()
    why: str | None = None
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """The examples per second: the median, which a few disturbed lines leave."""
        return statistics.median(self.rates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Outcome, Case):
    """A point that was tried.

    Attributes:
        expected: examples per second, by all trials before.
        spread: the standard deviation of its logarithm.
    """

    expected: float | None = None
    spread: float | None = None

    @property
    def is_ok(self) -> bool:
        """True if it has a speed."""
        return self.status == "ok"

    @property
    def off(self) -> float:
        """The logarithm of measured over predicted speed."""
        return math.log(self.speed / self.predicted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File:
    config: dict[str, Any]
    versions: dict[str, Any]
    commit: str | None = None
    trials: tuple[Trial, ...] = ()


class History:
    """The trials in a file, which others may add to."""

    def __init__(self, path: pathlib.Path, about: Mapping[str, Any]):
        """Opens the file, or begins one.

        Args:
            about: the configuration and the versions of its runs, and their commit if
                that is known.

        Raises:
            ValueError: if it is damaged, or has trials of something else.
        """
        self._path, self._about = path, dict(about)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot write to {path} ({error.strerror}): choose another folder."
            ) from None
        with locked(path):
            found = self._read()
        kept = {"config": found.config, "device": found.versions.get("device_kind")}
        versions = self._about["versions"]
        now = {"config": about["config"], "device": versions.get("device_kind")}
        if differs := jsonfile.explain_mismatch(kept, now):
            raise ValueError(
                f"{path} has trials of other runs ({'; '.join(differs[:5])}): name "
                "another file, and this one with --earlier."
            )

    def trials(self) -> tuple[Trial, ...]:
        """Returns all trials, in the order in which they ended."""
        return self._read().trials

    def add(self, trial: Trial) -> tuple[Trial, ...]:
        """Adds a trial, and returns all; the file is never without those before."""
        with locked(self._path):
            file = self._read()
            file = dataclasses.replace(file, trials=(*file.trials, trial))
            jsonfile.write_text(
                self._path, jsonfile.dumps(dataclasses.asdict(file), indent=1) + "\n"
            )
        return file.trials

    def _read(self) -> _File:
        if not os.path.exists(self._path):
            return _File(**self._about)
        return _read(self._path)


def read_trials(path: pathlib.Path) -> tuple[Trial, ...]:
    """Returns the trials in a file.

    Raises:
        ValueError: if it cannot be read, or holds something else.
    """
    return _read(path).trials


def _read(path: pathlib.Path) -> _File:
    try:
        return jsonfile.typed(jsonfile.read(path, max_bytes=MAX_BYTES), _File)
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}).") from None
    except ValueError as error:
        raise ValueError(f"{path} holds no trials of a search: {error}") from None
