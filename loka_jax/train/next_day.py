"""A run that goes on from another one, with the data of a later day.

It starts from the weights, FP8 scales and optimizer states that the other run's final
evaluation judged, and encodes its data as that run does. Steps, schedules and metrics
start anew. Its rows are scored before it is trained on them: progressive evaluation,
which judges a model by rows that no training has seen.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from loka_jax import jsonfile
from loka_jax.train.build import Run
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.config import Config
from loka_jax.train.evaluation import quality
from loka_jax.train.folder.source_run import SourceRun, open_run, read_config_of
from loka_jax.train.logs.printing import plain, quality_text
from loka_jax.train.loop import Loop
from loka_jax.train.state import TrainState
from loka_jax.train.watch.host_state import Progress

_CARRIED = ("params", "fp8", "batch_stats", "opt_state", "table", "row_state")
# What decides the shapes of these, beside all of `model`.
_FIXED = (
    *("embedding.dim", "embedding.dims", "embedding.dtype"),
    *("optim.dense", "optim.rows", "optim.clip_norm"),
)


def default_config(workdir: pathlib.Path) -> Config:
    """Returns the configuration of a run without its files, to go on with others.

    Raises:
        ValueError: if the folder holds no run.
    """
    config = read_config_of(workdir)
    data = dataclasses.replace(config.data, path=None, valid=None, test=None)
    return dataclasses.replace(config, data=data, init_from=workdir)


def source_of(config: Config) -> SourceRun | None:
    """Returns the run that `--init-from` names, or None.

    Raises:
        ValueError: if it holds no checkpoint, or that of another model or optimizer.
    """
    if config.init_from is None:
        return None
    source = open_run(config.init_from, best=True)
    pairs = jsonfile.explain_mismatch(source.config.identity(), config.identity())
    fixed = ("model.", *(f"{field}: " for field in _FIXED))
    changed = [line for line in pairs if line.startswith(fixed)]
    if changed:
        raise ValueError(
            f"--init-from {config.init_from} is a run with another model or optimizer "
            f"({'; '.join(changed[:5])}): leave out these options, and --config."
        )
    return source


def initial_state(run: Run, source: SourceRun) -> TrainState:
    """Returns the state before the first step of a run that goes on from another.

    The counters of schedules start anew; those of Adam's moments go on.
    """

    def fresh() -> dict[str, Any]:
        state = vars(run.init())
        return {name: value for name, value in state.items() if name not in _CARRIED}

    template = run.template()
    state = read_state(
        source.checkpoints,
        source.saved.only(_CARRIED),
        {name: template[name] for name in _CARRIED},
        run.placement.layout,
    )
    state["opt_state"] = _restarted(state["opt_state"])
    return TrainState(**state, **jax.jit(fresh)())  # makes no second table


def _restarted(opt_state: Any) -> Any:
    def is_schedule(node: object) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def restart(node: Any) -> Any:
        if not is_schedule(node):
            return node
        return node._replace(count=jnp.zeros_like(node.count))

    return jax.tree.map(restart, opt_state, is_leaf=is_schedule)


def begin(loop: Loop, source: SourceRun, console: Console):
    """Scores the rows that a run will be trained on, for its progress and console."""
    run, train = loop.run, loop.run.splits.train
    step = f"step {source.saved.step:,} of {source.workdir}"
    console.print(plain(f"Going on from {step}."))
    before = Progress.from_json(source.saved.meta.get("progress", {})).days
    paths = run.config.data.paths
    name = ", ".join(pathlib.PurePath(path).name for path in paths)
    day = {"data": name, "examples": train.num_examples}
    day |= quality(run, loop.state, train)
    loop.progress = dataclasses.replace(loop.progress, days=(*before, day))
    for day in loop.progress.days:  # newest last
        scored = f"{day['data']} ({day['examples']:,} rows): {quality_text(day)}"
        console.print(plain(f"Before training on {scored}"))
