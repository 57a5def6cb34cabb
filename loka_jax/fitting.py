"""Training from Python: what `loka train --config table` does, and the run it leaves.

run = loka_jax.fit("logs/", label="click", model="dcnv2", test="tuesday.parquet")
run.evaluate(frame)  # labelled rows: AUC, log loss, NE, calibration
run.predict(frame)  # scores
"""

import dataclasses
import functools
import hashlib
import html
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
from pyarrow import dataset, parquet

from loka_jax import jsonfile, named
from loka_jax.cache_folder import cache_folder
from loka_jax.export import Exported, export_run
from loka_jax.options import did_you_mean
from loka_jax.predict import Predictor, evaluate_files, load
from loka_jax.terminal import one_line
from loka_jax.train.config import Config
from loka_jax.train.folder.record import REPORT, SITES, SUMMARY
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

    @functools.cached_property
    def sites(self) -> list[dict[str, Any]]:
        """Every matrix product: its size, what runs there, and why not FP8."""
        sites: Any = jsonfile.read(self.workdir / SITES)
        return sites

    def report(self) -> pathlib.Path:
        """Returns the page of the run; in a notebook, show it by `_repr_html_`."""
        return self.workdir / REPORT

    def _repr_html_(self) -> str:
        page = html.escape(self.report().read_text("utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="600"></iframe>'

    def export(self, path: str | os.PathLike, **options: Any) -> Exported:
        """Writes the model to a folder that needs jax alone; see `export_run`."""
        return export_run(self.workdir, pathlib.Path(path), **options)

    def predict(self, rows: Any) -> np.ndarray:
        """Returns the click probability of each row, see `Predictor.scores`."""
        return self.predictor.scores(rows)

    def evaluate(self, data: Any, **options: Any) -> dict[str, Any]:
        """Returns AUC, log loss, NE and calibration on labelled rows, by label.

        Args:
            data: as of `fit`.
            **options: `where`, `by`, `within` and `k` of
                `loka_jax.predict.evaluate_files`; with `by`, the numbers of each value
                are under `groups`.
        """
        found = evaluate_files(self.predictor, as_files(data), **options)
        return found.overall | ({"groups": found.groups} if found.groups else {})


def fit(
    data: Any,
    *,
    label: str | Sequence[str] | None = None,
    model: Any = "dlrm",
    valid: Any = None,
    test: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> FittedRun:
    """Trains a model on a table, as `loka train --config table` does.

    Args:
        data: paths, folders, globs or addresses; or a data frame of pandas or Polars, a
            pyarrow table or dataset, a dataset of Hugging Face, a dict of columns, or
            an iterator of such tables, which are kept in the cache.
        label: the label column, or several; inferred if None.
        model: `dlrm`, `dcnv2`, `wukong`, `dhen` or `mmoe`; or one of your own: a Linen
            module, a class of Linen or NNX, `functools.partial(Class, width=64)`, or
            "module:Name" of the class, see `loka_jax.models.OwnModel`.
        valid: the validation rows, like `data`, or as in "dt=2026-11-13"; if None, the
            last tenth by time, or a tenth.
        test: the rows of the final evaluation, likewise; if None, the validation rows.
        loss: a function of your own, or "module:function", see
            `loka_jax.train.own_functions`; the log loss if None.
        metrics: such functions by name, which evaluations measure, too.
        settings: values of options by their names on the command line without dashes,
            such as {"loop.epochs": 3, "data.dense": ("price",), "workdir": "runs/one"}.

    Raises:
        ValueError: one sentence with the file, column or option, and the remedy.
        KeyboardInterrupt: if the run was stopped, after it was saved.
    """
    console = standard_output()
    own = dict(settings or {})
    splits = {"path": data, "valid": valid, "test": test}
    for name, rows in splits.items():
        if rows is not None:
            own[f"data.{name}"] = as_files(rows)
    if label is not None:
        name = "data.label" if isinstance(label, str) else "data.labels"
        own[name] = label
    if loss is not None:
        own["optim.loss"] = _kept("the loss", loss)
    if metrics is not None:
        kept = [f"{k}={_kept(f'the metric {k}', f)}" for k, f in metrics.items()]
        own["metrics"] = tuple(kept)
    config = changed(table_config(model), own)
    by_data = settings_for(config, console.print)
    own["data.transform"] = by_data.data.transform  # those named, and others
    config = changed(by_data, own)
    done = train(config, ["--config", "config.json"], console)
    if done.exit_code:
        raise KeyboardInterrupt
    assert done.workdir is not None
    return FittedRun(done.workdir)


def _kept(what: str, function: Any) -> str:
    """Returns the name by which a run keeps a function."""
    return function if isinstance(function, str) else named.name_of(what, function)


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns a configuration with other values of options.

    Raises:
        ValueError: for a name that is no option, or a value of another type.
    """
    for name, value in settings.items():
        config = _with(config, name, field_of(config, name).split("."), value)
    return config


def field_of(config: Config, name: str) -> str:
    """Returns the field that an option sets: those of model and run have no prefix.

    Raises:
        ValueError: for a name that is no option.
    """
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
    raise ValueError(f"there is no option {name!r}{hint}: see loka train --help.")


def _names(owner: Any, group: str | None = None) -> list[str]:
    owner = owner if group is None else getattr(owner, group)
    return [field.name for field in dataclasses.fields(owner)]


def _with(owner: Any, option: str, parts: list[str], value: Any) -> Any:
    name, *rest = parts
    if rest:
        value = _with(getattr(owner, name), option, rest, value)
    elif not dataclasses.is_dataclass(value):
        try:
            value = jsonfile.typed(value, get_type_hints(type(owner))[name])
        except ValueError as error:
            raise ValueError(f"the option {option!r}: {error}") from None
    return dataclasses.replace(owner, **{name: value})


def _tables(data: Any) -> Iterator[pa.Table]:
    """Yields the tables that data are made of."""
    if isinstance(data, dataset.Dataset):
        yield from (pa.Table.from_batches([batch]) for batch in data.to_batches())
    elif hasattr(data, "with_format"):  # of Hugging Face
        yield data.with_format("arrow")[:]
    elif isinstance(data, Iterator):
        for part in data:
            yield from _tables(part)
    else:
        try:
            yield data if isinstance(data, pa.Table) else pa.table(data)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"the data are neither paths nor a table ({one_line(error)}): give "
                "paths, a data frame, a pyarrow table or dataset, a dataset of Hugging "
                "Face, a dict of columns, or an iterator of such tables."
            ) from None


def _write(tables: Iterator[pa.Table], file: Any) -> None:
    """Writes tables of the same columns, one at a time, as Parquet."""
    first = next(tables, None)
    if first is None:
        raise ValueError("the data are an iterator without tables: give some rows.")
    with parquet.ParquetWriter(file, first.schema) as writer:
        for number, table in enumerate(itertools.chain([first], tables), 1):
            try:
                writer.write_table(table.select(first.column_names).cast(first.schema))
            except (KeyError, ValueError, pa.ArrowException) as error:
                raise ValueError(
                    f"table {number} of the data has not the columns of the first one "
                    f"({one_line(error)}): give tables of the same columns and types."
                ) from None


def as_files(data: Any) -> str | tuple[str, ...]:
    """Returns the paths of data; rows in memory are written to the cache.

    Raises:
        ValueError: for what is neither paths nor a table.
    """
    if isinstance(data, str | os.PathLike):
        return str(data)
    if isinstance(data, list | tuple) and all(isinstance(x, str) for x in data):
        return tuple(data)
    folder = cache_folder("tables")
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        try:
            _write(_tables(data), file)
        except BaseException:  # even Ctrl-C must leave no part of a file
            os.unlink(file.name)
            raise
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
