"""Times whole models in each recipe, under torchao's filter, and under Dispatch.

    python experiments/bench/dispatch.py --table table.json --out dispatch.json

As in the recipe table of the LoKA paper. Compute only: the dense part of a model, from
gathered embeddings; kernel time of a training pass (forward, and gradients of
parameters and inputs), and of inference with weights prepared once
(`loka_jax.serving`). Arms:

    xla RECIPE      the recipe at every site, XLA alone
    auto RECIPE     with kernels where they serve
    torchao RECIPE  XLA, at the sites that torchao's filter for the recipe lets through
    dispatch        the choices of the table; sites that it lacks are measured first

Without a GPU times are wall clock: `--batch-size 64 --models fp8_dcnv2 --pairs 2`.

References:
    LoKA, arXiv 2605.10886, table VI; torchao, `float8_utils.py`, the automatic filter.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import linen

from experiments.bench import models
from experiments.bench import result as results
from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.table import Table
from loka_jax.dispatch.tuning import TuneConfig, tune
from loka_jax.measure.compiling import compile_all, leaves, untuned_here
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.recipe import RECIPES
from loka_jax.serving import fold
from loka_jax.site import Choice

_FP8 = tuple(name for name in RECIPES if name.startswith("fp8"))
_SETS = 2  # of inputs; one alone exceeds the L2


# By name: the model, and the shapes of its inputs for a number of rows.
MODELS: dict[str, tuple[linen.Module, Callable[[int], tuple[tuple[int, ...], ...]]]] = {
    "tower": (models.Tower(), lambda m: ((m, 512),)),
    "fp8_dlrm": (models.DLRM, lambda m: ((m, 13), (m, 26, 16))),
    "mlperf_dlrm": (
        models.MLPERF_DLRM.clone(norm="layer"),
        lambda m: ((m, 13), (m, 26, 128)),
    ),
    "fp8_dcnv2": (models.DCNV2, lambda m: ((m, 13), (m, 26, 16))),
}
_SMALL = tuple(MODELS)
MODELS |= {name: models.wide(name) for name in models.wide_names()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        table: to read, and to add missing sites to.
        models: of those above, or wide ones: mlperf_dcnv2, wukong_m, "wukong_m plain".
        batch_size: rows.
        recipes: forced everywhere.
        pairs: draws for errors of sites that the table lacks.
    """

    out: pathlib.Path | None = None
    table: pathlib.Path = pathlib.Path("table.json")
    models: tuple[str, ...] = _SMALL
    batch_size: int = 65536
    recipes: tuple[str, ...] = _FP8
    pairs: int = 16


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints a table, writes and returns the result."""
    result = results.head("dispatch", arguments) | {"models": {}}
    for name in arguments.models:
        result["models"][name] = measure(name, arguments)
        results.write(arguments.out, result)
    return result


def measure(name: str, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of all arms of a model, and the plans of Dispatch."""
    model, shapes = MODELS[name]
    inputs = [make_inputs(shapes(arguments.batch_size), seed) for seed in range(_SETS)]
    sites = nn.list_sites(model.clone(recipe="fp8_rowwise"), *inputs[0])
    table = _complete(name, sites, arguments)
    arms, plans = _arms(model, sites, table, name, arguments.recipes)
    programs, params = {}, None
    for arm, planned in arms.items():
        variables = initialized(planned.by_xla(), inputs[0], params)
        params = variables["params"]  # shared: those of a wide model are gigabytes
        if planned.is_delayed:
            planned = planned.with_initialized_scales()
        if arm != "dispatch inference":
            run = functools.partial(train_pass, planned)
            programs[f"training {arm}"] = (run, variables)
        if arm != "dispatch":
            folded = fold(planned.apply, variables, *inputs[0])
            programs[f"inference {arm}"] = (folded.function, folded.ready)
    compiled = compile_all(
        {key: (run, (params, *inputs[0])) for key, (run, params) in programs.items()}
    )
    cases, failed = {}, {}
    for key, program in compiled.items():
        if isinstance(program, Exception):
            failed[key] = str(program)[:300]
            continue
        params = programs[key][1]
        cases[key] = Case(program, [leaves((params, *arrays)) for arrays in inputs])
    times = {key: timing._asdict() for key, timing in time_kernels(cases).items()}
    _print(name, times)
    return {"times": times, "failed": failed, "plans": plans}


def _complete(name: str, sites, arguments: Arguments) -> Table:
    """Returns the table with all sites of a model, the missing ones measured."""
    path = arguments.table
    table = tables.read(path) if path.exists() else Table(header_here())
    missing = [
        site
        for site in sites
        if site.has_choice and table_key(site.spec) not in table.sites
    ]
    config = TuneConfig(pairs=arguments.pairs)
    for measured in tune(name, missing, {}, config):
        table = tables.add(path, measured)
    return table


def _arms(model, sites, table: Table, name: str, recipes):
    """Returns the planned model of each arm, and the names in the plans of Dispatch."""
    free = [site for site in sites if site.has_choice and site.recipe != "f32"]
    arms = {"xla bf16": forced(model, free, "xla bf16")}
    arms["auto bf16"] = nn.Planned(model.clone(recipe="bf16"))
    for recipe in recipes:
        arms[f"xla {recipe}"] = forced(model, free, f"xla {recipe}")
        arms[f"auto {recipe}"] = nn.Planned(model.clone(recipe=recipe))
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        through = [s for s in free if passes_torchao(recipe, s.spec.k, s.spec.n)]
        arms[f"torchao {recipe}"] = forced(model, through, f"xla {recipe}")
    plans, performance = {}, PerformanceModel.of(table)
    # Times are compared, also of models whose errors were measured on N(0, 1) only.
    sources = {x.rpartition(" ")[0] for site in free for x in _errors_at(table, site)}
    own = (x for x in sorted(sources) if x.partition("@")[0] == name)
    config = next(own, f"N(0, 1) for {name}")
    for arm, roles in (("dispatch", None), ("dispatch inference", ("fwd",))):
        options: dict[str, Any] = {} if roles is None else {"roles": roles}
        plan = make_plan(sites, performance, config=config, **options)
        arms[arm] = nn.Planned(model.clone(recipe="bf16"), plan.choices)
        plans[arm] = {path: choice.name for path, choice in plan.choices}
    return arms, plans


def _errors_at(table: Table, site) -> Collection[str]:
    """Returns the sources of a site's errors in the table."""
    entry = table.sites.get(table_key(site.spec))
    return () if entry is None else entry.errors


def forced(model, sites, choice: str) -> nn.Planned:
    """Returns a model by XLA alone, a choice at some sites, bfloat16 elsewhere."""
    choices = tuple((site.path, Choice.parse(choice)) for site in sites)
    others = model.clone(recipe="bf16", implementation="xla")
    return nn.Planned(others, choices)


def passes_torchao(recipe: str, k: int, n: int) -> bool:
    """Returns True if torchao's automatic filter converts a (k, n) weight."""
    if k % 16 or n % 16:
        return False
    if recipe == "fp8_rowwise":
        return not (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))
    return not (k <= 4096 and n <= 1024)


def make_inputs(shapes, seed: int) -> tuple:
    """Returns normal bfloat16 inputs of these shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )


def initialized(planned: nn.Planned, inputs, params: Any = None) -> dict[str, Any]:
    """Returns variables whose delayed scales are set.

    Args:
        planned: the model.
        inputs: of the model.
        params: its parameters; None to draw them.
    """
    options = untuned_here()

    def init(*inputs):
        variables = dict(planned.init(jax.random.key(0), *inputs))
        if params is not None:
            del variables["params"]
        return variables

    variables = jax.jit(init, compiler_options=options)(*inputs)
    if params is not None:
        variables["params"] = params
    if planned.is_delayed:
        # Without the other gradients: those of a wide model are gigabytes.
        def states(variables, *inputs):
            _, (grads, _) = train_pass(planned, variables, *inputs)
            return grads[OVERWRITE_WITH_GRADIENT]

        set_scales = jax.jit(states, compiler_options=options)
        variables |= {OVERWRITE_WITH_GRADIENT: set_scales(variables, *inputs)}
    return variables


def train_pass(planned: nn.Planned, variables, *inputs):
    """Returns the loss, and the gradients of variables and inputs."""

    def loss(variables, inputs):
        logits = jnp.asarray(planned.apply(variables, *inputs))
        labels = (jnp.arange(logits.shape[0]) % 2).astype(logits.dtype)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    return jax.value_and_grad(loss, argnums=(0, 1))(variables, inputs)


def _print(name: str, times: dict[str, dict[str, Any]]):
    print(f"{name}: speed over XLA bf16, and kernel time")
    for key, timing in sorted(times.items(), key=lambda item: item[1]["median_us"]):
        base = times[f"{key.partition(' ')[0]} xla bf16"]["median_us"]
        time_us = timing["median_us"]
        print(f"  {base / time_us:5.2f}x  {time_us:7.0f} us  {key}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
