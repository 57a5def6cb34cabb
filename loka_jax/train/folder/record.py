"""The files of a run in its workdir, and the lock that excludes other runs.

    config.json     the resolved config, written first
    plan.json       the choices for the sites, if there are any
    metrics.jsonl   one line per logged step or evaluation
    scales.jsonl    one line of delayed scales per logged step, by site and operand
    amaxes.jsonl    one line of amaxes per logged step, likewise, where Probe observes,
                    and of its monitors, by site and monitor
    sites.json      what runs at each site, and why not FP8
    evaluation.json the final evaluation by predictions, and by values of columns
    scores.npy      logits, labels and weights of the examples behind it, by label if
                    there are several
    importance.json that of columns, where a later evaluation measured it
    calibration.json the line through which logits go, with `Config.calibrate`
    summary.json    the run in numbers, written last
    encoding/       what turns rows into the model's inputs, vocabularies among it
    checkpoints/    a folder for each saved step, named by its number
    best/           that of the best evaluation, with `OptimConfig.plateau_patience`
    tensorboard/, wandb/, mlflow.txt, wandb.txt
                    of trackers, if requested

Lines are written one by one, and a resumed run drops those after its checkpoint, so
that except for times and memory its files equal those of a run that was never stopped.
For that, log everything of a step before saving its checkpoint.
Versions and configs are recorded, environment variables are not.
"""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import loka_jax
from loka_jax import jsonfile, saved_format
from loka_jax.data.shards import ShardFolder
from loka_jax.jsonfile import as_dict
from loka_jax.options import option_of
from loka_jax.report.run_files import RunFiles
from loka_jax.saved_format import CHECKPOINTS, steps_in, without_key
from loka_jax.train.calibration import CALIBRATION
from loka_jax.train.folder import workdir as workdirs
from loka_jax.train.logs.trackers import Trackers
from loka_jax.train.scores import SCORES, Scores, breakdown, with_names, write_scores

METRICS, SCALES, AMAXES = "metrics.jsonl", "scales.jsonl", "amaxes.jsonl"
CONFIG, SITES, SUMMARY = "config.json", "sites.json", "summary.json"
PLAN = "plan.json"
BEST = "best"
EVALUATION, IMPORTANCE = "evaluation.json", "importance.json"
ENCODING, REPORT = "encoding", "report.html"
_PACKAGES = "jax jaxlib flax optax orbax-checkpoint numpy pyarrow jax-triton".split()


class RunRecord(contextlib.AbstractContextManager):
    """The record of one run, which locks its workdir until `close`.

    Usable in a `with` statement, which closes. The lock of a killed run ends with it.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        config: Mapping[str, Any],
        resume: bool = False,
        may_change: Collection[str] = (),
        trackers: Trackers | None = None,
        writes: bool = True,
    ):
        """Locks `workdir`, creating it if necessary; call `start` before logging.

        Args:
            may_change: dotted names of fields in which a resumed run's config may
                differ, such as the number of steps. A name covers those below it.
            trackers: what else takes the lines of metrics; None for nothing.
            writes: False in a process that is not the first of its run, whose record
                locks, writes and tracks nothing.

        Raises:
            ValueError: if the folder cannot be written to, another run has locked it,
                it holds a run and `resume` is False, or a run with another config.
        """
        self.workdir, self.writes = Path(workdir), writes
        self._config = config
        self._trackers = trackers or Trackers((), print)
        self._made: list[Path] = []
        self._lock = None
        if not writes:
            return
        folders = (self.workdir, *self.workdir.absolute().parents)
        # Innermost first; removed again if the run never starts.
        self._made = [folder for folder in folders if not folder.exists()]
        self._lock = workdirs.lock(self.workdir)
        try:
            _check_owner(self.workdir, config, resume, may_change)
        except BaseException:  # even Ctrl-C must not leave the folder locked
            self._lock.close()
            raise

    def __exit__(self, *error: object) -> None:
        """Closes the record."""
        self.close(is_well=error[0] is None)

    def start(self, step: int) -> None:
        """Writes config.json, and drops what a run after `step` or its end left."""
        self._made = []
        self.write(CONFIG, {saved_format.KEY: saved_format.RUN, **self._config})
        ends = (
            SUMMARY,
            EVALUATION,
            SCORES,
            CALIBRATION,
            IMPORTANCE,
        )  # this run has not ended
        for name in ends if self.writes else ():
            (self.workdir / name).unlink(missing_ok=True)
        self.truncate(step)

    def truncate(self, step: int) -> None:
        """Drops the lines after `step`, and an incomplete last line."""
        if self.writes:
            self._trackers.open(self.workdir, self._config, step)
        for name in (METRICS, SCALES, AMAXES) if self.writes else ():
            path = self.workdir / name
            if path.exists():
                lines = jsonfile.read_lines(path)
                kept = [line for line in lines if _step(line) <= step]
                text = "".join(jsonfile.dumps(line) + "\n" for line in kept)
                jsonfile.write_text(path, text)

    def log(self, line: Mapping[str, Any], name: str = METRICS) -> None:
        """Appends a line with its step to a file, that of metrics with its `kind`."""
        if not self.writes:
            return
        with open(self.workdir / name, "a", encoding="utf-8") as file:
            file.write(jsonfile.dumps(dict(line)) + "\n")
        if name == METRICS:
            self._trackers.log(line)

    def write(self, name: str, value: object) -> None:
        """Writes a JSON file of the workdir in one step."""
        if self.writes:
            jsonfile.write(self.workdir / name, value)

    def write_scores(
        self,
        scores: Mapping[str, Scores],
        split: str,
        columns: Sequence[str],
        encoding: ShardFolder | None = None,
    ) -> None:
        """Writes scores.npy, and the breakdown of these examples to evaluation.json.

        The scores are by label; the encoding has the names of the columns' values.
        """
        if not self.writes:
            return
        tasks = {name: breakdown(part, columns) for name, part in scores.items()}
        if encoding is not None:
            for parts in tasks.values():
                parts["columns"] = with_names(parts["columns"], encoding)
        (first, *others) = tasks.values()
        content = {"tasks": tasks} if others else first
        self.write(EVALUATION, {"split": split} | content)
        write_scores(self.workdir, scores)

    def track_final(self, values: Mapping[str, Any], step: int) -> None:
        """Gives trackers the final evaluation."""
        self._trackers.log({"kind": "final", "step": step, **values})

    def close(self, *, is_well: bool = True) -> None:
        """Unlocks the workdir; an unused new one is removed."""
        self._trackers.close(is_well)
        if self._made:
            workdirs.remove_unused(self.workdir, self._made)
        if self._lock is not None:
            self._lock.close()


def saved_config(workdir: Path) -> dict[str, Any]:
    """Returns the JSON values of a run's config.

    Raises:
        ValueError: if another version of loka_jax wrote them, or they are not JSON.
        OSError: if they cannot be read.
    """
    config = as_dict(jsonfile.read(workdir / CONFIG))
    saved_format.require_run(workdir, config.get(saved_format.KEY))
    return without_key(config)


def read_run(workdir: Path) -> RunFiles:
    """Returns the contents of a run's files, as far as they can be read.

    Raises:
        ValueError: if there is no run in `workdir`.
    """
    if workdir.is_file():
        raise ValueError(f"{workdir} is a file: give the --workdir of a run.")
    damage: list[str] = []
    notes: list[str] = []

    def read[T: (dict, list)](name: str, kind: type[T]) -> T:
        try:
            value = jsonfile.read(workdir / name)
        except FileNotFoundError:
            return kind()
        except ValueError:
            value = None
        if not isinstance(value, kind):
            damage.append(f"{name} is broken.")
            return kind()
        return value

    def read_lines(name: str) -> list[dict[str, Any]]:
        return jsonfile.read_lines(
            workdir / name,
            damage.append,
            max_bytes=jsonfile.MAX_LINES_BYTES,
            say_cut=notes.append,
        )

    summary, config = read(SUMMARY, dict), without_key(read(CONFIG, dict))
    lines = read_lines(METRICS)
    run = RunFiles(
        summary=summary,
        config=as_dict(summary.get("config")) or config,
        train=[line for line in lines if line.get("kind") == "train"],
        evals=[line for line in lines if line.get("kind") == "eval"],
        sites=[as_dict(site) for site in read(SITES, list)],
        scales=read_lines(SCALES),
        evaluation=read(EVALUATION, dict),
        importance=[as_dict(row) for row in read(IMPORTANCE, list)],
        damage=damage,
        notes=notes,
    )
    if not (run.summary or run.config or run.train or run.evals):
        raise ValueError(
            f"{workdir} holds no run ({METRICS} and {SUMMARY} are missing): give the "
            "--workdir of one."
        )
    return run


def _step(line: Mapping[str, Any]) -> int:
    """Returns the step of a line; 0, which is kept, if it has none."""
    step = line.get("step")
    return step if isinstance(step, int) else 0


def versions() -> dict[str, Any]:
    """Returns the versions of the packages that a run uses, and of its platform."""
    packages = {"loka_jax": loka_jax.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    device = jax.devices()[0]
    return packages | {
        "platform": device.platform,
        "platform_version": " ".join(device.client.platform_version.split()),
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _check_owner(
    workdir: Path, config: Mapping[str, Any], resume: bool, may_change: Collection[str]
) -> None:
    """Raises ValueError if `workdir` holds a run other than the one to resume."""
    path = workdir / CONFIG
    if not path.exists():
        if (left := _left_of_a_run(workdir)) is not None:
            raise ValueError(
                f"{workdir} holds {left} without {CONFIG}, so its run is unknown: "
                "choose another --workdir."
            )
        return
    if not resume:
        raise ValueError(
            f"{workdir} holds a run already: continue it with --resume, or choose "
            "another --workdir."
        )
    changed = [
        line.split(": ", 1)
        for line in jsonfile.explain_mismatch(saved_config(workdir), dict(config))
    ]
    refused = [
        f"{option_of(field)}: {values}"
        for field, values in changed
        if not any(f"{field}.".startswith(f"{name}.") for name in may_change)
    ]
    if refused:
        refused.sort(key=lambda line: ": not saved" in line)  # those given come first
        raise ValueError(
            f"{workdir} holds a run with other options ({'; '.join(refused[:5])}): "
            "leave these options out to go on as it began (--resume --workdir "
            f"{workdir}), or choose another --workdir."
        )


def _left_of_a_run(workdir: Path) -> str | None:
    """Returns the name of what a run saved in a folder, or None.

    `--resume` would take an older run's step if it is later than the new run's last.
    """
    for name in (CHECKPOINTS, BEST):
        if (workdir / name).is_dir() and steps_in(workdir / name):
            return name
    return METRICS if (workdir / METRICS).exists() else None
