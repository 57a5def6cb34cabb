"""Scales and amaxes of the operands of a model's sites, for the log lines."""

from typing import Any

import jax

from loka_jax.nn import by_path
from loka_jax.recipe import OPERANDS
from loka_jax.train.state import TrainState
from loka_jax.train.step import named_sites


def scales(state: TrainState) -> dict[str, float]:
    """Returns the scale_inv of every operand of the sites with delayed scaling."""
    sites = named_sites(state)
    return _by_operand({path: site.scale_inv for path, site in sites.items()})


def amaxes(state: TrainState) -> dict[str, float]:
    """Returns the amaxes of the batch observed last, by site and operand."""
    return _by_operand(
        {
            path: [getattr(stats, operand).tails.last_amax for operand in OPERANDS]
            for path, stats in by_path(state.probe).items()
        }
    )


def _by_operand(tables: dict[str, Any]) -> dict[str, float]:
    """Returns the entries of tables with one per operand, by "site/operand"."""
    tables = jax.device_get(tables)
    return {
        f"{path}/{operand}": float(table[i])
        for path, table in tables.items()
        for i, operand in enumerate(OPERANDS)
    }
