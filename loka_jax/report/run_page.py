"""The page of a training run: its metrics, its sites, the command to repeat it.

The files of a run can be incomplete, broken or edited: a value of an unexpected type is
shown as absent.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from loka_jax.jsonfile import as_dict
from loka_jax.recipe import OPERANDS, ROLES
from loka_jax.report import charts
from loka_jax.report.charts import Figure, Series
from loka_jax.report.render import dicts, flat, items, number, real, texts, write_page
from loka_jax.report.run_files import RunFiles, final_of, points, speed_of, thin
from loka_jax.terminal import KIND_WORDS

_FP8_WORDS = ("fp8", "e4m3", "e5m2")
_KINDS = ("missing", "nan", "inf", "negative", "huge", "oov")  # of data values
_MAX_COLUMNS = 100  # of a data set, shown by name
_LEAST_GAP = 1e-6  # between the best NE and 1; less is rounding
_NOTES = ("returns", "warnings")  # of the summary
_MAX_MARKS = 100  # of skipped steps, in a chart
_MAX_LINES = 20  # of the training log, shown as numbers; fewer than twice as many


def write_run_page(path: Path, run: RunFiles) -> Path:
    """Writes the page of a run to `path` and returns the path."""
    summary = run.summary
    versions = as_dict(summary.get("versions"))
    skipped, marks = _skipped_steps(run)
    split, evals = _most_frequent_split(run.evals)
    final, final_split, where = final_of(run)
    best = real(summary.get("best_possible_ne"))
    return write_page(
        path,
        "run.html",
        title=str(run.config.get("name") or path.parent.resolve().name),
        is_finished=bool(summary) and summary.get("finished") is not False,
        summary=summary,
        last=(run.train or run.evals or [{}])[-1],
        gradients=as_dict(summary.get("gradients")),
        versions=versions,
        seed=summary.get("seed", run.config.get("seed")),
        notes=[
            *run.damage,
            *run.notes,
            *(x for k in _NOTES for x in texts(summary.get(k))),
        ],
        final=final,
        tasks={k: as_dict(task) for k, task in as_dict(final.get("tasks")).items()},
        own_metrics=_own_metrics(final),
        importance=run.importance[:_MAX_COLUMNS],
        before=as_dict(final.get("uncalibrated")),
        calibrations=_calibrations(as_dict(final.get("uncalibrated"))),
        final_split=final_split,
        where=where,
        best=best,
        regression=real(as_dict(summary.get("baseline_ne")).get("logistic_regression")),
        gap=gap_closed(final.get("ne"), best),
        speed=speed_of(run),
        recipe=_recipe(run) or "",
        fp8_sites=_fp8_sites(run),
        skipped=skipped,
        split=split,
        figures=_figures(run, split, evals, thin(marks, _MAX_MARKS)),
        evals=run.evals,
        train=thin(run.train, _MAX_LINES),
        days=dicts(summary.get("days")),
        day_figures=_day_figures(dicts(summary.get("days"))),
        breakdowns=_breakdowns(run.evaluation),
        roles=ROLES,
        sites=run.sites,
        is_fp8=_is_fp8,
        plan=dicts(summary.get("plan")),
        changes=texts(summary.get("changes")),
        scales=_scales(run.scales),
        data=_data(as_dict(summary.get("data")), as_dict(run.config.get("embedding"))),
        command=summary.get("command"),
        settings={"Config": flat(run.config), "Versions": flat(versions)},
    )


def _recipe(run: RunFiles) -> object:
    model = as_dict(run.config.get("model"))
    return run.summary.get("recipe") or model.get("recipe") or run.config.get("recipe")


def _fp8_sites(run: RunFiles) -> tuple[int, int]:
    """Returns how many sites are in FP8, and how many there are."""
    counts = as_dict(run.summary.get("sites"))
    total, fp8 = real(counts.get("total")), real(counts.get("fp8"))
    if total is not None and fp8 is not None:
        return int(fp8), int(total)
    return sum(not site.get("why_not") for site in run.sites), len(run.sites)


def gap_closed(ne: object, best: object) -> float | None:
    """Returns (1 - NE) / (1 - best possible NE): 0 is the mean, 1 the best model.

    None if one of them is no number, or there is nothing to learn: best is 1.
    """
    ne, best = real(ne), real(best)
    if ne is None or best is None or 1 - best < _LEAST_GAP:
        return None
    return (1 - ne) / (1 - best)


def _figures(
    run: RunFiles, split: str, evals: list[dict[str, Any]], marks: list[float]
) -> list[Figure]:
    """Returns the learning curves."""

    def training(name: str, label: str = "train", color: str = "accent") -> Series:
        return Series(label, points(run.train, name), color)

    def both(train: str, evaluated: str) -> list[Series]:
        return [training(train), Series(split, points(evals, evaluated), "second")]

    floor = real(run.summary.get("best_possible_ne"))
    rate = [training("examples_per_second")]
    memory = [training("host_bytes", "host")]
    memory += [training("device_peak_bytes", "device peak", "second")]
    return [
        *charts.curves("Log loss", both("loss", "logloss"), marks=marks),
        *charts.curves("Normalized entropy", both("ne", "ne"), floor=floor),
        *charts.curves("AUC", both("auc", "auc")),
        *charts.curves("Learning rate", [training("lr")], from_zero=True),
        *charts.curves("Gradient norm", [training("grad_norm")], marks=marks),
        *charts.curves("Examples per second", rate, from_zero=True),
        *charts.curves("Memory in bytes", memory, from_zero=True),
    ]


def _day_figures(days: list[dict[str, Any]]) -> list[Figure]:
    """Returns NE by day, each scored before training on it."""
    nes = [(float(i), real(day.get("ne"))) for i, day in enumerate(days, start=1)]
    line = Series("before training on the day", nes, "second")
    return charts.curves("Normalized entropy by day", [line], x="day")


def _breakdowns(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what the page shows of evaluation.json, for each label that has some."""
    split = str(evaluation.get("split") or "evaluation")
    parts = {split: evaluation} | {
        f"{split}, {name}": as_dict(part)
        for name, part in as_dict(evaluation.get("tasks")).items()
    }
    views = []
    for caption, part in parts.items():
        bins = dicts(part.get("calibration_curve"))
        columns = [
            column | {"values": dicts(column.get("values"))}
            for column in dicts(part.get("columns"))
        ]
        if bins or columns:
            views.append(
                {
                    "what": caption,
                    "examples": part.get("examples"),
                    "figures": _calibration(bins, caption),
                    "bins": bins,
                    "columns": columns[:_MAX_COLUMNS],
                    "hidden": max(len(columns) - _MAX_COLUMNS, 0),
                }
            )
    return views


def _calibration(bins: list[dict[str, Any]], caption: str) -> list[Figure]:
    names = ("mean_prediction", "mean_label", "mean_label_low", "mean_label_high")
    rows = [tuple(real(part.get(name)) for name in names) for part in bins]
    title, x, y = "Calibration by prediction", "mean prediction", "mean label"
    return charts.scatter(title, [Series(caption, rows, "accent")], x, y)


def _own_metrics(final: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a user's own metrics, by name and task."""
    own = as_dict(final.get("metrics"))
    for task, part in as_dict(final.get("tasks")).items():
        numbers = as_dict(as_dict(part).get("metrics"))
        own |= {f"{name}, {task}": x for name, x in numbers.items()}
    return own


def _calibrations(before: dict[str, Any]) -> list[str]:
    """Returns the calibration of each task, by its name if there are several."""
    tasks = {f"{k} ": as_dict(x) for k, x in as_dict(before.get("tasks")).items()}
    parts = (tasks or {"": before}).items()
    return [f"{name}{number(part.get('calibration'), '.4f')}" for name, part in parts]


def _most_frequent_split(evals: list[dict]) -> tuple[str, list[dict]]:
    """Returns the split that was evaluated most often, and its lines."""
    splits = [str(line.get("split") or "evaluation") for line in evals]
    (name, _), *_ = Counter(splits).most_common(1) or [("evaluation", 0)]
    pairs = zip(evals, splits, strict=True)
    return name, [line for line, split in pairs if split == name]


def _skipped_steps(run: RunFiles) -> tuple[float, list[float]]:
    """Returns the number of skipped steps, and the examples seen at each."""
    places, before = [], 0.0
    for line in run.train:
        count = real(line.get("skipped_steps")) or 0.0
        if count > before and (x := real(line.get("examples"))) is not None:
            places.append(x)
        before = max(before, count)
    total = real(run.summary.get("skipped_steps"))
    return (before if total is None else total), places


def _is_fp8(text: object) -> bool:
    """Returns whether the description of a role says that it is in FP8."""
    return any(word in str(text).lower() for word in _FP8_WORDS)


def _scales(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the scales of each site and operand over time."""
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    sites: dict[str, dict[str, list[float | None]]] = {}
    for name in names:
        site, _, operand = name.rpartition("/")
        values = [real(line.get(name)) for line in lines]
        sites.setdefault(site, {})[operand] = [
            x if x and x > 0 else None for x in values
        ]
    found = dict.fromkeys(operand for scales in sites.values() for operand in scales)
    operands = sorted(found, key=lambda operand: (*OPERANDS, operand).index(operand))
    steps = [line.get("step") for line in lines]
    return {"sites": sites, "operands": operands, "steps": steps}


def _data(data: dict[str, Any], embedding: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the examples, split rule, tables, values by policy, and bad rows."""
    if not data:
        return None
    splits = as_dict(data.get("splits"))
    counts = [_column_counts(name, as_dict(part)) for name, part in splits.items()]
    bad_rows = as_dict(data.get("bad_rows"))
    samples = dicts(bad_rows.get("samples"))
    heads = list(dict.fromkeys(name for row in samples for name in row))
    shown = {
        "split_rule": data.get("split_rule"),
        "notes": texts(data.get("notes")),
        "examples": as_dict(data.get("examples")),
        "splits": [part for part in counts if part["totals"]],
        "bad_rows": real(bad_rows.get("count")),
        "heads": heads,
        "samples": [[row.get(head) for head in heads] for row in samples],
        "categorical": _tables(as_dict(data.get("categorical")), embedding),
    }
    hidden = {*shown, "totals"}
    return shown | {"others": flat({k: data[k] for k in data if k not in hidden})}


def _tables(columns: dict[str, Any], embedding: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each categorical column: its table and what is in it."""
    entries = (text.rpartition("=") for text in texts(embedding.get("dims")))
    own = {n: int(dim) for n, _, dim in entries if re.fullmatch("[0-9]{1,4}", dim)}
    rows = []
    for name, value in list(columns.items())[:_MAX_COLUMNS]:
        facts, dim = as_dict(value), real(own.get(name, embedding.get("dim")))
        num_rows, is_own = real(facts.get("rows")), "table_of" not in facts
        row = {"column": name, "values": facts.get("values"), "rows": num_rows}
        row["parameters"] = num_rows * dim if num_rows and dim and is_own else None
        pairs = (items(pair) for pair in items(facts.get("most_frequent")))
        counted = (f"{p[0]} ({number(p[1])})" for p in pairs if len(p) == 2)
        row["top"] = ", ".join(counted)
        rows.append(row | {"warning": facts.get("warning")})
    return rows


def _column_counts(name: str, split: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of values of each kind in a split, in all and by column."""
    counts = {
        column: {kind: real(as_dict(found).get(kind)) or 0 for kind in _KINDS}
        for column, found in as_dict(split.get("columns")).items()
    }
    totals = {kind: sum(column[kind] for column in counts.values()) for kind in _KINDS}
    totals = {kind: total for kind, total in totals.items() if total}
    return {
        "split": name,
        "totals": totals,
        "heads": [KIND_WORDS.get(kind, kind) for kind in totals],
        "columns": dict(list(counts.items())[:_MAX_COLUMNS]),
        "hidden": max(len(counts) - _MAX_COLUMNS, 0),
    }
