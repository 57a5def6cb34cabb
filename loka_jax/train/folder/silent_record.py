"""The record of a process that writes no files, as the first of its run does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.train.folder.record import RunRecord


class SilentRecord(RunRecord):
    """A record that takes everything and writes nothing."""

    def __init__(self, workdir: Path):
        """Takes the folder that another process writes."""
        self.workdir = workdir

    def start(self, step: int) -> None:
        """Does nothing, and so do the others."""

    def truncate(self, step: int) -> None:  # noqa: D102
        pass

    def write(self, name: str, value: object) -> None:  # noqa: D102
        pass

    def write_plan(self, plan: DispatchPlan) -> None:  # noqa: D102
        pass

    def write_scores(self, *_: Any) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass

    def log(self, line: Mapping[str, Any]) -> None:  # noqa: D102
        pass

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        pass
