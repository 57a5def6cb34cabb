"""What a run leaves at its end: the summary, and the last lines printed."""

import dataclasses
import pathlib
from typing import Any

import jax
from rich.console import Console

from loka_jax.dispatch.plan import plan_rows
from loka_jax.optim import OptimConfig
from loka_jax.report.run_page import gap_closed
from loka_jax.train.baselines import baseline_ne
from loka_jax.train.calibration import CALIBRATION
from loka_jax.train.evaluation import calibration_of, evaluate_finally
from loka_jax.train.folder.record import RunRecord, versions
from loka_jax.train.logs.printing import plain, quality_lines
from loka_jax.train.loop import Loop
from loka_jax.train.processes.signals import StopRequest
from loka_jax.train.watch.host_state import Progress

_MEASURES = {"ne": "NE", "logloss": "log loss", "auc": "AUC"}  # OptimConfig.best_by


def summarize(loop: Loop, stop: StopRequest, record: RunRecord) -> dict[str, Any]:
    """Returns what summary.json holds, with a final evaluation unless it was stopped.

    Writes the scores of the evaluated examples where the record keeps them.
    """
    run, progress = loop.run, loop.progress
    splits = run.splits
    split, held_out = "test", splits.test
    if held_out is None:
        split, held_out = "valid", splits.valid
    final, final_step, final_state, baselines = None, None, None, None
    if not stop.is_set:
        best = loop.best_state()
        final_step = best.progress.step
        final_state = _which(run.config.optim, progress, final_step)
        calibration = None
        if run.config.calibrate:
            calibration = calibration_of(best.run, best.state)
            record.write(CALIBRATION, dataclasses.asdict(calibration))
        judged = best.run, best.state, held_out, calibration
        final, samples = evaluate_finally(*judged)
        record.track_final(final, progress.step)
        if samples:
            columns = held_out.schema.categorical
            record.write_scores(samples, split, columns, splits.folder)
        if record.writes and splits.folder is not None:
            baselines = baseline_ne(run.baselines.regressions, held_out)
    sites = run.running_sites
    return {
        "config": run.config.identity(),
        "seed": run.config.seed,
        "recipe": run.config.model.recipe,
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "finished": not stop.is_set,
        "steps": progress.step,
        "examples": progress.examples,
        "seconds": progress.seconds,
        "compile_seconds": round(loop.clock.compile_seconds(), 3),
        "examples_per_second": loop.clock.session_rate(progress),
        "skipped_steps": int(loop.state.skipped),
        "bad_ids": int(loop.state.bad_ids),
        "best_valid": progress.best,
        "final_eval": final,
        "final_split": split,
        "final_step": final_step,
        "final_state": final_state,
        "baseline_ne": baselines,
        "best_possible_ne": splits.report.get("best_possible_ne"),
        "sites": {"total": len(sites), "fp8": sum(site.is_fp8 for site in sites)},
        "plan": plan_rows(run.plan),
        "changes": progress.changes,
        "returns": progress.returns,
        "warnings": progress.scale_watch.warnings,
        "alarms": progress.alarms.warnings,
        "days": progress.days,
        "data": splits.report,
        **run.placement.numbers(),
        **run.placement.choices(),
    }


def _which(optim: OptimConfig, progress: Progress, step: int) -> str:
    """Returns which state the final evaluation judges, as a phrase."""
    if optim.plateau_patience is None or progress.best is None:
        return f"step {step:,}, the last"
    if not step:
        return "the regression at the start"
    task = "" if optim.best_task is None else f" of {optim.best_task}"
    return f"step {step:,}, the best by {_MEASURES[optim.best_by]}{task}"


def print_end(
    console: Console, summary: dict[str, Any], report: pathlib.Path, saved: int | None
):
    """Prints the quality of a run and where its report is, or how to resume it."""
    final = summary["final_eval"]
    if final is None:
        newest = "nothing was saved" if saved is None else f"saved is step {saved:,}"
        if saved == summary["steps"]:
            newest = "and saved"
        stopped = f"Stopped at step {summary['steps']:,}, {newest}"
        resume = f"continue with --resume --workdir {report.parent}"
        console.print(plain(f"{stopped}: {resume}"))
        return
    state = f"  ({summary['final_state']})"
    for line in quality_lines(summary["final_split"], final, state):
        console.print(plain(line))
    if before := final.get("uncalibrated"):
        for line in quality_lines("before its calibration by validation rows", before):
            console.print(plain(line))
    for line in beside(final["ne"], summary["baseline_ne"]):
        console.print(plain(line))
    best = summary["best_possible_ne"]
    share = gap_closed(final["ne"], best)
    if share is not None:
        console.print(f"Best possible NE {best:.5f}: {share:.1%} of the gap closed.")
    console.print(plain(f"Report: {report}"))


def beside(ne: float, baselines: dict[str, Any] | None) -> list[str]:
    """Returns sentences on the NE of simple models, and on a model that loses."""
    if baselines is None:
        return []
    words = {"mean": "the training rows' mean", "logistic_regression": _REGRESSION}
    known = {words[k]: x for k, x in baselines.items() if x is not None}
    if not known:
        return []
    numbers = " and ".join(f"{name} {x:.5f}" for name, x in known.items())
    name, lowest = min(known.items(), key=lambda item: item[1])
    lines = [f"Beside it: NE of {numbers}."]
    if not ne <= lowest + _AS_GOOD:
        lines.append(
            f"Warning: the model loses to {name} by NE {ne - lowest:.5f}, so that "
            "it, or its settings, do not fit these data: --config table chooses them "
            "by the data, and starts its models at a regression."
        )
    return lines


_AS_GOOD = 1e-4  # of NE, to which a start at the regression may be rounded
_REGRESSION = "a logistic regression on the same columns"
