"""Latency of an exported model and of its dense part, at several batch sizes.

    python experiments/bench/latency.py --out latency.json

Wall clock of single calls, one after another, from the host's call until the result is
there: p50 and p99.

    dense    from embeddings on the device to logits on the device
    whole    from ids on the host, through the tables, to logits on the host

    xla bf16     the same model by XLA alone, weights in bfloat16
    ours bf16    exported, with what Dispatch chooses in bfloat16 at the batch size
    ours fp8     exported, with what it chooses in any recipe if FP8 is accurate enough

Weights are random; delayed scales are set. Dispatch goes by what is known of the
device and predictions, which are not checked here. Results of XLA's form and ours go
where the loader of exported models puts them.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bench import models
from experiments.bench import result as results
from experiments.configs import find_config
from loka_jax import nn
from loka_jax.data import transforms
from loka_jax.data.generated import schema_of
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.table import RoleErrors
from loka_jax.export import loader
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.programs import (
    Form,
    Platform,
    export_function,
    logits_function,
    make_form,
)
from loka_jax.export.rows import Encoding
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, Site
from loka_jax.predict.trained import Trained, make_untrained
from loka_jax.train.gradients import variables_of

_FEW = 256  # rows that set the delayed scales
_LEAST_CALLS, _LEAST_S = 200, 0.3
_THREADS = 8
_ARMS = ("xla bf16", "ours bf16", "ours fp8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        models: fp8_dlrm, mlperf_dlrm (26 tables of 100,000 rows).
        batches: rows of a call.
        arms: of those above.
    """

    models: tuple[str, ...] = ("fp8_dlrm", "mlperf_dlrm")
    batches: tuple[int, ...] = (1, 16, 128, 1024, 8192)
    arms: tuple[str, ...] = _ARMS


class Case(NamedTuple):
    """What is timed.

    Attributes:
        kind: "dense" or "whole".
        batch: its rows.
        arm: its form.
        prepare: compiles it, and returns a call that waits for its result.
        sites: what runs at each site, if it is ours.
    """

    kind: str
    batch: int
    arm: str
    prepare: Callable[[], Callable[[], Any]]
    sites: dict[str, str]


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    result = results.head("latency", arguments) | {"models": {}}
    for name in arguments.models:
        trained, rows = model_of(name), result["models"].setdefault(name, [])
        for batch in results.in_time(arguments.batches, result, arguments):
            for case, call in _prepared(list(_cases(trained, arguments.arms, batch))):
                row = {"kind": case.kind, "batch": case.batch, "arm": case.arm}
                sites = {"sites": case.sites} if case.sites else {}
                rows.append(row | percentiles(call) | sites)
                print(f"{name}: {_line(rows[-1])}", flush=True)


def model_of(name: str) -> Trained:
    """Returns a model with random weights and delayed scales that are set."""
    config = find_config("fp8_dlrm")
    if name == "mlperf_dlrm":
        config = dataclasses.replace(
            config,
            model=models.MLPERF_DLRM.clone(recipe=config.model.recipe),
            data=dataclasses.replace(config.data, rows=(100_000,) * 26),
            embedding=dataclasses.replace(config.embedding, dim=128),
        )
    trained = make_untrained(config, schema_of(config.data))
    few = [
        jax.random.normal(jax.random.key(i), x.shape)
        for i, x in enumerate(trained.model.inputs(_FEW))
    ]
    by_xla = nn.Planned(config.model).by_xla()
    set_scales = models.initialized(by_xla, few, trained.state.params)
    fp8 = set_scales[OVERWRITE_WITH_GRADIENT]
    return trained._replace(state=dataclasses.replace(trained.state, fp8=fp8))


def _cases(trained: Trained, arms: tuple[str, ...], batch: int) -> Iterator[Case]:
    """Yields the cases of a model at a batch size."""
    config = trained.config
    plain = config.model.clone(recipe="bf16")
    in_bf16 = trained._replace(config=dataclasses.replace(config, model=plain))
    prepare = {
        "xla bf16": functools.partial(_by_xla, in_bf16),
        "ours bf16": functools.partial(_ours, in_bf16, errors_of=_unknown),
        "ours fp8": functools.partial(_ours, trained, errors_of=as_if_accurate),
    }
    for arm, cases_of in prepare.items():
        if arm in arms:
            yield from cases_of(arm, batch)


def _by_xla(trained: Trained, arm: str, batch: int) -> Iterator[Case]:
    form = make_form(trained, platform(), batch, DispatchPlan())
    model = dataclasses.replace(form.model.by_xla(), scales_initialized=False)
    form = form._replace(model=model)
    yield from _exported(trained, form, arm, {}, None)


def _unknown(sites: Sequence[Site]) -> dict[str, RoleErrors]:
    """Returns errors by path with which no site may run in FP8."""
    return {site.path: {} for site in sites}


def _ours(
    trained: Trained,
    arm: str,
    batch: int,
    errors_of: Callable[[Sequence[Site]], dict[str, RoleErrors]],
) -> Iterator[Case]:
    sites = trained.model.list_sites(DispatchPlan(), batch)
    plan = plans.make_plan(
        sites,
        local_performance().performance,
        config=trained.source,
        roles=("fwd",),
        errors=errors_of(sites),
    )
    form = make_form(trained, platform(), batch, plan)
    yield from _exported(trained, form, arm, form.runs, loader.COMPILER_OPTIONS)


def _exported(
    trained: Trained, form: Form, arm: str, sites: dict[str, str], options: Any
) -> Iterator[Case]:
    """Yields the dense part and the whole of a form."""
    batch, model = form.batch_size, trained.model
    variables = variables_of(trained.state)
    dense, rows = (np.zeros(x.shape, x.dtype) for x in model.inputs(batch))
    rows = jnp.asarray(rows, jnp.bfloat16)
    exported, ready = export_function(form, form.model.apply, variables, dense, rows)

    def dense_part():
        run = jax.jit(exported.call, compiler_options=options)
        inputs = jax.device_put((ready, *_drawn(trained, batch, rows.dtype)))
        program = run.lower(*inputs).compile()
        return lambda: program(*inputs).block_until_ready()

    yield Case("dense", batch, arm, dense_part, sites)
    own = {x: getattr(trained.state, x) for x in ("params", "fp8", "batch_stats")}
    logits = logits_function(form.model, trained)
    tables = jax.tree.leaves(trained.state.table)
    blank = Encoding(*inputs_as_given(trained.schema), transforms).blank(batch)
    whole, prepared = export_function(form, logits, own, tables, *blank)

    def from_ids():
        place = loader.results_place(form.platform)
        run = jax.jit(whole.call, compiler_options=options, out_shardings=place)
        inputs = _ids(trained, batch)
        program = run.lower(prepared, tables, *inputs, ()).compile()
        return lambda: np.asarray(program(prepared, tables, *inputs, ()))

    yield Case("whole", batch, arm, from_ids, sites)


def _prepared(cases: list[Case]) -> Iterator[tuple[Case, Callable[[], Any]]]:
    """Yields the cases with their calls, which are compiled at a time."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        calls = list(pool.map(lambda case: case.prepare(), cases))
    yield from zip(cases, calls, strict=True)


def percentiles(call: Callable[[], Any]) -> dict[str, Any]:
    """Returns percentiles of the time of a call."""
    for _ in range(20):
        call()
    times, start = [], time.perf_counter()
    while len(times) < _LEAST_CALLS or time.perf_counter() - start < _LEAST_S:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    p50, p99 = 1e6 * np.percentile(times, (50, 99))
    return {"calls": len(times), "p50_us": float(p50), "p99_us": float(p99)}


def platform() -> Platform:
    """Returns the platform of JAX's default device."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def _drawn(trained: Trained, batch: int, dtype) -> list[jax.Array]:
    """Returns dense features and embeddings, N(0, 1)."""
    dense, rows = trained.model.inputs(batch)
    return [
        jax.random.normal(jax.random.key(0), dense.shape),
        jax.random.normal(jax.random.key(1), rows.shape).astype(dtype),
    ]


def _ids(trained: Trained, batch: int) -> list[np.ndarray]:
    """Returns dense features and ids on the host."""
    rng, sizes = np.random.default_rng(0), trained.schema.vocab_sizes
    return [
        rng.standard_normal((batch, len(trained.schema.dense)), np.float32),
        rng.integers(0, sizes, (batch, len(sizes)), np.int32),
    ]


def _line(row: dict[str, Any]) -> str:
    name = f"{row['kind']} {row['batch']:,} {row['arm']}"
    return f"{name}: p50 {row['p50_us']:,.0f} us, p99 {row['p99_us']:,.0f} us"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
