"""The lines of metrics.jsonl: the numbers of a run at a step."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.nn import by_path
from loka_jax.optim import OptimConfig
from loka_jax.probe.site import SiteStats
from loka_jax.recipe import OPERANDS
from loka_jax.train import metrics
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.step import named_sites
from loka_jax.train.tasks import by_task, select
from loka_jax.train.watch.alarm import Seen
from loka_jax.train.watch.host_state import Progress

_STATM = pathlib.Path("/proc/self/statm")


def training(
    run: Run, state: TrainState, progress: Progress, rate: float | None
) -> dict[str, Any]:
    """Returns the line on the training examples since the one before, with a rate."""
    names = run.splits.train.schema.labels
    parts = map(metrics.compute, metrics.split_tasks(state.metrics))
    values = by_task(dict(zip(names, parts, strict=True)))
    skipped = int(state.skipped)
    lr = float(jnp.asarray(run.schedule(progress.step - skipped)))
    return _line("train", progress) | {
        **select(values, {"loss": "logloss", "ne": "ne"}),
        "examples_per_second": rate,
        "lr": lr * progress.plateau.lr_scale,
        "grad_norm": float(state.grad_norm),
        "skipped_steps": skipped,
        "bad_ids": int(state.bad_ids),
        **memory_bytes(),
        **run.placement.numbers(),
    }


def evaluation(progress: Progress, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the line on an evaluation that gave the `quality` in `values`."""
    return _line("eval", progress) | {"split": "valid"} | values


def day(progress: Progress) -> dict[str, Any]:
    """Returns the line on a day's rows before the run is trained on them."""
    return _line("day", progress) | {"split": "train"} | progress.days[-1]


def measure(line: dict[str, Any], optim: OptimConfig) -> float | None:
    """Returns the value in an evaluation's line by which it is the best, or a stall."""
    if optim.best_task is not None:
        line = line["tasks"][optim.best_task]
    return line[optim.best_by]


def _line(kind: str, progress: Progress) -> dict[str, Any]:
    return {
        "step": progress.step,
        "epoch": progress.position.epoch,
        "kind": kind,
        "examples": progress.examples,
        "seconds": round(progress.seconds, 3),
    }


def memory_bytes() -> dict[str, int | None]:
    """Returns the most bytes held on the device so far, and those on the host now.

    Each is None where the backend, such as the CPU, or the system does not tell.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    host = None
    if _STATM.exists():
        host = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"device_peak_bytes": stats.get("peak_bytes_in_use"), "host_bytes": host}


def scales(state: TrainState) -> dict[str, float]:
    """Returns the scale_inv of every operand of the sites with delayed scaling."""
    sites = named_sites(state)
    return _by_operand({path: site.scale_inv for path, site in sites.items()})


def amaxes(state: TrainState) -> dict[str, float]:
    """Returns the amaxes of the batch observed last, by site and operand."""
    return _by_operand(
        {
            path: jnp.stack(
                [getattr(stats, x).elements.read()["last_amax"] for x in OPERANDS], -1
            )
            for path, stats in by_path(state.probe).items()
            if isinstance(stats, SiteStats)
        }
    )


def monitors(seen: Mapping[str, Seen]) -> dict[str, float]:
    """Returns the monitors of the step observed last, by site and monitor."""
    return {
        f"{path}/{name}": value
        for path, site in seen.items()
        for name, value in site.line().items()
    }


def _by_operand(tables: dict[str, Any]) -> dict[str, float]:
    """Returns the entries of tables with one per operand, by "site/operand".

    Of a stack of layers, a table of such, they are the largest.
    """
    tables = jax.device_get(tables)
    return {
        f"{path}/{operand}": float(np.max(table[..., i]))
        for path, table in tables.items()
        for i, operand in enumerate(OPERANDS)
    }
