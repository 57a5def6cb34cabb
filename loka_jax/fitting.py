"""Training from Python: what `loka train --config table` does, and the run it leaves.

run = loka_jax.fit("logs/", label="click", model="dcnv2", test="tuesday.parquet")
run.evaluate(frame)  # labelled rows: AUC, log loss, NE, calibration
run.predict(frame)  # scores
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from rich.console import Console

from loka_jax import jsonfile
from loka_jax.cache_folder import cache_folder
from loka_jax.options import did_you_mean
from loka_jax.predict import Predictor, evaluate_files, load
from loka_jax.terminal import one_line
from loka_jax.train.config import Config
from loka_jax.train.folder.record import SUMMARY
from loka_jax.train.session import standard_output, train
from loka_jax.train.settings import settings_for, table_config

_KEPT = 1 << 20  # bytes of a file that are hashed at once


@dataclasses.dataclass(frozen=True)
class FittedRun:
    """A run that was trained; all of it is in its folder.

    Attributes:
        workdir: the folder, with `report.html`.
    """

    workdir: pathlib.Path

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """The run in numbers, as in `summary.json`."""
        return jsonfile.as_dict(jsonfile.read(self.workdir / SUMMARY))

    @functools.cached_property
    def predictor(self) -> Predictor:
        """The trained model, see `loka_jax.load`."""
        return load(self.workdir)

    def predict(self, rows: Any) -> np.ndarray:
        """Returns the click probability of each row, see `Predictor.scores`."""
        return self.predictor.scores(rows)

    def evaluate(self, data: Any, **options: Any) -> dict[str, Any]:
        """Returns AUC, log loss, NE and calibration on labelled rows, by label.

        Args:
            data: as of `fit`.
            **options: `where` and `by` of `loka_jax.predict.evaluate_files`; with `by`,
                the numbers of each value are under `groups`.
        """
        found = evaluate_files(self.predictor, as_files(data), **options)
        return found.overall | ({"groups": found.groups} if found.groups else {})


def fit(
    data: Any,
    *,
    label: str | Sequence[str] | None = None,
    model: str = "dlrm",
    valid: Any = None,
    test: Any = None,
    workdir: str | os.PathLike | None = None,
    settings: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> FittedRun:
    """Trains a model on a table, as `loka train --config table` does.

    Args:
        data: paths, folders, globs or addresses; or a data frame of pandas or Polars, a
            pyarrow table, or a dict of columns, which are kept in the cache.
        label: the label column, or several; inferred if None.
        model: `dlrm`, `dcnv2`, `wukong`, `dhen` or `mmoe`.
        valid: the validation rows, like `data`, or as in "dt=2026-11-13"; if None, the
            last tenth by time, or a tenth.
        test: the rows of the final evaluation, likewise; if None, the validation rows.
        workdir: the new folder of the run; if None, one under `runs/`.
        settings: values of options by their names on the command line without dashes,
            such as {"loop.epochs": 3, "data.dense": ("price",), "seed": 1}.
        console: where progress is printed; the standard output if None.

    Raises:
        ValueError: one sentence with the file, column or option, and the remedy.
        KeyboardInterrupt: if the run was stopped, after it was saved.
    """
    console = console or standard_output()
    own = dict(settings or {})
    splits = {"path": data, "valid": valid, "test": test}
    for name, rows in splits.items():
        if rows is not None:
            own[f"data.{name}"] = as_files(rows)
    if label is not None:
        name = "data.label" if isinstance(label, str) else "data.labels"
        own[name] = label if isinstance(label, str) else tuple(label)
    if workdir is not None:
        own["workdir"] = pathlib.Path(workdir)
    config = changed(table_config(model), own)
    config = changed(settings_for(config, console.print), own)
    done = train(config, ["--config", "config.json"], console)
    if done.exit_code:
        raise KeyboardInterrupt
    assert done.workdir is not None
    return FittedRun(done.workdir)


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns a configuration with other values of options.

    Raises:
        ValueError: for a name that is no option.
    """
    for name, value in settings.items():
        config = _with(config, _place(config, name).split("."), value)
    return config


def _place(config: Config, name: str) -> str:
    """Returns the field that an option sets: those of model and run have no prefix."""
    parts = name.replace("-", "_").split(".")
    for group in ("", "model", "run"):
        owner: Any = config
        *groups, last = [group, *parts] if group else parts
        for step in groups:
            owner = getattr(owner, step, None)
        if dataclasses.is_dataclass(owner) and last in _names(owner):
            return ".".join([*groups, last])
    known = [f"{g}.{x}" for g in ("data", "optim", "loop") for x in _names(config, g)]
    hint = did_you_mean(name, [*known, *_names(config, "model")])
    raise ValueError(f"there is no option {name!r}: {hint}See loka train --help.")


def _names(owner: Any, group: str | None = None) -> list[str]:
    owner = owner if group is None else getattr(owner, group)
    return [field.name for field in dataclasses.fields(owner)]


def _with(owner: Any, parts: list[str], value: Any) -> Any:
    name, *rest = parts
    value = _with(getattr(owner, name), rest, value) if rest else value
    return dataclasses.replace(owner, **{name: value})


def as_files(data: Any) -> str | tuple[str, ...]:
    """Returns the paths of data; rows in memory are written to the cache.

    Raises:
        ValueError: for what is neither paths nor a table.
    """
    if isinstance(data, str | os.PathLike):
        return str(data)
    if isinstance(data, list | tuple) and all(isinstance(x, str) for x in data):
        return tuple(data)
    try:
        table = data if isinstance(data, pa.Table) else pa.table(data)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"the data are neither paths nor a table ({one_line(error)}): give paths, "
            "a data frame, a pyarrow table, or a dict of columns."
        ) from None
    folder = cache_folder("tables")
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        parquet.write_table(table, file)
    digest = hashlib.sha256()
    with open(file.name, "rb") as written:
        while part := written.read(_KEPT):
            digest.update(part)
    path = folder / f"{digest.hexdigest()[:32]}.parquet"
    if path.exists():  # so that its time of writing stays
        os.unlink(file.name)
    else:
        os.replace(file.name, path)
    return str(path)
