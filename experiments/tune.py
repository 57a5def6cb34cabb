"""Measures the candidates of a model's sites, and writes the dispatch table.

    python experiments/tune.py --config fp8_dlrm --table table.json

Trains, or goes on with what the workdir holds, while Probe observes every site; then
measures every candidate at every site, on operands drawn from what was learned, in a
process of its own. What the table holds already stays: times are not taken again, and
of this model only the errors are measured; name a new file to measure all of it anew.
Options are those of train.py, `--table` and `--tune.*`. `train.py --plan table.json`
follows the table.

Exit codes: as of train.py.
"""

import pathlib
import sys

from experiments.cli import parse_with, run_cli
from experiments.probe import observed
from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.table import BadTable, Table, header_here
from loka_jax.dispatch.tuning import TuneConfig
from loka_jax.dispatch.tuning import tune as measure
from loka_jax.measure.intervals import Interval
from loka_jax.survey.sensitivity import ALL, sensitivity
from loka_jax.train.build import Run
from loka_jax.train.config import Config
from loka_jax.train.session import standard_output, train
from loka_jax.train.state import TrainState

_LOSS_RECIPE = "fp8_tensorwise"  # whose effect on the loss is measured


def tune(
    config: Config, options: TuneConfig, path: pathlib.Path, arguments: list[str]
) -> int:
    """Trains, measures, writes the table; returns the exit code."""
    console = standard_output()
    _old_table(path)  # a bad one is better refused now than after the training
    done = train(observed(config), arguments, console, script="tune.py")
    if done.exit_code or done.run is None:
        return done.exit_code
    assert done.state is not None
    run, known = done.run, nn.by_path(done.state.probe)
    old = _old_table(path)
    measured = measure(
        run.config.name,
        run.sites,
        known,
        options,
        effects=_effects(run, done.state, options.held_out_batches),
        timed=[] if old is None else [k for k, one in old.sites.items() if one.times],
        say=console.print,
    )
    # After every site, for measuring all of them can take long.
    for found in measured:
        old = _old_table(path)
        tables.write(path, found if old is None else old.merged(found))
    console.print(f"Table: {path}")
    return 0


def _effects(run: Run, state: TrainState, max_batches: int) -> dict[str, Interval]:
    """Returns by path what FP8 in the forward product does to the loss, relative."""
    found = sensitivity(run, state, recipe=_LOSS_RECIPE, max_batches=max_batches)
    return {
        path: Interval(*(one[name] / one["loss"] for name in ("change", "low", "high")))
        for path, one in found.items()
        if path != ALL
    }


def _old_table(path: pathlib.Path) -> Table | None:
    """Returns the table that is to be added to, None if there is none yet.

    Raises:
        ValueError: if it is no table, or not one for this device and these kernels.
    """
    if not path.exists():
        return None
    try:
        table = tables.read(path)
    except BadTable as error:
        raise ValueError(f"{error} Name another file by --table.") from None
    why_not = table.header.why_not(header_here())
    if why_not is not None:
        raise ValueError(f"{path} does not hold here: {why_not}. Name another file.")
    return table


def main(argv: list[str] | None = None) -> int:
    """Does as the command line says and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv

    def command() -> int:
        config, options = parse_with(
            arguments, "tune.py", tune=TuneConfig(), table=pathlib.Path("table.json")
        )
        return tune(config, options["tune"], options["table"], arguments)

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main())
