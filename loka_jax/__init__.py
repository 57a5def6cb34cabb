"""FP8 that pays in large recommendation models: Probe, Mods, Dispatch, in JAX."""

import importlib
import os
import types
import typing
from collections.abc import Collection, Mapping, Sequence

from loka_jax import checked, chosen

if typing.TYPE_CHECKING:
    from loka_jax.fitting import FittedRun
    from loka_jax.predict import Predictor

__version__ = "0.2.0"
# The modules that users import. All others are internal.
PUBLIC = (
    *("nn", "models", "optim", "data", "predict", "serving", "fitting"),
    *("fp8", "recipe", "scaling", "site", "quality"),
    *("ops.matmul", "ops.embedding", "ops.collectives", "ops.exchange"),
    *("probe.site", "probe.sampling"),
    *("dispatch.adopt", "dispatch.plan", "dispatch.policy", "dispatch.local"),
    "dispatch.site_table",
)


def _why_wrong(family: str) -> str | None:
    from loka_jax.dispatch import family_checks  # it imports all that runs kernels

    return family_checks.why_wrong(family)


def _choose(
    sites: Sequence[typing.Any], in_float32: Collection[str]
) -> Mapping[str, chosen.Chosen]:
    from loka_jax.dispatch import by_default

    return by_default.choose(sites, in_float32)


checked.use(_why_wrong)
chosen.use(_choose)


def __getattr__(name: str) -> types.ModuleType:
    """Imports a public module when it is asked for: `loka_jax.nn`."""
    if name in PUBLIC:
        return importlib.import_module(f"loka_jax.{name}")
    raise AttributeError(f"module 'loka_jax' has no attribute {name!r}")


def load(
    run: str | os.PathLike,
    *,
    plan: typing.Literal["saved", "off"] = "saved",
    shards: int = 1,
) -> "Predictor":
    """Returns a trained run, ready to score rows: see `loka_jax.predict.load`.

    model = loka_jax.load("runs/my_run")
    scores = model.scores(table)  # pandas, pyarrow, or a dict of columns
    """
    from loka_jax import predict  # not before it is needed: it imports all of JAX

    return predict.load(run, plan=plan, shards=shards)


def fit(data: typing.Any, **options: typing.Any) -> "FittedRun":
    """Trains a model on a table and returns the run: see `loka_jax.fitting.fit`.

    run = loka_jax.fit("clicks.parquet", label="click", model="dcnv2")
    run.evaluate(new_rows)
    """
    from loka_jax import fitting

    return fitting.fit(data, **options)
