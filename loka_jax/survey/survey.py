"""Surveys every site of a trained model, and says where FP8 is safe and fast.

statistics  --draw-->  operands  --candidates-->  errors, times  -->  verdicts
real operands of some batches   ----------------> errors that were to be predicted
held-out batches, one site in FP8  -------------> effect on the loss
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.scipy.stats import rankdata

from loka_jax import nn
from loka_jax.data import Position
from loka_jax.dispatch.policy import healthy
from loka_jax.probe.capture import Capture, Operands
from loka_jax.probe.site import SiteStats
from loka_jax.recipe import ROLES, Role, get_recipe
from loka_jax.survey import times as times_lib
from loka_jax.survey.candidates import BF16
from loka_jax.survey.config import SurveyConfig
from loka_jax.survey.errors import draw_learned, survey_errors
from loka_jax.survey.sensitivity import can_be_fp8, sensitivity
from loka_jax.survey.summary import summarize, warnings_of
from loka_jax.survey.verdict import judge
from loka_jax.train.build import Run
from loka_jax.train.record import versions
from loka_jax.train.state import TrainState
from loka_jax.train.step import make_observe_step


def survey(
    run: Run,
    state: TrainState,
    config: SurveyConfig,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Returns what is known and was measured of every site, JSON-ready.

    Args:
        run: the model and its data.
        state: the trained model, with Probe's statistics.
        config: what is measured.
        say: takes a line on what is being done.

    Raises:
        ValueError: if there are no statistics.
    """
    known = nn.by_path(state.probe)
    if not known:
        raise ValueError(
            "this run has no statistics: train it with --probe.every 100 or so."
        )
    sites = [site for site in run.sites if can_be_fp8(site)]
    captured = _capture(run, state, config)
    found, warnings = [], []
    for i, site in enumerate(sites):
        say(f"site {i + 1} of {len(sites)}: {site.path}")
        stats = known[site.path]
        warnings += warnings_of(site.path, stats)
        operands = [batch[site.path] for batch in captured]
        found.append(_survey_site(site, stats, operands, config, say))
    say("effect on the loss")
    effect = sensitivity(
        run, state, recipe=config.loss_recipe, max_batches=config.held_out_batches
    )
    return {
        "model": run.config.name,
        "config": run.config.identity(),
        "survey": dataclasses.asdict(config),
        "versions": versions(),
        "steps": int(state.step),
        "warnings": warnings,
        "sites": found,
        "not_surveyed": [
            {"path": site.path, "m": site.m, "k": site.k, "n": site.n}
            | {"why": site.why_not or f"recipe {site.recipe}"}
            for site in run.sites
            if site not in sites
        ],
        "sensitivity": effect,
        "prediction": prediction(found),
    }


def prediction(sites: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how well drawn operands predict the relative L2 error on real ones.

    Over all sites, roles and FP8 candidates: Spearman's rank correlation, the mean of
    |predicted / real - 1|, and the places whose verdict differs from that on real
    operands. Empty if none were captured.
    """
    pairs: dict[str, list[tuple[float, float]]] = {"learned": [], "normal": []}
    wrong: dict[str, list[str]] = {"learned": [], "normal": []}
    for site in sites:
        for role, candidates in site["roles"].items():
            for name, one in candidates.items():
                if name == BF16 or "real" not in one["errors"]:
                    continue
                real = one["errors"]["real"]["relative_l2"]["mean"]
                for source in pairs:
                    value = one["errors"][source]["relative_l2"]["mean"]
                    pairs[source].append((value, real))
                    if one["is_safe_by"][source] != one["is_safe_by"]["real"]:
                        wrong[source].append(f"{site['path']} {role} {name}")
    if not pairs["learned"]:
        return {}
    return {
        source: {
            "rank_correlation": rank_correlation(*np.asarray(found).T),
            "mean_deviation": float(
                np.mean([abs(value / real - 1) for value, real in found if real > 0])
            ),
            "wrong_verdicts": wrong[source],
            "count": len(found),
        }
        for source, found in pairs.items()
    }


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns Spearman's rank correlation; None for fewer than three pairs."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    ranks = np.asarray(rankdata(np.stack([a, b]), axis=1))  # equal values share one
    return float(np.corrcoef(ranks)[0, 1])


def _survey_site(
    site: nn.Site,
    stats: SiteStats,
    captured: list[Operands],
    config: SurveyConfig,
    say: Callable[[str], None],
) -> dict[str, Any]:
    errors = survey_errors(site, stats, captured, config)
    draw = functools.partial(draw_learned, stats=stats, rows=site.m)
    times = {}
    if config.times:
        times = times_lib.site_times(site, draw, config.recipes, config.seed, say)
    return {
        "path": site.path,
        "m": site.m,
        "k": site.k,
        "n": site.n,
        "norm": site.norm,
        "activation": site.activation,
        "runs": {role: getattr(site, role) for role in ROLES},
        "why_not_fused": site.why_not_fused,
        "statistics": summarize(stats),
        "roles": {
            role: {
                name: _judged(role, name, by_source, times, config)
                for name, by_source in of_role.items()
            }
            for role, of_role in errors.items()
        },
        "training_us": times.get("training", {}),
    }


def _judged(
    role: Role, name: str, by_source: dict[str, Any], times, config: SurveyConfig
) -> dict[str, Any]:
    """Returns a candidate's errors, time and verdict at a role."""
    record: dict[str, Any] = {
        "errors": by_source,
        "us": times.get(role, {}).get(name),
        "speedup": times_lib.speedup(times, role, name),
    }
    if name == BF16:
        return record
    gemm = get_recipe(name.partition(" ")[2]).gemm(role)
    assert gemm is not None
    unit = healthy(gemm)
    verdicts = {
        source: judge(measured, record["speedup"], unit, config.limits)
        for source, measured in by_source.items()
    }
    return (
        record
        | {"is_safe_by": {source: v.is_safe for source, v in verdicts.items()}}
        | verdicts["learned"]._asdict()
    )


def _capture(
    run: Run, state: TrainState, config: SurveyConfig
) -> list[dict[str, Operands]]:
    """Returns the operands of all sites in some validation batches, by path."""
    valid, size = run.splits.valid, run.config.loop.batch_size
    count = min(valid.num_batches(size), config.captured_batches)
    step = jax.jit(
        make_observe_step(run.planned, run.tables, Capture(max_rows=config.rows))
    )
    found = []
    for i in range(count):
        batch = valid.batch(Position(0, i, 0), size, shuffle=False)
        found.append(nn.by_path(step(state, batch)))
    return found
