"""Console output of a training run: tables, and a progress bar or lines."""

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

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.nn import Site
from loka_jax.recipe import ROLES

_SECONDS_BETWEEN_LINES = 10.0


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
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
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
            self._console.print(f"step {step:,} of {self._total:,}  {text}")

    def say(self, text: str):
        """Prints a sentence."""
        self._console.print(text, highlight=False)

    def evaluation(self, step: int, line: dict):
        """Prints the results of an evaluation."""
        self._console.print(
            f"step {step:,}  {line['split']}: AUC {_show(line['auc'], 5)}  "
            f"log loss {_show(line['logloss'], 5)}  NE {_show(line['ne'], 5)}  "
            f"calibration {_show(line['calibration'])}"
        )


def print_data(console: Console, report: dict):
    """Prints the sizes and origin of the splits, and the values that were corrected."""
    sizes = (f"{count:,} {split}" for split, count in report["examples"].items())
    console.print(f"Examples: {', '.join(sizes)}; {report['split_rule']}.")
    totals = dict(report.get("totals", {}))
    totals["bad rows"] = report.get("bad_rows", {}).get("count", 0)
    counts = [f"{count:,} {kind}" for kind, count in totals.items() if count]
    if counts:
        console.print(f"Irregular values, handled as configured: {', '.join(counts)}.")


def print_sites(console: Console, sites: tuple[Site, ...]):
    """Prints a table of the sites: shape, kernel of each role, reason against FP8."""
    recipes = dict.fromkeys(site.recipe for site in sites if site.is_fp8)
    title = f"Sites, recipe {', '.join(recipes)}" if recipes else "Sites"
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left"
    )
    for column in ("site", "m x k x n", "role", "what runs", "why not FP8"):
        table.add_column(column, no_wrap=column != "why not FP8")
    for site in sites:
        sizes = f"{site.spec.m} x {site.spec.k} x {site.spec.n}"
        roles, runs = _by_role(site)
        style = None if site.is_fp8 else "dim"
        table.add_row(site.path, sizes, roles, runs, site.why_not or "", style=style)
    console.print(table)
    in_fp8 = sum(site.is_fp8 for site in sites)
    console.print(f"{in_fp8} of {len(sites)} sites in FP8.")
    for reason, paths in _unfused(sites).items():
        where = ", ".join(paths)
        console.print(f"No fused kernel at {where}: {reason}.", highlight=False)


def print_plan(console: Console, plan: DispatchPlan, notes: tuple[str, ...]):
    """Prints the choice for each site with its reason; nothing without decisions."""
    for note in notes:
        console.print(note, highlight=False)
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
            path,
            decision.choice.name,
            "" if speed is None else f"{speed:.2f}x",
            "" if error is None else f"{error:.3f}",
            decision.reason,
            decision.runner_up or "",
            style=None if decision.choice.is_fp8 else "dim",
        )
    console.print(table)
    console.print(
        "Speed: measured for the whole site, relative to XLA's bfloat16; error: "
        "relative L2 of the worst FP8 product."
    )


def _unfused(sites: tuple[Site, ...]) -> dict[str, list[str]]:
    """Returns the paths of the sites without a fused kernel, by reason."""
    paths: dict[str, list[str]] = {}
    for site in sites:
        if site.why_not_fused is not None:
            paths.setdefault(site.why_not_fused, []).append(site.path)
    return paths


def _by_role(site: Site) -> tuple[str, str]:
    """Returns roles and kernels as two texts, with one line for each kernel."""
    roles_of: dict[str, list[str]] = {}
    for role in ROLES:
        roles_of.setdefault(site.runs[role], []).append(role)
    if len(roles_of) == 1:
        return "all", site.runs["fwd"]
    return "\n".join(map(", ".join, roles_of.values())), "\n".join(roles_of)


def _show(value: float | None, digits: int = 4) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
