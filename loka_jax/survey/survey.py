"""Surveys every site of a trained model for where FP8 is safe and fast.

statistics  --draw-->  operands  --candidates-->  errors, times  -->  verdicts
real operands of some batches   ----------------> errors to compare with the draws'
held-out batches, one site in FP8  -------------> effect on the loss
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.scipy.stats import rankdata
from jaxtyping import Float

from loka_jax import nn
from loka_jax.dispatch.policy import Limits, why_unsafe
from loka_jax.measure.intervals import Interval
from loka_jax.measure.site_errors import PAIRS, site_errors
from loka_jax.measure.site_times import site_times, speedup
from loka_jax.options import require
from loka_jax.probe.operands import Operands
from loka_jax.probe.sampling import draw_learned, draw_normal
from loka_jax.probe.site import Capture, Sample, SiteStats
from loka_jax.recipe import RECIPES, Role, get_recipe
from loka_jax.site import BF16, SiteSpec
from loka_jax.survey.sensitivity import (
    LOSS_RECIPE,
    Effect,
    can_be_fp8,
    held_out,
    sensitivity,
)
from loka_jax.survey.summary import summarize, warnings_of
from loka_jax.train import tasks
from loka_jax.train.build import Run
from loka_jax.train.folder.record import versions
from loka_jax.train.state import TrainState
from loka_jax.train.step import make_observe_step

FP8_RECIPES = tuple(name for name in RECIPES if name.startswith("fp8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyConfig:
    """The options of a survey; limits are `--dispatch.limits`.

    Attributes:
        recipes: measured at every site, beside bfloat16.
        pairs: operands drawn for each of them.
        rows: of drawn and captured operands, at most.
        captured_batches: batches whose real operands are multiplied too; 0 for none.
        held_out_batches: of the validation data, at most, for the effect on the loss.
        times: measure times too, where there is a GPU.
    """

    recipes: tuple[str, ...] = FP8_RECIPES
    pairs: int = PAIRS
    rows: int = 1024
    captured_batches: int = 16
    held_out_batches: int = 32
    times: bool = True

    def __post_init__(self):  # noqa: D105
        for name, least in {
            "pairs": 2,
            "rows": 16,
            "captured_batches": 0,
            "held_out_batches": 1,
        }.items():
            value = getattr(self, name)
            option = f"--survey.{name.replace('_', '-')}"
            require(value >= least, option, value, f"at least {least}")
        for name in self.recipes:
            get_recipe(name)


def judge(
    errors: Mapping[str, Interval], speedup: float | None, limits: Limits
) -> dict[str, Any]:
    """Returns the verdict on a candidate at a role of a site.

    Returns:
        is_safe: its error is within the limits.
        is_fast: it is faster than bfloat16 by the limit; None if not measured.
        reason: why it is not safe, or not fast; its speed and error if it is both.
    """
    why_not = why_unsafe(errors, limits)
    is_fast = None if speedup is None else speedup >= limits.speedup
    error = f"relative L2 {errors['relative_l2'].mean:.3f}"
    gain = [] if speedup is None else [f"{speedup:.2f} times bfloat16"]
    reason = why_not or ", ".join(gain if is_fast is False else [*gain, error])
    return {"is_safe": why_not is None, "is_fast": is_fast, "reason": reason}


def survey(
    run: Run,
    state: TrainState,
    config: SurveyConfig,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Returns the statistics and measurements of every site, JSON-ready.

    Operands and losses are of validation data; `say` takes a line of progress.
    """
    stats_by_path = nn.by_path(state.probe)
    if not any(isinstance(x, SiteStats) for x in stats_by_path.values()):
        raise ValueError(
            "this run has no statistics: train it with --probe.every 100 or so."
        )
    sites = [site for site in run.sites if can_be_fp8(site)]
    captured = _capture(run, state, config)
    records, warnings, limits = [], [], run.config.dispatch.limits
    for i, site in enumerate(sites):
        say(f"site {i + 1} of {len(sites)}: {site.path}")
        stats = stats_by_path[site.path]
        warnings += warnings_of(site.path, stats)
        operands = [batch[site.path].operands for batch in captured]
        records.append(_survey_site(site, stats, operands, config, limits, say))
    say("effect on the loss")
    effects = sensitivity(run, state, config.held_out_batches)
    return {
        "model": run.config.name,
        "config": run.config.identity(),
        "survey": dataclasses.asdict(config),
        "versions": versions(),
        "steps": int(state.step),
        "warnings": warnings,
        "sites": records,
        "not_surveyed": [
            {"path": site.path}
            | _sizes(site.spec)
            | {"why": site.why_not or f"recipe {site.recipe}"}
            for site in run.sites
            if site not in sites
        ],
        "loss_recipe": LOSS_RECIPE,
        "sensitivity": {path: _effect(effect) for path, effect in effects.items()},
        "prediction": prediction(records),
    }


def _effect(effect: Effect) -> dict[str, float]:
    change, low, high = effect.change
    values = {"change": change, "low": low, "high": high, "relative": effect.rise.mean}
    return values | {"moved": effect.moved, "loss": effect.loss}


def prediction(sites: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how well drawn operands predict the relative L2 error on real ones.

    Over all sites, roles and FP8 candidates: Spearman's rank correlation, the mean of
    |predicted / real - 1|, and the places whose verdict differs from that on real
    operands. Empty if none were captured.
    """
    found = {}
    for source in ("learned", "normal"):
        values, wrong = [], []
        for site, role, name, record in _candidates(sites):
            pair = (
                record["errors"][x]["relative_l2"]["mean"] for x in (source, "real")
            )
            values.append(tuple(pair))
            if record["is_safe_by"][source] != record["is_safe_by"]["real"]:
                wrong.append(f"{site['path']} {role} {name}")
        if values:
            off = [abs(value / real - 1) for value, real in values if real > 0]
            found[source] = {
                "rank_correlation": rank_correlation(np.asarray(values)),
                "mean_deviation": float(np.mean(off)),
                "wrong_verdicts": wrong,
                "count": len(values),
            }
    return found


def _candidates(sites: list[dict[str, Any]]) -> Iterator[tuple[Any, str, str, Any]]:
    """Yields the FP8 candidates that were measured on real operands."""
    for site in sites:
        for role, candidates in site["roles"].items():
            for name, record in candidates.items():
                if name != BF16.name and "real" in record["errors"]:
                    yield site, role, name, record


def rank_correlation(pairs: Float[np.ndarray, "n 2"]) -> float | None:
    """Returns Spearman's rank correlation; None for fewer than three pairs."""
    if len(pairs) < 3 or np.any(np.ptp(pairs, axis=0) == 0):
        return None
    ranks = np.asarray(rankdata(pairs, axis=0))  # equal values share one
    return float(np.corrcoef(ranks.T)[0, 1])


def _survey_site(
    site: nn.Site,
    stats: SiteStats,
    captured: list[Operands],
    config: SurveyConfig,
    limits: Limits,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the record of a site, on "learned", "normal" and "real" operands."""
    spec, rows = site.spec, min(site.spec.m, config.rows)
    keys = jax.random.split(jax.random.key(0), config.pairs)
    learned = functools.partial(draw_learned, stats=stats, rows=rows)
    normal = functools.partial(draw_normal, sizes=(rows, spec.k, spec.n))
    sources: dict[str, Any] = {"learned": (learned, keys), "normal": (normal, keys)}
    if captured:
        sources["real"] = (lambda operands: operands, captured)
    times = site_times(spec, config.recipes, say) if config.times else {}
    return {
        "path": site.path,
        **_sizes(spec),
        "statistics": summarize(stats),
        "roles": {
            role: {
                name: _judged(role, name, by_source, times, limits)
                for name, by_source in candidates.items()
            }
            for role, candidates in site_errors(spec, sources, config.recipes).items()
        },
        "training_us": times.get("training", {}),
    }


def _sizes(spec: SiteSpec) -> dict[str, int]:
    return {"m": spec.m, "k": spec.k, "n": spec.n}


def _judged(
    role: Role,
    name: str,
    by_source: dict[str, dict[str, Interval]],
    times,
    limits: Limits,
) -> dict[str, Any]:
    """Returns a candidate's errors, time and verdict at a role."""
    gain = speedup(times, role, name)
    errors = {
        source: {measure: value._asdict() for measure, value in errors.items()}
        for source, errors in by_source.items()
    }
    record = {"errors": errors, "us": times.get(role, {}).get(name), "speedup": gain}
    if name == BF16.name:
        return record
    verdicts = {source: judge(x, gain, limits) for source, x in by_source.items()}
    is_safe_by = {source: x["is_safe"] for source, x in verdicts.items()}
    return record | {"is_safe_by": is_safe_by} | verdicts["learned"]


def _capture(
    run: Run, state: TrainState, config: SurveyConfig
) -> list[dict[str, Sample]]:
    """Returns the operands of all sites in some validation batches, by path."""
    made = run.planned, run.placement, Capture(max_rows=config.rows)
    objective = tasks.objective_of(run.config.optim)
    step = jax.jit(make_observe_step(*made, objective))
    batches = held_out(run, config.captured_batches)
    state = dataclasses.replace(state, probe={})
    return [nn.by_path(step(state, batch)) for batch in batches]
