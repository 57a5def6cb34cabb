"""Latency of one user's candidates: all in one pass, beside as many single passes.

    python experiments/bench/candidates.py --out candidates.json

Wall clock of a call, from a user's events on the host, as records, until the scores are
there: p50 and p99. A program has as many rows as history, context and candidates need,
in multiples of 128, and runs what Dispatch chooses there if FP8 is accurate enough.
Weights are random; delayed scales are set.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bench import result as results
from experiments.bench.latency import percentiles, platform
from experiments.configs import find_config
from loka_jax import scaling
from loka_jax.data import sequences, transforms
from loka_jax.data.capacities import ladder
from loka_jax.data.events import layout_of
from loka_jax.data.planted_events import schema_of_events
from loka_jax.data.reader import record_dtype_of
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export import loader, rows
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.programs import export_function, logits_function, make_form
from loka_jax.predict.trained import Trained, make_untrained
from loka_jax.recipe import get_recipe
from loka_jax.train.model import model_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        config: a configuration of HSTU.
        histories: events of the user.
        candidates: events that are scored.
    """

    config: str = "fp8_hstu_m"
    histories: tuple[int, ...] = (256, 4096)
    candidates: tuple[int, ...] = (1, 64, 512)


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    result = results.head("candidates", arguments) | {"rows": []}
    cases = itertools.product(arguments.histories, arguments.candidates)
    single: dict[int, float] = {}
    for history, count in results.in_time(cases, result, arguments):
        trained = model_with(arguments.config, history)
        own = percentiles(call_of(trained, history, count))
        row = {"history": history, "candidates": count, **own}
        if count == 1:
            single[history] = own["p50_us"]
        if history in single:
            row["over_single_passes"] = single[history] * count / own["p50_us"]
        result["rows"].append(row)
        print(
            f"history {history:,}, {count:,} candidates: p50 {own['p50_us']:,.0f} us, "
            f"p99 {own['p99_us']:,.0f} us",
            flush=True,
        )


def model_with(name: str, history: int) -> Trained:
    """Returns a model with random weights for histories of so many events."""
    config = find_config(name)
    data = dataclasses.replace(config.data, history=history, targets="last")
    model = config.model.clone(max_length=history + 2)
    config = dataclasses.replace(config, data=data, model=model)
    trained = make_untrained(config, schema_of_events(data))
    one = scaling.stored(jnp.ones(3), get_recipe(model.recipe)).table
    scales = jax.tree.map(lambda _: one, trained.state.fp8)
    return trained._replace(
        state=dataclasses.replace(trained.state, fp8=scales),
        model=model_of(config, trained.schema, scores_candidates=True),
    )


def call_of(trained: Trained, history: int, count: int) -> Callable[[], Any]:
    """Returns a call that scores so many candidates of a user."""
    schema, layout = trained.schema, layout_of(trained.config.data, trained.schema)
    encoding = rows.encoding_of(*inputs_as_given(schema, layout), sequences, transforms)
    size = ladder(layout.longest + count - 1)[0]
    sites = trained.model.list_sites(DispatchPlan(), size)
    plan = plans.make_plan(
        sites,
        local_performance().performance,
        config=trained.source,
        roles=("fwd",),
        errors=as_if_accurate(sites),
    )
    form, state = make_form(trained, platform(), size, plan), trained.state
    weights = {x: getattr(state, x) for x in ("params", "fp8", "batch_stats")}
    inputs = jax.tree.leaves(state.table), *encoding.blank(size)
    logits = logits_function(form.model, trained)
    exported, ready = export_function(form, logits, weights, *inputs)
    run = jax.jit(
        exported.call,
        compiler_options=loader.COMPILER_OPTIONS,
        out_shardings=loader.results_place(form.platform),
    )
    events, tables = events_of(trained, history, count), jax.device_put(inputs[0])
    return lambda: [
        np.asarray(run(ready, tables, *batch))
        for _, batch, _ in encoding.batches(events, (size,))
    ]


def events_of(trained: Trained, history: int, count: int) -> np.ndarray:
    """Returns the records of a user's past events and candidates."""
    rng, schema = np.random.default_rng(0), trained.schema
    events = np.zeros(history + count, record_dtype_of(schema))
    events["ids"] = rng.integers(0, schema.vocab_sizes, events["ids"].shape)
    events["time"] = np.minimum(np.arange(len(events)), history)
    events["label"] = rng.integers(0, 2, len(events))
    events["label"][history:] = np.nan
    return events


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
