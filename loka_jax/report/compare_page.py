"""The page of runs over one another: each is compared with the first one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loka_jax.report import charts
from loka_jax.report.charts import RUN_COLORS, Figure, Series
from loka_jax.report.comparison import (
    ComparedRun,
    Difference,
    by_examples,
    by_seeds,
    common_steps,
    seed_groups,
    seed_of,
    why_not_comparable,
)
from loka_jax.report.render import flat, number, real, write_page
from loka_jax.report.run_files import final_of, points, speed_of, thin

MAX_RUNS = 2 * len(RUN_COLORS)  # as many as curves can be told apart
_MAX_POINTS = 300  # of a curve; fewer than twice as many


def write_compare_page(path: Path, runs: Sequence[ComparedRun], command: str) -> Path:
    """Writes the page of several runs to `path` and returns the path.

    Raises:
        ValueError: if there are fewer than two or too many, or none was evaluated on
            examples like the first one's.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ValueError(
            f"the number of runs is {len(runs)}: name 2 to {MAX_RUNS} of them."
        )
    first, *others = runs
    reasons = {run.name: why_not_comparable(first, run) for run in others}
    if all(reasons.values()):
        name, why = next(iter(reasons.items()))
        raise ValueError(
            f"{name} has nothing in common with {first.name} ({why}): compare runs on "
            "the same data, or score both on the same file with --data.path."
        )
    comparable = [run for run in others if reasons[run.name] is None]
    return write_page(
        path,
        "compare.html",
        title=f"{len(runs)} runs over one another",
        command=command,
        settings={},
        tiles=_tiles([first, *comparable]),
        first=first.name,
        reasons={name: why for name, why in reasons.items() if why is not None},
        finals=[_final(run) for run in runs],
        pairs=[_pair(first, run) for run in comparable],
        **_seeds([first, *comparable]),
        runs=[run.name for run in runs],
        changed=_changed_settings(runs),
        figures=_figures(runs, comparable),
    )


def difference_lines(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns a line for each paired difference from the first run, with its interval.

    The runs are those of a page that was written.
    """
    first, *others = runs
    others = [run for run in others if why_not_comparable(first, run) is None]
    lines = [f"Both scored again on {first.again}."] if first.again else []
    for run in others:
        pair = f"{run.name} minus {first.name}"
        for label, differences in _pair(first, run)["examples"].items():
            of = f" of {label}" if len(run.scored) > 1 else ""
            lines.append(f"{pair}{of}, {_in_words(differences, 'examples')}")
        if not any(line.startswith(pair) for line in lines):
            lines.append(f"{pair}: they kept no scores of the same examples.")
    found = _seeds([first, *others])
    for row in found["seeds"]:
        if len(row["seeds"]) > 1:
            names = " and ".join(", ".join(x) for x in (row["names"], found["base"]))
            lines.append(f"{names}, {_in_words(row['differences'], 'seeds')}")
    return lines


def as_numbers(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Returns the paired differences of runs of a page that was written, for JSON."""
    first, *others = runs
    others = [run for run in others if why_not_comparable(first, run) is None]
    return {
        "first": first.name,
        "scored_again_on": first.again or None,
        "by_examples": {run.name: _plain(_pair(first, run)) for run in others},
        "by_seeds": [_plain(row) for row in _seeds([first, *others])["seeds"]],
        "settings": dict(_changed_settings(runs)),
    }


def _plain(value: Any) -> Any:
    """Returns differences, at any depth, as dicts."""
    if isinstance(value, Difference):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


_WORDS = {"ne_delta_pct": "NE %", "ne": "NE", "auc": "AUC", "logloss": "log loss"}


def _in_words(differences: dict[str, Difference], unit: str) -> str:
    known = {_WORDS.get(name, name): x for name, x in differences.items()}
    parts = (
        f"{name} {x.mean:+.5f}" + ("" if x.half is None else f" ± {x.half:.5f}")
        for name, x in known.items()
    )
    counts = {x.count for x in differences.values()}
    return f"over {max(counts):,} {unit}: {', '.join(parts)}"


def _tiles(runs: Sequence[ComparedRun]) -> list[tuple[str, str, str]]:
    """Returns the best run by each of three measures, among those on the same data."""
    split = final_of(runs[0].files).split
    measures = (
        (f"Lowest NE, {split}", min, "ne", ".5f"),
        (f"Highest AUC, {split}", max, "auc", ".5f"),
        ("Most examples/s", max, "examples_per_second", ",.0f"),
    )
    tiles = []
    for label, choose, name, spec in measures:
        values = {run.name: real(_final(run).get(name)) for run in runs}
        known = {run: value for run, value in values.items() if value is not None}
        if known:
            best = choose(known, key=known.__getitem__)
            tiles.append((label, number(known[best], spec), best))
    return tiles


def _final(run: ComparedRun) -> dict[str, Any]:
    """Returns the metrics of the final evaluation, and what the table has beside."""
    summary, (values, split, where) = run.files.summary, final_of(run.files)
    shown = {name: summary.get(name) for name in ("steps", "seconds", "device")}
    shown |= {"name": run.name, "split": split, "where": where}
    return values | shown | {"examples_per_second": speed_of(run.files)}


def _pair(first: ComparedRun, run: ComparedRun) -> dict[str, Any]:
    """Returns the paired differences of a run by examples, and its speed."""
    base, rate = (real(speed_of(each.files)) for each in (first, run))
    scored = {k: (v, run.scored[k]) for k, v in first.scored.items() if k in run.scored}
    examples = {k: by_examples(*both) for k, both in scored.items()}
    return {
        "name": run.name,
        "examples": {k: deltas for k, deltas in examples.items() if deltas},
        "speedup": rate / base if base and rate else None,
    }


def _seeds(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Returns the first run's group, and how groups of runs differ from it by seed."""
    if runs[0].again:  # final evaluations are of other rows
        return {"base": [], "seeds": []}
    base, *others = seed_groups(runs)
    rows = [
        {
            "names": [run.name for run in group],
            "seeds": sorted({seed_of(r) for r in base} & {seed_of(r) for r in group}),
            "differences": differences,
        }
        for group in others
        if (differences := by_seeds(base, group))
    ]
    return {"base": [run.name for run in base], "seeds": rows}


def _changed_settings(runs: Sequence[ComparedRun]) -> list[tuple[str, list[object]]]:
    """Returns the settings and versions in which runs differ, with their values."""
    columns = [
        flat(run.files.config) | flat({"versions": run.files.summary.get("versions")})
        for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [c.get(name, "not set") for c in columns]) for name in names]
    return [row for row in rows if any(repr(x) != repr(row[1][0]) for x in row[1])]


def _figures(
    runs: Sequence[ComparedRun], comparable: Sequence[ComparedRun]
) -> list[Figure]:
    """Returns the curves of all runs, and their differences from the first one's."""
    split = next((line.get("split") for r in runs for line in r.files.evals), "valid")

    def figure(title, points_of, drawn=runs, *, has_dots=False, **options):
        series = []
        for i, run in enumerate(runs):
            if run in drawn:
                color, is_dashed = RUN_COLORS[i % len(RUN_COLORS)], i >= len(RUN_COLORS)
                curve = points_of(run)
                series.append(Series(run.name, curve, color, is_dashed, has_dots))
        return charts.curves(title, series, **options)

    def over(title: str, file: str, name: str, **options: Any) -> list[Figure]:
        def points_of(run: ComparedRun):
            lines = getattr(run.files, file)
            if file == "evals":
                lines = [line for line in lines if line.get("split") == split]
            return points(thin(lines, _MAX_POINTS), name)

        return figure(title, points_of, has_dots=file == "evals", **options)

    def minus_first(run: ComparedRun):
        """Returns (examples, difference of NE) at the steps evaluated in both."""
        pairs = common_steps(runs[0].files, run.files)
        nes = [(real(one.get("ne")), real(two.get("ne")), two) for one, two in pairs]
        minus = [
            line | {"minus": ne - base}
            for base, ne, line in nes
            if base is not None and ne is not None
        ]
        return points(minus, "minus")

    title = f"NE minus the first run's, {split}"
    return [
        *over(f"NE, {split}", "evals", "ne"),
        *over(f"AUC, {split}", "evals", "auc"),
        *over(f"Log loss, {split}", "evals", "logloss"),
        *figure(title, minus_first, comparable, has_dots=True),
        *over("Log loss, train", "train", "loss"),
        *over("Learning rate", "train", "lr", from_zero=True),
        *over("Gradient norm", "train", "grad_norm"),
        *over("Examples per second", "train", "examples_per_second", from_zero=True),
    ]
