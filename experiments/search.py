"""Searches the options with which a configuration trains fastest, by short trials.

    python experiments/search.py --config fp8_dlrm --minutes 30
    python experiments/search.py --config fp8_dlrm --space recipe batch-size=8192,16384

Searches what changes speed alone (steps a call, the mesh), and the axes that `--space`
names, which change what is learned: batch-size, microbatches, recipe, mods,
table-dtype, wire, gradient-wire, sync, or any OPTION=A,B,C. The other options are those
of train.py.

Every trial trains for seconds in a process of its own, which may crash, hang or run out
of memory. What to try next follows from the times that Dispatch and the mesh planner
predict and from all trials so far, also those of other searches (`--earlier FILE ...`).
The search ends when less than 1 % is to be gained, or after `--minutes`. In `--workdir`
are `trials.json`; `best.json`, which `train.py --config best.json` trains; and a page.
The same command goes on.

Exit codes: 0 done; 2 an error that you can mend, or no trial had a speed.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import importlib.util
import math
import pathlib
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experiments.cli import parse, run_cli
from experiments.options import asks_for_help
from experiments.plan import schema_of
from loka_jax import jsonfile
from loka_jax.commands import as_commands, command
from loka_jax.options import Parser, require
from loka_jax.report.search_page import write_search_page
from loka_jax.search import trial
from loka_jax.search.history import Case, History, Outcome, Trial, read_trials
from loka_jax.search.predicted import Predictor
from loka_jax.search.proxy import factors, judge, suggest
from loka_jax.search.space import Point, axes_of, left_out, points_of, with_mesh
from loka_jax.terminal import printable
from loka_jax.train.config import Config
from loka_jax.train.folder.record import versions
from loka_jax.train.session import standard_output

_MOST_POINTS = 5_000
_ROWS = 20  # of the live table


@dataclasses.dataclass(frozen=True)
class Search:
    """A space, the file of its trials, and those of other spaces."""

    points: Sequence[Point]
    cases: Sequence[Case]
    history: History
    earlier: Sequence[Sequence[Trial]]

    def tried(self) -> tuple[Trial, ...]:
        """Returns the trials of this space."""
        keys = {case.key for case in self.cases}
        return tuple(trial for trial in self.history.trials() if trial.key in keys)

    def trials(
        self, minutes: float, run: Callable[[Config], Outcome]
    ) -> Iterator[tuple[Trial, ...]]:
        """Yields all trials, at first and after each new one, until the search ends."""
        end = time.monotonic() + 60 * minutes
        yield (trials := self.tried())
        while time.monotonic() < end:
            chosen, judged = suggest(self.cases, trials, self.earlier)
            if not any(trial.key == self.cases[0].key for trial in trials):
                chosen = 0  # the user's own, which others are compared with
            if chosen is None:
                return
            case = self.cases[chosen]
            outcome = run(trial.paced(self.points[chosen].config, case.step_us))
            told = vars(case) | vars(outcome)
            if any(trial.is_ok for trial in trials):
                told["expected"] = math.exp(judged.speed[chosen])
                told["spread"] = float(judged.spread[chosen])
            self.history.add(Trial(**told))
            yield (trials := self.tried())


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the fastest trial, if any has a speed."""
    ok = [trial for trial in trials if trial.is_ok]
    return max(ok, key=lambda trial: trial.speed, default=None)


def table_of(trials: Sequence[Trial], own: Case, rows: int = _ROWS) -> Table:
    """Returns the newest trials as a table: what was chosen, predicted and measured."""
    table = Table("trial", "choices", box=None, pad_edge=False)
    for head in ("predicted", "expected", "measured, examples/s"):
        table.add_column(head, justify="right")
    best = best_of(trials)
    for number, one in list(enumerate(trials, 1))[-rows:]:
        expected = "" if one.expected is None else f"{one.expected:,.0f}"
        style = "bold" if one is best else "" if one.is_ok else "dim"
        cells = (str(number), changes(one, own), f"{one.predicted:,.0f}", expected)
        table.add_row(*map(Text, (*cells, came_of(one))), style=style)
    return table


def came_of(trial: Trial) -> str:
    """Returns the speed of a trial, or why it has none."""
    if trial.is_ok:
        return f"{trial.speed:,.0f}"
    return printable(f"{trial.status}: {trial.why}")


def changes(case: Case, own: Case) -> str:
    """Returns the choices of a point that are not the user's own, as a text."""
    other = [
        f"{axis} {value}"
        for axis, value in case.choices.items()
        if own.choices.get(axis) != value
    ]
    return ", ".join(other) or "your own"


def _search(arguments: list[str]) -> int:
    parser = Parser(
        prog=as_commands("python experiments/search.py"),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trial-seconds", type=float, default=300.0)
    parser.add_argument("--space", nargs="+", default=[])
    parser.add_argument("--earlier", nargs="+", type=pathlib.Path, default=[])
    parser.add_argument("--workdir", type=pathlib.Path)
    own, rest = parser.parse_known_args(arguments)
    if asks_for_help(rest):
        print(f"{as_commands(__doc__ or '')}\nOptions of every trial:\n")
    config = with_mesh(parse(rest, "search.py"))
    for name in ("minutes", "trial_seconds"):
        value = getattr(own, name)
        require(value > 0, f"--{name.replace('_', '-')}", value, "positive")
    folder = own.workdir or pathlib.Path("runs") / f"{config.name}-search"
    earlier = [read_trials(path) for path in own.earlier]
    console = standard_output()
    search = open_search(config, own.space, folder, earlier, console)
    _run(search, own, console, folder)
    trials = search.tried()
    best = best_of(trials)
    if best is None:
        why = trials[-1].why if trials else "there was no time for one"
        raise ValueError(f"no trial has a speed ({why}): correct the options.")
    line = shlex.join(["python", "experiments/search.py", *arguments])
    _finish(search, folder, best, as_commands(line), console)
    return 0


def open_search(
    config: Config,
    space: Sequence[str],
    folder: pathlib.Path,
    earlier: Sequence[Sequence[Trial]],
    console: Console,
) -> Search:
    """Returns a search that begins or goes on; says what its space is.

    Raises:
        ValueError: for a wrong space, or a folder that holds another search.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("a search needs scikit-learn: install loka-jax[search].")
    if config.init_from is not None:
        raise ValueError("a search begins runs: leave out --init-from.")
    axes = axes_of(config, space, jax.device_count())
    size = math.prod(len(axis.values) for axis in axes)
    require(size <= _MOST_POINTS, "--space of", size, f"at most {_MOST_POINTS} points")
    points, refused = points_of(config, axes)
    about = {"config": config.identity(), "versions": versions()}
    history = History(folder / "trials.json", about)
    for axis in axes:
        console.print(f"{axis.name}: {', '.join(axis.values)}")
    for name, why in left_out(axes).items():
        console.print(f"Left out: {name}, as {why} (--space {name} searches it, too).")
    for why, count in refused.items():
        console.print(printable(f"Left out: {count} combinations: {why}"))
    with console.status("predicting"):
        predict = Predictor.here(schema_of(config))
        cases = [predict(point) for point in points]
    console.print(f"{len(points)} configurations.")
    keys = {case.key for case in cases}
    others = [trial for trial in history.trials() if trial.key not in keys]
    return Search(points, cases, history, [*earlier, others])


def _run(search: Search, options, console: Console, folder: pathlib.Path) -> None:
    """Runs trials, and shows them as they end."""

    def run(config: Config) -> Outcome:
        return next(trial.measured([config], options.trial_seconds))

    own, shown, trials = search.cases[0], 0, ()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for trials in search.trials(options.minutes, run):
            if console.is_terminal:
                busy = Text("trying the next one ...")
                live.update(Group(table_of(trials, own), busy), refresh=True)
                continue
            for one in trials[shown:]:
                console.print(f"Tried {changes(one, own)}: {came_of(one)}")
            shown = len(trials)
    console.print(table_of(trials, own, len(trials)))


def _finish(
    search: Search, folder: pathlib.Path, best: Trial, line: str, console: Console
) -> None:
    """Writes the winner and the page, and says what came."""
    trials, own = search.tried(), search.cases[0]
    config = next(
        point.config
        for point, case in zip(search.points, search.cases, strict=True)
        if case.key == best.key
    )
    winner = folder / "best.json"
    jsonfile.write(winner, config.identity())
    judged = judge(search.cases, trials, search.earlier)
    first = next((x for x in trials if x.key == own.key and x.is_ok), None)
    than = "" if first is None else f", {best.speed / first.speed:.2f} times your own"
    page = write_search_page(
        folder / "report.html",
        title=f"{config.name}: the fastest of {len(trials)} trials",
        trials=[dataclasses.asdict(one) | _numbers(one, own) for one in trials],
        factors=factors(search.cases, judged),
        points=len(search.points),
        command=line,
    )
    console.print(
        printable(f"Best: {changes(best, own)}: {best.speed:,.0f} examples/s{than}.")
    )
    console.print(printable(f"It is {winner}: {command('train.py')} --config {winner}"))
    console.print(printable(f"Report: {page}"))


def _numbers(trial: Trial, own: Case) -> dict[str, object]:
    speed = trial.speed if trial.is_ok else None
    return {
        "speed": speed,
        "predicted": trial.predicted,
        "changes": changes(trial, own),
        "why": None if trial.is_ok else came_of(trial),
    }


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""
    return run_cli(lambda: _search(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
