"""Console output of a training run: tables, and a progress bar or lines.

Texts come from files, compilers and paths too. So none is read as markup of Rich, and
control characters are shown as escapes.
"""

import time

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site
from loka_jax.recipe import ROLES
from loka_jax.terminal import printable

_SECONDS_BETWEEN_LINES = 10.0


def plain(text: str) -> Text:
    """Returns a text that a console prints as it is, on one line."""
    return Text(printable(text))


class TrainingProgress:
    """A progress bar with loss, NE, examples/s and time left.

    If the output is not a terminal (a log file), a line every ten seconds instead.
    """

    def __init__(self, console: Console, total_steps: int, first_step: int):
        """Prepares for steps `first_step` to `total_steps`."""
        self._console = console
        self._total = total_steps
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "training", total=total_steps, completed=first_step, numbers=""
        )

    def __enter__(self) -> "TrainingProgress":
        """Shows the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_):
        """Leaves the bar as it is."""
        self._bar.stop()

    def step(self, step: int):
        """Moves the bar to `step`."""
        self._bar.update(self._task, completed=step)

    def numbers(self, step: int, line: dict):
        """Shows the values of a line of metrics.jsonl."""
        text = (
            f"loss {_show(line['loss'])}  NE {_show(line['ne'])}  "
            f"{line['examples_per_second']:,.0f} examples/s"
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

    def evaluation(self, step: int, line: dict):
        """Prints the results of an evaluation."""
        self.say(
            f"step {step:,}  {line['split']}: AUC {_show(line['auc'], 5)}  "
            f"log loss {_show(line['logloss'], 5)}  NE {_show(line['ne'], 5)}  "
            f"calibration {_show(line['calibration'])}"
        )


def print_data(console: Console, report: dict):
    """Prints the sizes and origin of the splits, and the values that were corrected."""
    sizes = (f"{count:,} {split}" for split, count in report["examples"].items())
    console.print(plain(f"Examples: {', '.join(sizes)}; {report['split_rule']}."))
    for note in report.get("notes", ()):
        console.print(plain(note))
    totals = dict(report.get("totals", {}))
    totals["bad rows"] = report.get("bad_rows", {}).get("count", 0)
    counts = [f"{count:,} {kind}" for kind, count in totals.items() if count]
    if counts:
        mended = f"Irregular values, handled as configured: {', '.join(counts)}."
        console.print(plain(mended))


def print_sites(console: Console, sites: tuple[Site, ...]):
    """Prints a table of the sites: shape, kernel of each role, reason against FP8."""
    recipes = dict.fromkeys(site.recipe for site in sites if site.is_fp8)
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
    for reason, paths in _unfused(sites).items():
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


def _unfused(sites: tuple[Site, ...]) -> dict[str, list[str]]:
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
