"""report.html: one page, without a request to anywhere, that tells what a run did.

It is made of what lies in the workdir (`record.py` lists the files). Any of it may be
missing: an interrupted run has no summary, and its page says so and shows the rest.
Everything from the files is escaped; a run's names are no HTML.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from loka_jax import jsonfile
from loka_jax.train import record, report_plots
from loka_jax.train.report_html import (
    Html,
    compact,
    definitions,
    details,
    escape,
    join,
    number,
    page,
    section,
    table,
    tag,
    tile,
)
from loka_jax.train.report_plots import Curve
from loka_jax.train.report_tables import (
    as_dict,
    data_section,
    dispatch_section,
    flat,
    real,
    scales_section,
    sites_section,
)


class Run(NamedTuple):
    """What was found in a workdir; empty where a file is missing or broken."""

    summary: dict[str, Any]
    config: dict[str, Any]
    train: list[dict]
    evals: list[dict]
    sites: list[dict]
    scales: list[dict]
    notes: list[str]


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes `report.html` into the workdir and returns its path.

    Raises:
        ValueError: if there is no run in `workdir`.
    """
    workdir = Path(workdir)
    run = _load(workdir)
    if not (run.summary or run.config or run.train or run.evals):
        raise ValueError(
            f"{workdir} holds no run ({record.METRICS} and {record.SUMMARY} are "
            "missing): give the --workdir of one."
        )
    title = str(run.config.get("name") or workdir.resolve().name)
    body = (
        _header(run, title),
        _tiles(run),
        _curves(run),
        sites_section(run.sites),
        dispatch_section(run.summary.get("plan"), run.summary.get("demotions")),
        scales_section(run.scales),
        data_section(run.summary.get("data")),
        _reproduce(run),
        tag("footer", f"loka_jax run report of {workdir.resolve().name}"),
    )
    path = workdir / "report.html"
    jsonfile.write_text(path, page(f"{title} – loka_jax", *body))
    return path


def _load(workdir: Path) -> Run:
    notes: list[str] = []

    def read(name: str, kind: type) -> Any:
        try:
            value = jsonfile.read(workdir / name)
        except FileNotFoundError:
            return kind()
        except ValueError:
            value = None
        if not isinstance(value, kind):
            notes.append(f"{name} is broken and was left out.")
            return kind()
        return value

    summary = read(record.SUMMARY, dict)
    lines = jsonfile.read_lines(workdir / record.METRICS)
    return Run(
        summary=summary,
        config=as_dict(summary.get("config")) or read(record.CONFIG, dict),
        train=[line for line in lines if line.get("kind") == "train"],
        evals=[line for line in lines if line.get("kind") == "eval"],
        sites=[as_dict(site) for site in read(record.SITES, list)],
        scales=jsonfile.read_lines(workdir / record.SCALES),
        notes=notes,
    )


def _header(run: Run, title: str) -> Html:
    summary = run.summary
    last = (run.train or run.evals or [{}])[-1]
    versions = as_dict(summary.get("versions"))
    state = ("finished", "is-good") if summary else ("not finished", "is-bad")
    facts = [
        ("recipe", _recipe(run)),
        ("on", versions.get("device_kind") or summary.get("device")),
        ("seed", summary.get("seed", run.config.get("seed"))),
        ("steps", number(summary.get("steps", last.get("step")))),
        ("examples", number(summary.get("examples", last.get("examples")))),
        ("", _duration(summary.get("seconds", last.get("seconds")))),
    ]
    shown = [
        tag("li", f"{name} {value}".strip())
        for name, value in facts
        if value not in (None, "", "n/a")
    ]
    notes = list(run.notes)
    if not summary:
        notes.append("The run has not ended: these are its numbers so far.")
    return tag(
        "header",
        tag("p", "loka_jax run report", class_="eyebrow"),
        tag("h1", title),
        tag("ul", tag("li", state[0], class_=state[1]), *shown, class_="facts"),
        *(tag("p", note, class_="alert") for note in notes),
    )


def _tiles(run: Run) -> Html:
    final = as_dict(run.summary.get("final_eval"))
    where = "final evaluation"
    if not final and run.evals:
        final = run.evals[-1]
        where = f"step {number(final.get('step'))}"
    if split := final.get("split"):
        where = f"{split}, {where}"
    ne, best = real(final.get("ne")), real(run.summary.get("best_possible_ne"))
    bound = "1 is predicting the mean" if best is None else f"best possible {best:.5f}"
    tiles = [
        tile("AUC", number(final.get("auc"), 5), where),
        tile("Log loss", number(final.get("logloss"), 5), where),
        tile("NE", number(ne, 5), f"normalized entropy; {bound}"),
    ]
    if best is not None:
        closed = None if ne is None or best >= 1 else (1 - ne) / (1 - best)
        value = "n/a" if closed is None else f"{100 * closed:.1f} %"
        tiles.append(
            tile("NE gap closed", value, "(1 − NE) / (1 − best)", share=closed)
        )
    tiles.append(
        tile("Calibration", number(final.get("calibration"), 4), "mean p / mean label")
    )
    speed = run.summary.get("examples_per_second")
    if speed is None and run.train:
        speed = run.train[-1].get("examples_per_second")
    tiles.append(tile("Examples/s", compact(speed), "training"))
    total, fp8 = _site_counts(run)
    if total:
        # Long names break at underscores, not within words.
        recipe = Html(escape(_recipe(run) or "").replace("_", "_<wbr>"))
        tiles.append(tile("FP8 sites", f"{fp8} of {total}", recipe, share=fp8 / total))
    return tag("div", *tiles, class_="tiles")


def _site_counts(run: Run) -> tuple[int, int]:
    counts = as_dict(run.summary.get("sites"))
    total, fp8 = real(counts.get("total")), real(counts.get("fp8"))
    if total is not None and fp8 is not None:
        return int(total), int(fp8)
    return len(run.sites), sum(not site.get("why_not") for site in run.sites)


def _curves(run: Run) -> Html:
    skipped, places = _skipped(run)
    if not run.train and not run.evals:
        return section("Learning curves", tag("p", "Nothing was logged."))
    sentence = "No step was skipped."
    if skipped:
        steps = "step was" if skipped == 1 else "steps were"
        sentence = f"{number(skipped)} {steps} skipped: loss or gradient not finite."
    if not report_plots.can_draw():
        note = "Curves need matplotlib: install loka-jax[report] and report again."
        note = tag("p", note, class_="alert")
        return section("Learning curves", note, _numbers(run), lead=sentence)
    best = real(run.summary.get("best_possible_ne"))
    floor = None if best is None else ("best possible", best)
    evals = _by_split(run.evals)

    def curves(train: str, evaluated: str) -> list[Curve]:
        return [
            Curve(label="training", points=_points(run.train, train), color="accent"),
            Curve(label=evals[0], points=_points(evals[1], evaluated), color="second"),
        ]

    speed = curves("examples_per_second", "")
    charts = [
        report_plots.chart("Log loss", curves("loss", "logloss"), marks=places),
        report_plots.chart("Normalized entropy", curves("ne", "ne"), floor=floor),
        report_plots.chart("AUC", curves("auc", "auc")),
        report_plots.chart("Examples a second", speed, from_zero=True),
    ]
    return section(
        "Learning curves",
        tag("div", *charts, class_="charts"),
        details("The same in numbers", _numbers(run)),
        lead=sentence,
    )


def _by_split(evals: list[dict]) -> tuple[str, list[dict]]:
    """Returns the split that was evaluated most often, and its lines."""
    splits = [str(line.get("split") or "evaluation") for line in evals]
    if not splits:
        return "evaluation", []
    name = max(dict.fromkeys(splits), key=splits.count)
    return name, [
        line for line, split in zip(evals, splits, strict=True) if split == name
    ]


def _points(lines: list[dict], name: str) -> list[tuple[float, float | None]]:
    xs = [real(line.get("examples")) for line in lines]
    ys = [real(line.get(name)) for line in lines]
    return [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]


def _skipped(run: Run) -> tuple[float, list[float]]:
    """Returns the number of skipped steps, and the examples seen at each."""
    places, before = [], 0.0
    for line in run.train:
        count = real(line.get("skipped_steps")) or 0.0
        if count > before and (x := real(line.get("examples"))) is not None:
            places.append(x)
        before = max(before, count)
    total = real(run.summary.get("skipped_steps"))
    return (before if total is None else total), places


def _numbers(run: Run) -> Html:
    """Returns the evaluations, and about twenty training lines, as tables."""
    evals = [
        (
            number(line.get("step")),
            number(line.get("examples")),
            line.get("split"),
            *(number(line.get(name), 5) for name in ("auc", "logloss", "ne")),
            number(line.get("calibration"), 4),
        )
        for line in run.evals
    ]
    stride = max(1, len(run.train) // 20)
    train = [
        (
            number(line.get("step")),
            number(line.get("examples")),
            *(number(line.get(name), 5) for name in ("loss", "ne")),
            "n/a" if (lr := real(line.get("lr"))) is None else f"{lr:.4g}",
            number(line.get("examples_per_second")),
            number(line.get("skipped_steps")),
        )
        for line in run.train[::-1][::stride][::-1]
    ]
    heads = ("step", "examples", "split", "AUC", "log loss", "NE", "calibration")
    train_heads = ("step", "examples", "loss", "NE", "lr", "examples/s", "skipped")
    return join(
        (
            table(heads, evals, numeric="nn nnnn") if evals else "",
            table(train_heads, train, numeric="nnnnnnn") if train else "",
        )
    )


def _reproduce(run: Run) -> Html:
    command = run.summary.get("command")
    note = ""
    if not command and (name := run.config.get("name")):
        command = f"uv run python experiments/train.py --config {name}"
        note = tag("p", "with the overrides that the config shows", class_="muted")
    versions = as_dict(run.summary.get("versions"))
    return section(
        "Reproduce",
        tag("pre", tag("code", command)) if command else "",
        note,
        details("Config", definitions(flat(run.config))) if run.config else "",
        details("Versions", definitions(flat(versions))) if versions else "",
    )


def _recipe(run: Run) -> object:
    model = as_dict(run.config.get("model"))
    return run.summary.get("recipe") or model.get("recipe") or run.config.get("recipe")


def _duration(seconds: object) -> str:
    total = real(seconds)
    if total is None:
        return ""
    if total < 60:
        return f"{total:.1f} s"
    minutes, rest = divmod(round(total), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
