"""Console output of a training run: tables, and a progress bar or lines.

Texts come from files, compilers and paths too. So none is read as markup of Rich, and
control characters are shown as escapes.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site
from loka_jax.recipe import ROLES
from loka_jax.terminal import printable
from loka_jax.train.config import LoopConfig

_SECONDS_BETWEEN_LINES = 10.0
_SILENT_SECONDS = 2.0  # what takes longer is named


def plain(text: str) -> Text:
    """Returns a text that a console prints as it is, on one line."""
    return Text(printable(text))


class _Now(ProgressColumn):
    """Shows a text that is asked for whenever the line is drawn."""

    def __init__(self, text: Callable[[], str]):
        super().__init__(Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(), style="bold")


class _Line(Progress):
    """A line that leaves room for what the terminal adds on Ctrl-C.

    If "^C" went to a line of its own, this one would not be found again, and stay.
    """

    def get_renderable(self) -> RenderableType:
        return _Narrow(super().get_renderable())


class _Narrow:
    def __init__(self, content: RenderableType):
        self._content = content

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Segment]:
        width = max(options.max_width - len("^C") - 1, 1)
        yield from console.render(self._content, options.update_width(width))


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
        self._bar = _Line(
            SpinnerColumn("line"),
            _Now(self._now),
            console=console,
            disable=not console.is_terminal,
        )
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
        text = (
            f"loss {_show(line['loss'])}  NE {_show(line['ne'])}  "
            f"{_show_rate(line['examples_per_second'])} examples/s"
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

    def _now(self) -> str:
        """Returns what is being done, as the line shows it."""
        if self._is_stopping() and self._activity != "stopped":
            return f"stopping, {self._activity}"
        return self._activity

    def evaluation(self, step: int, line: dict):
        """Prints the results of an evaluation."""
        tasks = line.get("tasks", {})
        mean = f", mean of {len(tasks)} tasks" if tasks else ""
        self.say(f"step {step:,}  {line['split']}{mean}: {_quality(line)}")
        for name, values in tasks.items():
            self.say(f"  {name}: {_quality(values)}")


def _quality(values: dict) -> str:
    return (
        f"AUC {_show(values['auc'], 5)}  log loss {_show(values['logloss'], 5)}  "
        f"NE {_show(values['ne'], 5)}  calibration {_show(values['calibration'])}"
    )


def resume_note(step: int, total_steps: int, loop: LoopConfig) -> str:
    """Returns a sentence on where a run goes on, or how it would if it has ended."""
    if step < total_steps:
        return f"Resuming at step {step:,}."
    by_steps = loop.max_steps is not None and loop.max_steps <= step
    option = "--loop.max-steps" if by_steps else "--loop.epochs"
    return f"Resuming at step {step:,}, the last: raise {option} to train on."


def print_data(console: Console, report: dict):
    """Prints the sizes and origin of the splits, and the values that were corrected."""
    sizes = (f"{count:,} {split}" for split, count in report["examples"].items())
    console.print(plain(f"Examples: {', '.join(sizes)}; {report['split_rule']}."))
    for note in report.get("notes", ()):
        console.print(plain(note))
    counts = [
        f"{count:,} {kind}{_where(report, kind)}"
        for kind, count in report.get("totals", {}).items()
        if count
    ]
    if bad_rows := report.get("bad_rows", {}).get("count", 0):
        counts.append(f"{bad_rows:,} bad rows")
    if counts:
        mended = f"Irregular values, handled as configured: {'; '.join(counts)}."
        console.print(plain(mended))


def _where(report: dict, kind: str, limit: int = 5) -> str:
    """Returns the columns with most values of a kind, as " in price 7, age 2"."""
    found: Counter[str] = Counter()
    for split in report.get("splits", {}).values():
        for column, counts in split.get("columns", {}).items():
            found[column] += counts.get(kind, 0)
    columns = [f"{name} {count:,}" for name, count in (+found).most_common()]
    more = f" and {len(columns) - limit} more" if len(columns) > limit else ""
    return f" in {', '.join(columns[:limit])}{more}" if columns else ""


def print_sites(console: Console, sites: tuple[Site, ...]):
    """Prints a table of the sites: shape, kernel of each role, reason against FP8."""
    # A name may hold a recipe for each role; the table says where bfloat16 runs.
    names = (part for s in sites if s.is_fp8 for part in s.recipe.split("/"))
    recipes = dict.fromkeys(name for name in names if name != "bf16")
    title = f"Sites, recipe {', '.join(recipes)}" if recipes else "Sites"
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=plain(title), title_justify="left"
    )
    for column in ("site", "m x k x n", "role", "what runs", "why not FP8"):
        table.add_column(column, no_wrap=column != "why not FP8")
    for site in sites:
        sizes = f"{site.spec.m} x {site.spec.k} x {site.spec.n}"
        roles, runs = (Text("\n").join(map(plain, lines)) for lines in _by_role(site))
        cells = (plain(site.path), sizes, roles, runs, plain(site.why_not or ""))
        table.add_row(*cells, style=None if site.is_fp8 else "dim")
    console.print(table)
    in_fp8 = sum(site.is_fp8 for site in sites)
    console.print(f"{in_fp8} of {len(sites)} sites in FP8.")
    for reason, paths in _unfused_sites(sites).items():
        where = ", ".join(paths)
        console.print(plain(f"No fused kernel at {where}: {reason}."))


def print_plan(console: Console, plan: DispatchPlan, notes: tuple[str, ...]):
    """Prints the choice for each site with its reason; nothing without decisions."""
    for note in notes:
        console.print(plain(note))
    if not plan.decisions:
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Dispatch", title_justify="left"
    )
    for column in ("site", "choice", "speed", "error", "why", "runner-up"):
        table.add_column(column, no_wrap=column in ("site", "speed", "error"))
    for path, decision in plan.decisions:
        speed, error = decision.speedup, decision.error
        table.add_row(
            plain(path),
            decision.choice.name,
            "" if speed is None else _speed(speed, decision.spread),
            "" if error is None else f"{error:.3f}",
            plain(decision.reason),
            plain(decision.runner_up or ""),
            style=None if decision.choice.is_fp8 else "dim",
        )
    console.print(table)
    console.print(
        "Speed: of the whole site, relative to XLA's bfloat16; measured, or predicted "
        "where its uncertainty is given (--plan tune measures). Error: relative L2 of "
        "the worst FP8 product."
    )


def _speed(speed: float, spread: float | None) -> str:
    """Returns a speed, and its uncertainty if it is predicted."""
    return f"{speed:.2f}x" if spread is None else f"{speed:.2f}x +-{spread:.0%}"


def _unfused_sites(sites: tuple[Site, ...]) -> dict[str, list[str]]:
    """Returns the paths of the sites without a fused kernel, by reason."""
    paths: dict[str, list[str]] = {}
    for site in sites:
        if site.why_not_fused is not None:
            paths.setdefault(site.why_not_fused, []).append(site.path)
    return paths


def _by_role(site: Site) -> tuple[list[str], list[str]]:
    """Returns roles and kernels, one item for each kernel."""
    roles_of: dict[str, list[str]] = {}
    for role in ROLES:
        roles_of.setdefault(site.runs[role], []).append(role)
    if len(roles_of) == 1:
        return ["all"], list(roles_of)
    return list(map(", ".join, roles_of.values())), list(roles_of)


def _show(value: float | None, digits: int = 4) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _show_rate(rate: float | None) -> str:
    return "n/a" if rate is None else f"{rate:,.0f}"
