"""The page of a training run: its metrics, its sites, the command to repeat it.

The files of a run can be incomplete, broken or edited: a value of an unexpected type is
shown as absent.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from loka_jax.commands import as_commands
from loka_jax.jsonfile import as_dict
from loka_jax.recipe import OPERANDS, ROLES
from loka_jax.report import charts
from loka_jax.report.charts import Figure, Series
from loka_jax.report.evaluation_views import breakdown_views, days_view
from loka_jax.report.render import Tile, dicts, flat, number, real, write_page
from loka_jax.report.run_files import RunFiles, final_of, points, thin

_FP8_WORDS = ("fp8", "e4m3", "e5m2")
_KINDS = ("missing", "nan", "inf", "negative", "huge", "oov")  # of data values
_MAX_COLUMNS = 100  # of a data set, shown by name
_LEAST_GAP = 1e-6  # between the best NE and 1; less is rounding
_MAX_MARKS = 100  # of skipped steps, in a chart
_MAX_LINES = 20  # of the training log, shown as numbers; fewer than twice as many


def write_run_page(path: Path, run: RunFiles) -> Path:
    """Writes the page of a run to `path` and returns the path."""
    summary = run.summary
    command, is_guessed = summary.get("command"), False
    if not command and (name := run.config.get("name")):
        command = as_commands(f"uv run python experiments/train.py --config {name}")
        is_guessed = True
    return write_page(
        path,
        "run.html",
        title=str(run.config.get("name") or path.parent.resolve().name),
        is_finished=bool(summary) and summary.get("finished") is not False,
        facts=_facts(run),
        notes=[
            *run.notes,
            *_texts(summary.get("returns")),
            *_texts(summary.get("warnings")),
        ],
        tiles=_tiles(run),
        curves=_curves(run),
        days=days_view(summary.get("days")),
        breakdowns=breakdown_views(run.evaluation),
        roles=ROLES,
        sites=_sites(run.sites),
        plan=dicts(summary.get("plan")),
        changes=_texts(summary.get("changes")),
        scales=_scales(run.scales),
        data=_data(as_dict(summary.get("data")), as_dict(run.config.get("embedding"))),
        command=command,
        is_guessed=is_guessed,
        settings={
            "Config": flat(run.config),
            "Versions": flat(as_dict(summary.get("versions"))),
        },
    )


def _facts(run: RunFiles) -> list[str]:
    summary = run.summary
    last = (run.train or run.evals or [{}])[-1]
    device = as_dict(summary.get("versions")).get("device_kind")
    facts = [
        ("recipe", _recipe(run)),
        ("on", device or summary.get("device")),
        ("mesh", summary.get("mesh")),
        ("list climbs", summary.get("list_climbs")),
        ("", _gradient_sum(as_dict(summary.get("gradients")))),
        ("seed", summary.get("seed", run.config.get("seed"))),
        ("steps", number(summary.get("steps", last.get("step")))),
        ("examples", number(summary.get("examples", last.get("examples")))),
        ("", _duration(summary.get("seconds", last.get("seconds")))),
        ("compiled for", _duration(summary.get("compile_seconds"))),
        ("evaluated at", summary.get("final_state")),
    ]
    return [
        f"{name} {value}".strip()
        for name, value in facts
        if value not in (None, "", "n/a")
    ]


def _gradient_sum(gradients: dict[str, Any]) -> str:
    """Returns how dense gradients travel and why; "" with one device."""
    if not gradients:
        return ""
    return f"gradients summed in {gradients.get('wire')}: {gradients.get('reason')}"


def _tiles(run: RunFiles) -> list[Tile]:
    final, split, where = final_of(run)
    if tasks := as_dict(final.get("tasks")):
        where = f"mean of {len(tasks)} tasks, {where}"
    best = real(run.summary.get("best_possible_ne"))
    bound = "1 is predicting the mean" if best is None else f"best possible {best:.5f}"
    bound = f"normalized entropy; {bound}"
    tiles = [
        Tile(f"AUC, {split}", number(final.get("auc"), ".5f"), where),
        Tile(f"Log loss, {split}", number(final.get("logloss"), ".5f"), where),
        Tile(f"NE, {split}", number(final.get("ne"), ".5f"), bound),
    ]
    for task, values in tasks.items():
        tiles.append(_task_tile(task, as_dict(values)))
    if best is not None:
        share = gap_closed(final.get("ne"), best)
        note = "(1 − NE) / (1 − best)"
        label = f"NE gap closed, {split}"
        tiles.append(Tile(label, number(share, ".1%"), note, share))
    calibration = number(final.get("calibration"), ".4f")
    tiles.append(Tile(f"Calibration, {split}", calibration, "mean p / mean label"))
    speed = run.summary.get("examples_per_second")
    if speed is None and run.train:
        speed = run.train[-1].get("examples_per_second")
    note = "training, without steps that compile"
    tiles.append(Tile("Examples/s", _compact(speed), note))
    total, fp8 = _site_counts(run)
    if total:
        recipe = _recipe(run) or ""
        tiles.append(Tile("FP8 sites", f"{fp8} of {total}", recipe, fp8 / total))
    return tiles


def _task_tile(task: str, values: dict[str, Any]) -> Tile:
    note = (
        f"log loss {number(values.get('logloss'), '.5f')}, "
        f"NE {number(values.get('ne'), '.5f')}, "
        f"calibration {number(values.get('calibration'), '.4f')}"
    )
    return Tile(f"AUC, {task}", number(values.get("auc"), ".5f"), note)


def gap_closed(ne: object, best: object) -> float | None:
    """Returns (1 - NE) / (1 - best possible NE): 0 is the mean, 1 the best model.

    None if one of them is no number, or there is nothing to learn: best is 1.
    """
    ne, best = real(ne), real(best)
    if ne is None or best is None or 1 - best < _LEAST_GAP:
        return None
    return (1 - ne) / (1 - best)


def _site_counts(run: RunFiles) -> tuple[int, int]:
    counts = as_dict(run.summary.get("sites"))
    total, fp8 = real(counts.get("total")), real(counts.get("fp8"))
    if total is not None and fp8 is not None:
        return int(total), int(fp8)
    return len(run.sites), sum(not site.get("why_not") for site in run.sites)


def _curves(run: RunFiles) -> dict[str, Any]:
    skipped, marks = _skipped_steps(run)
    return {
        "skipped": skipped,
        "can_draw": charts.can_draw(),
        "split": _most_frequent_split(run.evals)[0],
        "figures": _figures(run, thin(marks, _MAX_MARKS)),
        "evals": run.evals,
        "train": thin(run.train, _MAX_LINES),
    }


def _figures(run: RunFiles, marks: list[float]) -> list[Figure]:
    """Returns the learning curves; none without matplotlib."""
    if not charts.can_draw():
        return []
    floor = real(run.summary.get("best_possible_ne"))
    split, evals = _most_frequent_split(run.evals)

    def series(train: str, evaluated: str) -> list[Series]:
        return [
            Series("train", points(run.train, train), "accent"),
            Series(split, points(evals, evaluated), "second"),
        ]

    def training(name: str) -> list[Series]:
        return [Series("train", points(run.train, name), "accent")]

    memory = [
        Series("host", points(run.train, "host_bytes"), "accent"),
        Series("device peak", points(run.train, "device_peak_bytes"), "second"),
    ]
    return [
        *charts.curves("Log loss", series("loss", "logloss"), marks=marks),
        *charts.curves("Normalized entropy", series("ne", "ne"), floor=floor),
        *charts.curves("AUC", series("auc", "auc")),
        *charts.curves("Learning rate", training("lr"), from_zero=True),
        *charts.curves("Gradient norm", training("grad_norm"), marks=marks),
        *charts.curves(
            "Examples per second", training("examples_per_second"), from_zero=True
        ),
        *charts.curves("Memory in bytes", memory, from_zero=True),
    ]


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


def _sites(sites: list[dict]) -> dict[str, Any]:
    return {
        "rows": [
            site | {"roles": [_role(site.get(role)) for role in ROLES]}
            for site in sites
        ],
        "fp8": sum(not site.get("why_not") for site in sites),
        "recipes": dict.fromkeys(str(site.get("recipe")) for site in sites),
    }


def _role(text: object) -> tuple[object, bool]:
    """Returns the description of a role, and whether it is in FP8."""
    return text, any(word in str(text).lower() for word in _FP8_WORDS)


def _scales(lines: list[dict]) -> dict[str, Any] | None:
    """Returns the scales of each site and operand over time; None without any."""
    if not lines:
        return None
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    parts = [name.rpartition("/") for name in names]
    others = dict.fromkeys(operand for *_, operand in parts)
    operands = [o for o in OPERANDS if o in others]
    operands += [o for o in others if o not in OPERANDS]
    return {
        "operands": operands,
        "rows": {
            site: [
                _scale(lines, f"{site}/{operand}" if site else operand)
                for operand in operands
            ]
            for site in dict.fromkeys(site for site, *_ in parts)
        },
        "first_step": lines[0].get("step"),
        "last_step": lines[-1].get("step"),
    }


def _scale(lines: list[dict], name: str) -> dict[str, Any] | None:
    values = [real(line.get(name)) for line in lines]
    positive = [value for value in values if value is not None and value > 0]
    if not positive:
        return None
    ends = {"first": positive[0], "last": positive[-1]}
    return {"name": name, "values": values} | ends


def _data(data: dict[str, Any], embedding: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the examples, split rule, tables, values by policy, and bad rows."""
    if not data:
        return None
    splits = {k: as_dict(v) for k, v in as_dict(data.get("splits")).items()}
    counts = [
        _column_counts(name, as_dict(split.get("columns")))
        for name, split in (splits or {"": data}).items()
    ]
    shown = {"examples", "splits", "totals", "columns", "bad_rows", "split_rule"}
    shown |= {"categorical", "notes"}
    return {
        "split_rule": data.get("split_rule"),
        "notes": _texts(data.get("notes")),
        "examples": as_dict(data.get("examples")),
        "counts": [part for part in counts if part["totals"]],
        "bad_rows": _bad_rows(data.get("bad_rows")),
        "tables": _tables(as_dict(data.get("categorical")), embedding),
        "others": flat({k: v for k, v in data.items() if k not in shown}),
    }


def _tables(columns: dict[str, Any], embedding: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each categorical column: its table and what is in it."""
    entries = (text.rpartition("=") for text in _texts(embedding.get("dims")))
    own = {
        name: int(dim) for name, _, dim in entries if re.fullmatch("[0-9]{1,4}", dim)
    }
    rows = []
    for name, value in list(columns.items())[:_MAX_COLUMNS]:
        dim = real(own.get(name, embedding.get("dim")))
        facts = as_dict(value)
        num_rows, is_own = real(facts.get("rows")), "table_of" not in facts
        top = facts.get("most_frequent")
        pairs = [x for x in top if isinstance(x, list)] if isinstance(top, list) else []
        rows.append(
            {
                "column": name,
                "values": facts.get("values"),
                "rows": num_rows,
                "parameters": num_rows * dim if num_rows and dim and is_own else None,
                "top": ", ".join(" x ".join(map(str, pair)) for pair in pairs),
                "warning": facts.get("warning"),
            }
        )
    return rows


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list) else []


def _column_counts(split: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of values of each kind, in all and by column."""
    counts = {
        name: {kind: real(as_dict(column).get(kind)) or 0 for kind in _KINDS}
        for name, column in columns.items()
    }
    totals = {kind: sum(column[kind] for column in counts.values()) for kind in _KINDS}
    return {
        "split": split,
        "totals": {kind: total for kind, total in totals.items() if total},
        "columns": dict(list(counts.items())[:_MAX_COLUMNS]),
        "hidden": max(len(counts) - _MAX_COLUMNS, 0),
    }


def _bad_rows(bad_rows: object) -> dict[str, Any] | None:
    if bad_rows is None:
        return None
    report = as_dict(bad_rows) or {"count": bad_rows}
    rows = dicts(report.get("samples"))
    heads = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(head) for head in heads] for row in rows]
    return {"count": real(report.get("count")) or 0, "heads": heads, "rows": cells}


def _recipe(run: RunFiles) -> object:
    model = as_dict(run.config.get("model"))
    return run.summary.get("recipe") or model.get("recipe") or run.config.get("recipe")


def _compact(value: Any) -> str:
    """Returns a large number in few characters, 12.4 M for 12,398,321."""
    if number(value) == "n/a" or abs(value) < 1e6:
        return number(value)
    return number(value / 1e6, ".2f" if abs(value) < 1e7 else ".1f") + " M"


def _duration(seconds: object) -> str:
    total = real(seconds)
    if total is None:
        return ""
    if total < 60:
        return f"{total:.1f} s"
    minutes, rest = divmod(round(total), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
