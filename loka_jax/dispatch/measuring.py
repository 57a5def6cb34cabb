"""Measures every candidate at one site, in this process.

right    the whole site, forward and backward, against the float32 product of the same
         quantized operands: see `measure.checking`
errors   of each product in each recipe, on operands drawn from Probe's statistics
times    kernel time of the whole site, its operands out of the L2
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from loka_jax.dispatch.site_programs import site_programs
from loka_jax.dispatch.table import MEASURES, Entry, RoleErrors
from loka_jax.measure.checking import chain_spec, why_wrong
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.measure.intervals import Interval
from loka_jax.measure.passes import (
    Operands,
    as_read,
    in_chains,
    inference,
    num_rotated,
    training,
)
from loka_jax.measure.site_errors import draw_learned, draw_normal, site_errors
from loka_jax.measure.timing import Case, KernelTime, time_kernels
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.probe.capture import Operands as Drawn
from loka_jax.probe.site import SiteStats
from loka_jax.recipe import RECIPES
from loka_jax.site import BF16, Choice, SiteSpec
from loka_jax.terminal import one_line

_FP8_RECIPES = tuple(name for name in RECIPES if name.startswith("fp8"))
_MAX_CHAINED = 3

# By pass: a function and its sets of arguments.
type _Programs = dict[str, Case]
type _Times = dict[str, dict[str, float]]
type _Begin = Callable[[str], None]
type _Check = Callable[[SiteSpec, Choice], str | None]


class Job(NamedTuple):
    """A site to measure.

    Attributes:
        spec: the site.
        choices: candidates to time; empty to measure errors only.
        stats: Probe's statistics of the operands; None for N(0, 1).
        source: name of the operands in the table.
        pairs: draws for the errors; 0 to measure none.
        rows: most rows of these draws.
        seed: of all draws.
        is_serial: compile one program after another, to find the one that crashes.
        passes: to time, "training" and "inference".
        in_chain: whether to time the passes as parts of a chain, too.
    """

    spec: SiteSpec
    choices: tuple[Choice, ...]
    stats: SiteStats | None = None
    source: str = "N(0, 1)"
    pairs: int = 0
    rows: int = 0
    seed: int = 0
    is_serial: bool = False
    passes: tuple[str, ...] = ("training", "inference")
    in_chain: bool = True


def measure_site(
    job: Job,
    begin: _Begin,
    alone: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    errors_of: Callable[[Job], RoleErrors] | None = None,
    check: _Check = why_wrong,
) -> Entry:
    """Returns the measurements of a site.

    Args:
        job: the site and its candidates.
        begin: called with the name of the candidate that runs next, "" for several at a
            time: the last name is known if a candidate ends the process.
        alone: a context in which no other process uses the GPU, for times.
        errors_of: returns the errors of all products; `measure_errors` if None.
        check: returns what is wrong with a candidate, or None.
    """
    begin("")
    errors = {job.source: (errors_of or measure_errors)(job)} if job.pairs else {}
    if not job.choices:
        return Entry(errors=errors)
    draw = _draw(job, job.spec.m)
    sets = [as_read(draw(key)) for key in _keys(job, num_rotated(job.spec))]
    compiled, failures = _compile_candidates(job, sets, begin)
    alone_specs = dict.fromkeys(job.choices, job.spec)
    right = _right(alone_specs, failures, begin, check)
    begin("")
    with alone():
        times = _time({choice.name: compiled[choice.name] for choice in right})
    fastest = _fastest_kernels(times) if job.in_chain else []
    chain_specs = {choice: chain_spec(job.spec, choice) for choice in fastest}
    chained = _right(chain_specs, failures, begin, check)
    times = _without(times, failures)
    cases = _chain_cases(job, chained, sets, begin)
    if cases:
        with alone():
            times |= _by_pass(time_kernels(cases))
    entry = Entry(times, errors, failures)
    entry.programs = site_programs(job.spec, entry.passes())
    return entry


def measure_errors(job: Job) -> RoleErrors:
    """Returns the errors of all products in all recipes."""
    draw = _draw(job, min(job.spec.m, job.rows))
    sources = {"drawn": (draw, _keys(job, job.pairs))}
    errors = site_errors(job.spec, sources, _FP8_RECIPES)
    return {role: _finite(candidates) for role, candidates in errors.items()}


def _finite(
    candidates: Mapping[str, Mapping[str, Mapping[str, Interval]]],
) -> dict[str, dict[str, Interval]]:
    """Returns the errors that a table keeps, by recipe: XLA's, where all are finite."""
    by_recipe = {}
    for name, by_source in candidates.items():
        provider, _, recipe = name.partition(" ")
        measures = {measure: by_source["drawn"][measure] for measure in MEASURES}
        is_finite = all(math.isfinite(error.high) for error in measures.values())
        if provider == "xla" and is_finite:
            by_recipe[recipe] = {m: _rounded(error) for m, error in measures.items()}
    return by_recipe


def _rounded(interval: Interval) -> Interval:
    """Returns an interval with four digits, so that the table can be read."""
    return Interval(*(float(f"{value:.4g}") for value in interval))


def _keys(job: Job, count: int) -> Array:
    return jax.random.split(jax.random.key(job.seed), count)


def _draw(job: Job, rows: int) -> Callable[[Array], Drawn]:
    if job.stats is None:
        sizes = (rows, job.spec.k, job.spec.n)
        return functools.partial(draw_normal, sizes=sizes)
    return functools.partial(draw_learned, stats=job.stats, rows=rows)


def _compile_candidates(
    job: Job, sets: Sequence[Operands], begin: _Begin
) -> tuple[dict[str, _Programs], dict[str, str]]:
    """Returns each candidate's compiled passes, and why others have none."""
    cases, owners, failures = {}, {}, {}
    for choice in job.choices:
        why_not = resolve(job.spec, choice, local_device()).why_not
        if why_not is not None:
            failures[choice.name] = f"does not run: {why_not}"
            continue
        for pass_name in job.passes:
            make = {"training": training, "inference": inference}[pass_name]
            name = _program_name(pass_name, choice)
            if name not in cases:
                cases[name], owners[name] = make(choice, job.spec, sets), choice.name
    programs = _compile(job, cases, owners, begin)
    compiled: dict[str, _Programs] = {}
    for choice in job.choices:
        if choice.name in failures:
            continue
        for pass_name in job.passes:
            program = programs[_program_name(pass_name, choice)]
            if isinstance(program, Exception):
                failures[choice.name] = f"does not compile: {one_line(program)}"
            else:
                compiled.setdefault(choice.name, {})[pass_name] = program
    return compiled, failures


def _program_name(pass_name: str, choice: Choice) -> str:
    """Returns a name that choices with the same program share.

    Inference has no backward pass.
    """
    if pass_name == "inference":
        return f"{pass_name}:{choice.provider} {choice.recipe.fwd}"
    return f"{pass_name}:{choice.name}"


def _compile(
    job: Job, cases: dict[str, Case], owners: dict[str, str], begin: _Begin
) -> dict[str, Case | Exception]:
    """Returns passes as they are timed, or why one does not compile."""
    programs = {
        name: (case.function, case.arguments[0]) for name, case in cases.items()
    }
    compiled: dict[str, Any] = {}
    if job.is_serial:
        for name, program in programs.items():
            begin(owners[name])
            compiled |= compile_all({name: program})
    else:
        # Autotuning of bfloat16 finds kernels that the other programs share.
        first = {k: v for k, v in programs.items() if owners[k] == BF16.name}
        compiled = compile_all(first) if first else {}
        compiled |= compile_all({k: v for k, v in programs.items() if k not in first})
    return {
        name: program
        if isinstance(program, Exception)
        else Case(program, [leaves(arguments) for arguments in cases[name].arguments])
        for name, program in compiled.items()
    }


def _right(
    specs: Mapping[Choice, SiteSpec],
    failures: dict[str, str],
    begin: _Begin,
    check: _Check,
) -> list[Choice]:
    """Returns the candidates that are right; adds the others to `failures`.

    Args:
        specs: the site by candidate, in the form in which that is checked.
        failures: by name; candidates with one are not checked.
        begin, check: as in `measure_site`.
    """
    for choice, spec in specs.items():
        if choice.name in failures:
            continue
        begin(choice.name)
        why = check(spec, choice)
        if why is not None:
            is_alone = spec.out == "compute"
            failures[choice.name] = why if is_alone else f"{why}, in chains"
    return [choice for choice in specs if choice.name not in failures]


def _run_once(case: Case):
    return jax.block_until_ready(case.function(*case.arguments[0]))


def _time(candidates: dict[str, _Programs]) -> _Times:
    """Returns microseconds by pass and candidate."""
    # Some candidates share the program of a pass, which is timed once.
    cases: dict[str, Case] = {
        str(id(case)): case
        for programs in candidates.values()
        for case in programs.values()
    }
    times = time_kernels(cases)
    return _by_pass(
        {
            f"{pass_name}:{name}": times[str(id(case))]
            for name, programs in candidates.items()
            for pass_name, case in programs.items()
        }
    )


def _without(times: _Times, failures: Mapping[str, str]) -> _Times:
    """Returns the times of candidates that did not fail."""
    return {
        pass_name: {name: us for name, us in by_name.items() if name not in failures}
        for pass_name, by_name in times.items()
    }


def _fastest_kernels(times: _Times) -> list[Choice]:
    """Returns the candidates to time in chains: kernels that differ in forward cast."""
    training_times = times.get("training", {})
    chained: list[Choice] = []
    for name in sorted(training_times, key=lambda name: training_times[name]):
        choice = Choice.parse(name)
        is_new = all(other.recipe.fwd != choice.recipe.fwd for other in chained)
        if choice.provider == "pallas" and is_new:
            chained.append(choice)
    return chained[:_MAX_CHAINED]


def _chain_cases(
    job: Job, choices: Sequence[Choice], sets: Sequence[Operands], begin: _Begin
) -> dict[str, Case]:
    """Returns the passes of choices in chains, by pass and name.

    Each runs once, so that a crash is attributed to its candidate.
    """
    passes, owners = {}, {}
    for choice in choices:
        for pass_name, case in in_chains(choice, job.spec, sets).items():
            if not pass_name.startswith(job.passes):
                continue
            name = f"{pass_name}:{choice.name}"
            passes[name], owners[name] = case, choice.name
    cases = {}
    for name, program in _compile(job, passes, owners, begin).items():
        if isinstance(program, Exception):
            continue
        cases[name] = program
        begin(owners[name])
        _run_once(program)
    if cases:
        begin("")
    return cases


def _by_pass(times: Mapping[str, KernelTime]) -> _Times:
    """Returns microseconds by pass, and by candidate, from keys "PASS:CANDIDATE"."""
    by_pass: _Times = {}
    for key, time in times.items():
        pass_name, _, name = key.partition(":")
        by_pass.setdefault(pass_name, {})[name] = round(time.median_us, 2)
    return by_pass
