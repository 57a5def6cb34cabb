"""Measures speed and error of every candidate at a model's sites: the dispatch table.

    python experiments/tune.py --config fp8_dlrm --table table.json

Trains, or continues the run in the workdir, while Probe observes every site; then
measures every candidate at every site in a separate process, on operands drawn from the
learned statistics. Errors that were seen on the operands of the training itself replace
those on drawn ones. Last, the plan that follows from the table is compared with
bfloat16 on held-out data, and sites that raise the loss too much are given up in FP8.

Times that the table already holds are kept, so that only the errors of this model are
measured; name a new file to measure everything again. Options are those of train.py,
`--table` and `--tune.*`. `train.py --plan table.json` follows the table.

Exit codes: those of train.py.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from math import isfinite

from experiments.cli import parse_with, run_cli
from experiments.probe import observed
from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.review import live_intervals, with_live
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.tuning import TuneConfig
from loka_jax.dispatch.tuning import tune as measure
from loka_jax.measure.intervals import Interval
from loka_jax.probe.site import SiteStats
from loka_jax.survey.sensitivity import ALL, refusals, sensitivity
from loka_jax.train.build import Run
from loka_jax.train.config import Config
from loka_jax.train.logs.printing import plain
from loka_jax.train.session import standard_output, train
from loka_jax.train.state import TrainState


def tune(
    config: Config, options: TuneConfig, path: pathlib.Path, arguments: list[str]
) -> int:
    """Trains, measures and writes the table; returns the exit code."""
    console = standard_output()
    # Refuses a bad table or path now, not after the training.
    _old_table(path)
    with tables.locked(path):
        pass
    done = train(observed(config), arguments, console, script="tune.py")
    if done.exit_code or done.run is None:
        return done.exit_code
    assert done.state is not None
    run, stats = done.run, nn.by_path(done.state.probe)
    old = _old_table(path)
    timed = [] if old is None else [k for k, entry in old.sites.items() if entry.times]

    def say(sentence: str):
        console.print(plain(sentence))

    if local_performance().performance is None:
        say("There is no GPU with FP8: the times are of this device, and only for it.")
    measured = measure(
        run.source,
        run.sites,
        stats,
        options,
        effects=_effects(run, done.state, options.held_out_batches, say),
        timed=timed,
        say=say,
    )
    # Written after every site, because measuring all of them can take long.
    for table in measured:
        tables.add(path, table)
    _add_own_errors(path, run, stats)
    _add_refusals(path, run, done.state, options.held_out_batches, say)
    say(f"Table: {path}")
    return 0


def _add_own_errors(path: pathlib.Path, run: Run, stats: Mapping[str, SiteStats]):
    """Replaces drawn errors by those that were seen while training, where they were."""
    live = {
        site.path: live_intervals(stats[site.path].errors, run.config.probe.recipes)
        for site in run.sites
        if site.has_choice and site.path in stats
    }
    table = tables.read(path)
    tables.add(path, with_live(table, run.sites, live, run.source))


def _add_refusals(
    path: pathlib.Path,
    run: Run,
    state: TrainState,
    max_batches: int,
    say: Callable[[str], None],
):
    """Measures the plan that follows from the table, and notes what it gives up."""
    table, options, name = tables.read(path), run.config.dispatch, run.source
    plan = make_plan(
        run.sites,
        PerformanceModel.of(table),
        limits=options.limits,
        rules=options.by_pattern,
        config=name,
    )
    refused = refusals(
        run, state, plan, limit=options.limits.loss, max_batches=max_batches, say=say
    )
    sources = {f"{name} {site}": reason for site, reason in refused.items()}
    entries = {
        key: Entry(refused={s: sources[s] for s in sources if s in entry.errors})
        for key, entry in table.sites.items()
    }
    tables.add(path, dataclasses.replace(table, sites=entries))


def _effects(
    run: Run, state: TrainState, max_batches: int, say: Callable[[str], None]
) -> dict[str, Interval]:
    """Returns the relative effect of an FP8 forward product on the loss, by path."""
    effects = sensitivity(run, state, max_batches)
    relative = {path: x.rise for path, x in effects.items() if path != ALL}
    for path in [path for path, x in relative.items() if not all(map(isfinite, x))]:
        say(f"{path}: its effect on the loss is not finite and was left out")
        del relative[path]
    return relative


def _old_table(path: pathlib.Path) -> Table | None:
    """Returns the table in the file, or None if the file does not exist.

    Raises:
        ValueError: if it is not a table for this device and these kernels.
    """
    if not path.exists():
        return None
    table = tables.read(path)
    why_not = table.header.why_not(header_here())
    if why_not is not None:
        raise ValueError(
            f"{path} is not valid here ({why_not}): name another file with --table."
        )
    return table


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""

    def command() -> int:
        config, options = parse_with(
            arguments, "tune.py", tune=TuneConfig(), table=pathlib.Path("table.json")
        )
        return tune(config, options["tune"], options["table"], arguments)

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
