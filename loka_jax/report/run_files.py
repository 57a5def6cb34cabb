"""The contents of a run's files, as pages read them."""

from typing import Any, NamedTuple

from loka_jax.jsonfile import as_dict
from loka_jax.report.render import number, real


class RunFiles(NamedTuple):
    """The contents of a run's files; empty where a file is missing or broken.

    Attributes:
        summary: the run in numbers; empty for a run that has not ended.
        sites: a row per site, with a description of each role.
        scales: a line of delayed scales per logged step.
        evaluation: the final evaluation by predictions, and by values of columns.
        importance: a row per column, of a later evaluation that measured it.
        damage: sentences on the files that are broken, in whole or in part.
        notes: sentences on what else was left out.
    """

    summary: dict[str, Any]
    config: dict[str, Any]
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    sites: list[dict[str, Any]]
    scales: list[dict[str, Any]]
    evaluation: dict[str, Any]
    importance: list[dict[str, Any]]
    damage: list[str]
    notes: list[str]


class Final(NamedTuple):
    """The final evaluation of a run, or its newest one.

    Attributes:
        where: the state that was evaluated, in words.
    """

    values: dict[str, Any]
    split: str
    where: str


def final_of(run: RunFiles) -> Final:
    """Returns the final evaluation of a run; the newest one if it has not ended."""
    summary = run.summary
    if final := as_dict(summary.get("final_eval")):
        where = summary.get("final_state") or "final evaluation"
        return Final(final, str(summary.get("final_split") or "final"), str(where))
    newest = run.evals[-1] if run.evals else {}
    where = f"step {number(newest.get('step'))}" if newest else "not evaluated"
    return Final(newest, str(newest.get("split") or "evaluation"), where)


def speed_of(run: RunFiles) -> object:
    """Returns the examples per second of a run, or of its newest line."""
    rate = run.summary.get("examples_per_second")
    if rate is None and run.train:
        return run.train[-1].get("examples_per_second")
    return rate


def points(lines: list[dict[str, Any]], name: str) -> list[tuple[float, float | None]]:
    """Returns (examples seen, value) of the lines that have the former."""
    pairs = [(real(line.get("examples")), real(line.get(name))) for line in lines]
    return [(x, y) for x, y in pairs if x is not None]


def thin[T](lines: list[T], count: int) -> list[T]:
    """Returns every so many lines, the last among them: fewer than twice `count`."""
    return lines[::-1][:: max(1, len(lines) // count)][::-1]
