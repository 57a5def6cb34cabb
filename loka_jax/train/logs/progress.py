"""What a run is doing, on the console: a bar, or lines in a log file."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    RenderableColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from loka_jax.train.config import LoopConfig
from loka_jax.train.logs.printing import plain, quality_lines, show

_SECONDS_BETWEEN_LINES = 10.0
_SILENT_SECONDS = 2.0  # what takes longer is named


class _Line(Progress):
    """A line that leaves room for what the terminal adds on Ctrl-C.

    If "^C" went to a line of its own, this one would not be found again, and stay.
    """

    def __init__(self, console: Console, *columns: ProgressColumn):
        self._on = console  # `Progress` draws before it has one
        super().__init__(*columns, console=console, disable=not console.is_terminal)

    def get_renderable(self) -> RenderableType:
        return Constrain(
            super().get_renderable(), max(self._on.width - len("^C") - 1, 1)
        )


class TrainingProgress:
    """What a run is doing, on one line: while training a bar with loss, NE and rate.

    If the output is not a terminal (a log file), a line every ten seconds instead.
    """

    def __init__(
        self, console: Console, *, is_stopping: Callable[[], bool] = lambda: False
    ):
        self._console = console
        self._is_stopping = is_stopping
        self._activity = "starting"
        self._total: int | None = None
        self._last_line = time.monotonic()
        now = RenderableColumn(self, table_column=Column(no_wrap=True))
        self._bar = _Line(console, SpinnerColumn("line"), now)
        self._task = self._bar.add_task("", total=None, numbers="")

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *_):
        self.close()

    def begin(self, total_steps: int, first_step: int):
        """Shows a bar from now on, of the steps `first_step` to `total_steps`."""
        self._total = total_steps
        self._activity = "training"
        self._bar.columns = (
            *self._bar.columns,
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn(
                "{task.fields[numbers]}",
                markup=False,
                table_column=Column(no_wrap=True),
            ),
            TimeRemainingColumn(),
        )
        self._bar.update(self._task, total=total_steps, completed=first_step)

    def close(self):
        """Leaves the bar as it is, if there is one."""
        if self._is_stopping():
            self._activity = "stopped"
        self._bar.live.transient = self._total is None
        self._bar.stop()

    def step(self, step: int):
        """Moves the bar to `step`."""
        self._bar.update(self._task, completed=step)

    def numbers(self, step: int, line: dict):
        """Shows the values of a line of metrics.jsonl."""
        rate = line["examples_per_second"]
        text = (
            f"loss {show(line['loss'])}  NE {show(line['ne'])}  "
            f"{'n/a' if rate is None else f'{rate:,.0f}'} examples/s"
        )
        if line["skipped_steps"]:
            text += f"  skipped {line['skipped_steps']}"
        self._bar.update(self._task, completed=step, numbers=text)
        now = time.monotonic()
        is_due = now - self._last_line > _SECONDS_BETWEEN_LINES
        if not self._console.is_terminal and is_due:
            self._last_line = now
            self.say(f"step {step:,} of {self._total:,}  {text}")

    def say(self, text: str):
        """Prints a sentence."""
        self._console.print(plain(text))

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Shows what takes the time within the block, such as "compiling".

        If the output is not a terminal, a line says so after two seconds.
        """
        if activity == self._activity:
            yield
            return
        before = self._activity
        self._show(activity)
        note = threading.Timer(_SILENT_SECONDS, self.say, [f"{activity} ..."])
        note.daemon = True
        if not self._console.is_terminal:
            note.start()
        try:
            yield
        finally:
            note.cancel()
            self._show(before)

    def _show(self, activity: str):
        self._activity = activity
        self._bar.refresh()

    def __rich__(self) -> Text:
        """Returns what is being done, whenever the line is drawn."""
        is_stopping = self._is_stopping() and self._activity != "stopped"
        return Text("stopping, " * is_stopping + self._activity, style="bold")

    def evaluation(self, step: int, line: dict):
        """Prints the results of an evaluation."""
        for text in quality_lines(f"step {step:,}  {line['split']}", line):
            self.say(text)


def resume_note(step: int, total_steps: int, loop: LoopConfig) -> str:
    """Returns a sentence on where a run goes on, or how it would if it has ended."""
    if step < total_steps:
        return f"Resuming at step {step:,}."
    by_steps = loop.max_steps is not None and loop.max_steps <= step
    option = "--loop.max-steps" if by_steps else "--loop.epochs"
    return f"Resuming at step {step:,}, the last: raise {option} to train on."
