"""Writes a trained model as a folder that needs jax alone.

model.json                what the model reads and returns, programs, digests
loader.py                 reads the folder: imports jax and numpy
programs/cuda_128.bin     one for each platform and batch size
weights.safetensors       weights of all programs, FP8 where plans say so, and tables
vocabulary.safetensors    the values of each column with a vocabulary
rows.py, sequences.py, transforms.py
                          from raw rows, and events, to inputs
vendor/                   flatbuffers, which jax reads programs with but lacks
"""

import collections
import dataclasses
import hashlib
import importlib.util
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from loka_jax import jsonfile
from loka_jax.data import Schema, sequences, transforms
from loka_jax.data.capacities import most_rows
from loka_jax.data.config import columns_of
from loka_jax.data.events import layout_of
from loka_jax.data.generated import schema_of
from loka_jax.data.planted_events import schema_of_events
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.saved_encoding import load_encoding
from loka_jax.data.shards import new_folder
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export import loader, rows
from loka_jax.export.encoding import Spec, inputs_as_given, inputs_of
from loka_jax.export.programs import (
    Form,
    PlanName,
    Platform,
    Program,
    evaluation_logits,
    make_form,
    make_program,
    plan_of,
    runs_here,
)
from loka_jax.options import require
from loka_jax.predict.trained import Trained, read_trained
from loka_jax.train.calibration import Calibration
from loka_jax.train.config import Config
from loka_jax.train.folder.record import versions
from loka_jax.train.folder.source_run import SourceRun, open_run
from loka_jax.train.model import candidate_layout, model_of

# With the run's own batch size, the default ones; those of events are rows.
_SMALL = (1, 16, 128, 1024)
_SMALL_OF_EVENTS = tuple(128 * 4**i for i in range(8))


class Exported(NamedTuple):
    """A written folder.

    Attributes:
        weight_bytes: bytes of the weights by dtype, without the tables.
        differences: by batch size, the largest difference between a program that runs
            here and the run's evaluation step with the same choices.
    """

    programs: list[Program]
    num_bytes: int
    weight_bytes: dict[str, int]
    differences: dict[int, float]


def export_run(
    workdir: pathlib.Path,
    out: pathlib.Path,
    *,
    batch_sizes: Sequence[int] = (),
    platforms: Sequence[Platform] = ("cpu", "cuda"),
    plan: PlanName = "auto",
) -> Exported:
    """Writes the model of a trained run to a new folder.

    Args:
        batch_sizes: rows of the programs; by default 1, 16, 128, 1,024 and the run's.
            Of an event log those of histories and candidates, by default 128, 512 and
            so on, and those of the run's batches.
        plan: "auto" lets Dispatch choose at each batch size on a GPU; "saved" keeps the
            run's plan; "off" runs all by XLA in the model's recipe.

    Raises:
        ValueError: if there is no whole run, or `out` exists.
    """
    _require_extra()
    source = open_run(workdir, best=True)
    schema, spec = _inputs_of(source)
    if not schema.fields:
        raise ValueError(
            f"{workdir} is a run without categorical columns, which cannot be "
            "exported: score files with predict, or train with one."
        )
    trained = read_trained(source, schema)
    sizes = _sizes(trained.config, schema, batch_sizes)
    sites = trained.model.list_sites(DispatchPlan())
    saved = plans.from_json(source.saved.meta["plan"], sites, "the checkpoint's plan")
    if source.config.data.is_log:
        own = model_of(source.config, schema, scores_candidates=True)
        trained = trained._replace(model=own)
    forms = (
        make_form(
            *(trained, name, size),
            plan_of(plan, saved, trained, (name, size)),
            by_xla=plan == "off",
        )
        for name in platforms
        for size in sizes
    )
    calibration = source.calibration()
    return write_model(trained, spec, forms, out, calibration=calibration)


def _inputs_of(source: SourceRun) -> tuple[Schema, Spec]:
    """Returns the columns of a run, and how its inputs are made of them."""
    data, encoding = source.config.data, None
    if source.saved.meta.get("encoding") is not None:
        encoding = load_encoding(source.encoding())
        schema = encoding.schema
    else:
        schema = schema_of_events(data) if data.is_log else schema_of(data)
    layout = candidate_layout(source.config, schema) if data.is_log else None
    if data.lists and not {*columns_of(data).labels} <= {*data.lists_of}:
        raise ValueError(
            f"{source.workdir} is a run on lists without labels, and an exported model "
            "tells events from candidates by their labels: score files with "
            "experiments/predict.py."
        )
    if encoding is None:
        return schema, inputs_as_given(schema, layout)
    return schema, inputs_of(encoding, layout)


def _sizes(config: Config, schema: Schema, asked: Sequence[int]) -> list[int]:
    """Returns the batch sizes of the programs, in rising order."""
    own, small, least, longest = config.loop.batch_size, _SMALL, 1, 1
    if config.data.is_log:
        layout, small = layout_of(config.data, schema), _SMALL_OF_EVENTS
        own, longest = most_rows(layout, own), layout.longest
        least = layout.contexts + 1
    sizes = sorted({*(asked or (*(x for x in small if x < own), own))})
    require(sizes[0] >= least, "--batch-sizes", sizes[0], f"{least} or more")
    if sizes[-1] < longest:
        raise ValueError(
            f"--batch-sizes {sizes[-1]} are fewer rows than the {longest} of the "
            "longest history and a candidate: name a larger one, too."
        )
    return sizes


def write_model(
    trained: Trained,
    spec: Spec,
    forms: Iterator[Form],
    out: pathlib.Path,
    *,
    calibration: Calibration | None = None,
) -> Exported:
    """Writes programs of a model to a new folder, and compares those that run here."""
    inputs, vocabulary = spec
    encoding, programs = rows.encoding_of(inputs, vocabulary, sequences, transforms), []
    weights: list[jax.Array] = []
    with new_folder(out, "--out") as partial:
        (partial / "programs").mkdir()
        for form in forms:
            program = make_program(trained, form, encoding, weights)
            (partial / _file(form)).write_bytes(program.content)
            programs.append(program)
            print(_line(program))
        tables = jax.tree.leaves(trained.state.table)
        names = [f"table_{i}" for i in range(len(tables))]
        arrays = {f"weight_{i}": x for i, x in enumerate(weights)}
        arrays |= dict(zip(names, tables, strict=True))
        _save(partial / "weights.safetensors", arrays)
        _save(partial / "vocabulary.safetensors", vocabulary)
        _copy_code(partial)
        description = {
            "format": loader.FORMAT,
            "name": trained.config.name,
            "step": trained.step,
            "made_with": versions(),
            "inputs": inputs,
            "outputs": list(trained.schema.labels),
            "calibration": calibration and dataclasses.asdict(calibration),
            "programs": [
                program.as_json() | {"file": _file(program.form), "tables": names}
                for program in programs
            ],
        }
        _describe(partial, description)
        differences = _differences(trained, encoding, partial, programs)
        num_bytes = sum(x.stat().st_size for x in partial.rglob("*") if x.is_file())
    by_dtype: collections.Counter[str] = collections.Counter()
    for x in weights:
        by_dtype[x.dtype.name] += x.nbytes
    return Exported(programs, num_bytes, by_dtype, differences)


def _require_extra():
    for name in ("flatbuffers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{name} is not installed, which writes exported models: pip install "
                "'loka-jax[export]'."
            )


def _save(path: pathlib.Path, arrays: Mapping[str, jax.Array | np.ndarray]):
    from safetensors.numpy import save_file  # an optional extra

    path.touch()
    mode = path.stat().st_mode  # by the umask; what follows lets its owner read alone
    save_file({k: np.asarray(x, order="C") for k, x in arrays.items()}, path)
    path.chmod(mode)


def _copy_code(folder: pathlib.Path):
    for module in (loader, rows, sequences, transforms):
        assert module.__file__ is not None
        shutil.copyfile(module.__file__, folder / pathlib.Path(module.__file__).name)
    spec = importlib.util.find_spec("flatbuffers")
    assert spec is not None and spec.origin is not None
    target = folder / "vendor" / "flatbuffers"
    target.mkdir(parents=True)
    for path in pathlib.Path(spec.origin).parent.glob("*.py"):
        shutil.copyfile(path, target / path.name)


def _describe(folder: pathlib.Path, description: dict[str, Any]):
    """Writes `model.json`, with the digests of all files and its own."""
    files = {}
    for path in sorted(x for x in folder.rglob("*") if x.is_file()):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(folder).as_posix()] = digest
    plain: Any = jsonfile.jsonable(description | {"files": files})
    jsonfile.write(folder / loader.MODEL, plain | {"digest": loader.digest_of(plain)})


def _differences(
    trained: Trained, encoding: rows.Encoding, folder: pathlib.Path, programs
) -> dict[int, float]:
    """Returns by batch size how far programs that run here are from evaluations."""
    here = [p.form for p in programs if runs_here(p.form.platform)]
    if not here:
        return {}
    model, differences = loader.load(folder), {}
    for form in here:
        size = form.batch_size
        if trained.schema.user is None:
            inputs = _random_inputs(encoding.blank(size), trained)
        else:
            inputs = _random_events(encoding, size, trained)
        logits = np.asarray(model.program(size)(inputs))
        errors = logits - evaluation_logits(trained, form, inputs)
        differences[form.batch_size] = float(np.max(np.abs(errors)))
    return differences


def _random_events(encoding: rows.Encoding, size: int, trained: Trained) -> rows.Inputs:
    """Returns random inputs of a program of so many rows: users' events, and others."""
    rng, schema = np.random.default_rng(0), trained.schema
    longest = len(schema.context) + 2 * 3 + 3  # of a user, interleaved
    users, events = max(size // longest, 1), 6 if size >= longest else 1
    records = np.zeros(users * events, record_dtype_of(schema))
    records["ids"] = rng.integers(0, schema.vocab_sizes, records["ids"].shape, np.int32)
    records["label"] = rng.integers(0, 2, records["label"].shape)
    records["user"], time = np.divmod(np.arange(len(records)), events)
    records["time"] = np.minimum(time, events // 2)
    records["label"][time >= events // 2] = np.nan  # candidates
    return next(iter(encoding.batches(records, (size,))))[1]


def _random_inputs(blank: rows.Inputs, trained: Trained) -> rows.Inputs:
    """Returns random inputs of the shapes of `blank`."""
    rng, sizes = np.random.default_rng(0), trained.schema.vocab_sizes
    single = blank.ids.shape[1]
    bags = tuple(
        (
            rng.integers(rows.PADDING, count, ids.shape, np.int32),
            None if weights is None else rng.random(weights.shape, np.float32),
        )
        for (ids, weights), count in zip(blank.bags, sizes[single:], strict=True)
    )
    return rows.Inputs(
        rng.standard_normal(blank.dense.shape, np.float32),
        rng.integers(0, sizes[:single], blank.ids.shape, np.int32),
        bags,
    )


def _file(form: Form) -> str:
    return f"programs/{form.platform}_{form.batch_size}.bin"


def _line(program: Program) -> str:
    form = program.form
    in_fp8 = sum("e4m3" in text or "fp8" in text for text in form.runs.values())
    text = (
        f"{form.platform} {form.batch_size:,}: {in_fp8} of {len(form.runs)} sites in "
        f"FP8, {len(program.content):,} bytes"
    )
    for path, why in form.twins.items():
        text += f"\n  {path} by XLA instead of {why}"
    return text
