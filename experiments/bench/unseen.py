"""Times models whose sites no table has: what Dispatch chooses, and what is possible.

    python experiments/bench/unseen.py --out unseen.json

Compute only, as in dispatch.py: kernel time of the dense part in training and in
inference. Arms:

    xla bf16      XLA alone
    auto RECIPE   a recipe at every site, with kernels where they serve
    predicted     Dispatch by predictions alone
    checked       Dispatch as `--plan auto` on a new model: a plan by predictions is
                  checked, and what may be faster is timed (`first_use.check_plan`)
    tuned         Dispatch as `--plan tune`, checked too
    best          Dispatch after all candidates of all sites were measured, alone

All candidates are measured once, without the comparison with the reference; `checked`
and `tuned` get the times of those that they ask for, within no budget. FP8 counts as
accurate enough here: whether it is, a model has to be trained to say.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import tyro
from flax import linen

from experiments.bench import dispatch as bench
from experiments.bench import result as results
from experiments.bench.models import Tower
from loka_jax import nn
from loka_jax.dispatch.at_start import Agenda
from loka_jax.dispatch.candidates import candidates, table_key
from loka_jax.dispatch.first_use import as_if_accurate, check_plan
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import fitted_table
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import is_open, make_plan
from loka_jax.dispatch.pool import measure_all
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.work import roles_of
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.models import Dlrm
from loka_jax.ops.device import local_device
from loka_jax.recipe import RECIPES
from loka_jax.serving import fold

_FP8 = tuple(name for name in RECIPES if name.startswith("fp8"))
_SETS = 2  # of inputs; one alone exceeds the L2


# By name: the model, its rows, and the shape of an example's inputs. Few of the rows
# are powers of two; one number is no multiple of 16.
MODELS: dict[str, tuple[linen.Module, int, tuple[tuple[int, ...], ...]]] = {
    "tower of 1,024": (Tower((1024,) * 5), 8192, ((1024,),)),
    "rms tower": (Tower((768, 512, 384), norm="rms"), 20_000, ((640,),)),
    "wide relu": (
        Tower((4096, 4096, 1024), norm="none", activation="relu"),
        8192,
        ((384,),),
    ),
    "block tower": (
        Tower((1024, 512, 256), norm="block", activation="hard_swish"),
        49_999,
        ((512,),),
    ),
    "layer dlrm": (
        Dlrm(bottom_mlp=(256,), top_mlp=(768, 512, 256), norm="layer", recipe="bf16"),
        12_000,
        ((13,), (26, 64)),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        models: of those above.
        shrink: by which the rows are divided, to try the benchmark.
        recipes: forced everywhere.
        workers: processes that compile at a time.
    """

    out: pathlib.Path | None = None
    models: tuple[str, ...] = tuple(MODELS)
    shrink: int = 1
    recipes: tuple[str, ...] = (
        "fp8_tensorwise",
        "fp8_rowwise",
        "fp8_tensorwise_delayed_bf16_drhs",
    )
    workers: int = 14


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    result = results.head("unseen", arguments) | {"models": {}}
    for name in arguments.models:
        result["models"][name] = measure(name, arguments)
        results.write(arguments.out, result)
    return result


def measure(name: str, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of all arms of a model, and the plans."""
    model, rows, shapes = MODELS[name]
    rows = max(rows // arguments.shrink, 1)
    shapes = tuple((rows, *shape) for shape in shapes)
    inputs = [bench.make_inputs(shapes, seed) for seed in range(_SETS)]
    sites = nn.list_sites(model.clone(recipe="fp8_rowwise"), *inputs[0])
    fitted = fitted_table("NVIDIA H200")
    models = {"predicted": _model(Table(header_here()), fitted)}
    every = _measured(sites, arguments.workers)
    models["best"] = _model(every, fitted)
    asked = {name: Asked(every) for name in ("checked", "tuned")}
    models["checked"] = _checked(sites, models["predicted"], asked["checked"])
    agenda = Agenda(sites, models["predicted"])
    while (job := agenda.next_job()) is not None:
        for _, part in asked["tuned"].measure([job]):
            agenda.learn(job, part)
    models["tuned"] = _checked(sites, agenda.performance, asked["tuned"])
    arms, plans = _arms(model, sites, models, arguments.recipes)
    times = _times(arms, inputs)
    _print(name, times)
    return {
        "rows": rows,
        "times": times,
        "plans": plans,
        "candidates": sum(len(x.times["training"]) for x in every.sites.values()),
        "asked": {name: own.rounds for name, own in asked.items()},
    }


class Asked:
    """Measures jobs by looking them up.

    Attributes:
        rounds: the number of candidates in each round.
    """

    def __init__(self, every: Table):
        """Takes the times of all candidates."""
        self._every = every
        self.rounds: list[int] = []

    def measure(
        self, jobs: Sequence[Job], _: float = math.inf
    ) -> Iterator[tuple[Job, Table]]:
        """Yields each job and its times, as `at_start.measure_into_cache` does."""
        self.rounds.append(len(jobs))
        for job in jobs:
            known = self._every.sites[job.spec]
            (name,) = (choice.name for choice in job.choices)
            times = {
                p: {name: known.times[p][name]}
                for p in job.passes
                if name in known.times[p]
            }
            failures = {name: known.failures[name]} if name in known.failures else {}
            entry = Entry(times, failures=failures)
            yield job, Table(self._every.header, {job.spec: entry})


def _checked(sites, performance: PerformanceModel, asked: Asked) -> PerformanceModel:
    """Returns what is known after the checks of the plans of both passes."""
    errors = as_if_accurate(list(filter(is_open, sites)))
    for name in ("training", "inference"):
        make = functools.partial(make_plan, sites, roles=roles_of(name), errors=errors)
        performance = check_plan(
            make,
            sites,
            performance,
            math.inf,
            _quiet,
            pass_name=name,
            measure=asked.measure,
        ).performance
    return performance


def _model(table: Table, fitted: Table | None) -> PerformanceModel:
    return PerformanceModel.of(table, fitted=fitted, device=local_device())


def _measured(sites, workers: int) -> Table:
    """Returns the times of all candidates of all sites."""
    table, device = Table(header_here()), local_device()
    specs = dict.fromkeys(table_key(site.spec) for site in filter(is_open, sites))
    jobs = [
        Job(spec, (choice,), in_chain=False, is_judged=False)
        for spec in specs
        for choice in candidates(spec, device)
    ]
    for job, entry in measure_all(jobs, workers, _quiet):
        table = table.merged(Table(table.header, {job.spec: entry}))
        for choice, why in entry.failures.items():
            print(f"{job.spec}: {choice}: {why}", flush=True)
    return table


def _quiet(sentence: str):
    """Takes the lines of the workers."""


def _arms(model, sites, models: dict[str, PerformanceModel], recipes):
    """Returns the planned model of each arm by pass, and the names in its plans."""
    free = list(filter(is_open, sites))
    both = {"xla bf16": bench.forced(model, free, "xla bf16")}
    for recipe in ("bf16", *recipes):
        both[f"auto {recipe}"] = nn.Planned(model.clone(recipe=recipe))
    arms = {"training": dict(both), "inference": dict(both)}
    plans: dict[str, Any] = {}
    errors = as_if_accurate(free)
    for arm, performance in models.items():
        for name in arms:
            roles = roles_of(name)
            plan = make_plan(sites, performance, roles=roles, errors=errors)
            arms[name][arm] = nn.Planned(model.clone(recipe="bf16"), plan.choices)
            plans[f"{name} {arm}"] = {
                path: {
                    "choice": decision.choice.name,
                    "speedup": decision.speedup,
                    "spread": decision.spread,
                }
                for path, decision in plan.decisions
            }
    return arms, plans


def _times(arms, inputs) -> dict[str, dict[str, Any]]:
    programs = {}
    for arm, planned in arms["training"].items():
        variables = bench.initialized(planned.by_xla(), inputs[0])
        if planned.is_delayed:
            planned = planned.with_initialized_scales()
        run = functools.partial(bench.train_pass, planned)
        programs[f"training {arm}"] = (run, variables)
    for arm, planned in arms["inference"].items():
        variables = bench.initialized(planned.by_xla(), inputs[0])
        if planned.is_delayed:
            planned = planned.with_initialized_scales()
        folded = fold(planned.apply, variables, *inputs[0])
        programs[f"inference {arm}"] = (folded.function, folded.ready)
    compiled = compile_all(
        {key: (run, (params, *inputs[0])) for key, (run, params) in programs.items()}
    )
    cases = {}
    for key, program in compiled.items():
        if isinstance(program, Exception):
            print(f"{key} does not compile: {str(program)[:300]}", flush=True)
            continue
        params = programs[key][1]
        cases[key] = Case(program, [leaves((params, *arrays)) for arrays in inputs])
    return {key: timing._asdict() for key, timing in time_kernels(cases).items()}


def _print(name: str, times: dict[str, dict[str, Any]]):
    print(f"{name}: kernel time, and over the fastest arm of the pass")
    for key, timing in sorted(times.items(), key=lambda item: item[1]["median_us"]):
        pass_name = key.partition(" ")[0]
        best = min(t["median_us"] for k, t in times.items() if k.startswith(pass_name))
        us = timing["median_us"]
        print(f"  {us:7.0f} us  {us / best:5.2f}x  {key}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
