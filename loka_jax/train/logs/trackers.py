"""Where the numbers of a run go besides its folder, by `--track`.

    tensorboard   events in the run's folder
    mlflow        MLFLOW_TRACKING_URI, or MLflow's local store
    wandb         files in the run's folder, or with WANDB_MODE=online the server of W&B

A resumed run goes on in the same run of a tracker. One that fails while a run trains is
left out, which is said; all numbers are in metrics.jsonl, too.
"""

import importlib.util
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loka_jax import jsonfile
from loka_jax.options import require
from loka_jax.report.render import flat, real
from loka_jax.terminal import one_line

_OF_ALL = "loka_jax"  # the experiment, or project, if the environment names none
type Config = Mapping[str, Any]


class Tracker(NamedTuple):
    """Takes numbers by name and their step; ends, well or not, for now or for good."""

    log: Callable[[Mapping[str, float], int], object]
    close: Callable[[bool], object]


def _tensorboard(workdir: Path, config: Config, step: int) -> Tracker:
    import tensorboardX

    folder = str(workdir / "tensorboard")
    events = tensorboardX.SummaryWriter(folder, purge_step=step + 1, write_to_disk=True)

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            events.add_scalar(name, value, step)

    return Tracker(log, lambda _: events.close())


def _mlflow(workdir: Path, config: Config, step: int) -> Tracker:
    import mlflow
    from mlflow.entities import Metric, Param

    for name in ("alembic", "mlflow"):  # they tell of the store that they make
        logging.getLogger(name).setLevel(logging.WARNING)
    own = os.environ.get("MLFLOW_EXPERIMENT_NAME", _OF_ALL)
    experiment = mlflow.set_experiment(own).experiment_id
    client = mlflow.MlflowClient()

    def begin() -> str:
        tags = {"workdir": str(workdir.resolve())}
        run = client.create_run(experiment, tags=tags, run_name=workdir.name).info
        params = [Param(k, str(v)) for k, v in flat(dict(config)).items()]
        client.log_batch(run.run_id, params=params)
        return run.run_id

    run = _kept(workdir / "mlflow.txt", begin)
    client.update_run(run, "RUNNING")

    def log(numbers: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        known = {re.sub(r"[^/\w.\- :]", "_", name): x for name, x in numbers.items()}
        client.log_batch(run, [Metric(k, x, now, step) for k, x in known.items()])

    ends = {True: "FINISHED", False: "FAILED"}
    return Tracker(log, lambda is_well: client.set_terminated(run, ends[is_well]))


def _wandb(workdir: Path, config: Config, step: int) -> Tracker:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _OF_ALL),
        name=workdir.name,
        id=_kept(workdir / "wandb.txt", lambda: secrets.token_hex(8)),
        resume="allow",
        mode=mode,
        dir=workdir,
        config=dict(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("*", step_metric="step")  # else W&B drops steps that come again
    return Tracker(
        lambda numbers, step: run.log({**numbers, "step": step}),
        lambda is_well: run.finish(exit_code=int(not is_well)),
    )


def _kept(path: Path, make: Callable[[], str]) -> str:
    """Returns the text of a file, which is made first if there is none."""
    if not path.exists():
        jsonfile.write_text(path, make())
    return path.read_text("utf-8")


_TRACKERS = {  # how each is opened, its library, and the extra that has it
    "tensorboard": (_tensorboard, "tensorboardX", "report"),
    "mlflow": (_mlflow, "mlflow", "mlflow"),
    "wandb": (_wandb, "wandb", "wandb"),
}


class Trackers:
    """The trackers of a run, by name; refuses those whose library is missing."""

    def __init__(self, names: tuple[str, ...], say: Callable[[str], None]):
        self._names, self._say = names, say  # what tells of one that fails
        self._open: dict[str, Tracker] = {}
        for name in names:
            require(
                name in _TRACKERS, "--track", name, f"one of {', '.join(_TRACKERS)}"
            )
            _, library, extra = _TRACKERS[name]
            if importlib.util.find_spec(library) is None:
                what = f"--track {name} needs {library}"
                raise ValueError(f"{what}: install loka-jax[{extra}].")

    def open(self, workdir: Path, config: Config, step: int) -> None:
        """Opens all, or again, for what comes after a step; refuses what cannot be."""
        self.close(True)
        for name in self._names:
            try:
                self._open[name] = _TRACKERS[name][0](workdir, config, step)
            except Exception as error:  # of a library, a store or a server
                raise ValueError(
                    f"--track {name} cannot begin ({one_line(error)}): see that its "
                    "store or server can be written to, or leave it out."
                ) from None

    def log(self, line: Mapping[str, Any]) -> None:
        """Takes a line with its step and kind, of which numbers are tracked."""
        values: Any = jsonfile.jsonable({k: v for k, v in line.items() if k != "step"})
        found = {name: real(value) for name, value in flat(values).items()}
        numbers = {f"{line['kind']}/{k}": x for k, x in found.items() if x is not None}
        self._each(lambda tracker: tracker.log(numbers, int(line["step"])))

    def close(self, is_well: bool) -> None:
        """Closes all; takes whether the run is well."""
        self._each(lambda tracker: tracker.close(is_well))
        self._open = {}

    def _each(self, use: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                use(tracker)
            except Exception as error:  # must not end the training
                del self._open[name]
                self._say(f"{name} failed and is left out: {one_line(error)}.")
