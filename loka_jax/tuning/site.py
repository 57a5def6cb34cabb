"""Measures every candidate at one site, in this process: right, how wrong, how fast.

right  the whole site, forward and backward, against XLA in float32: a kernel may be as
       wrong as its recipe makes XLA, but not more
wrong  errors of each product in each recipe, on operands drawn from what Probe learned
fast   kernel time of the whole site, operands out of the L2 ("training", "inference")
       and in it (" warm")
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax.dispatch.candidates import BF16, SiteKey
from loka_jax.dispatch.table import MEASURES, Entry, Interval, RoleErrors
from loka_jax.probe.capture import Operands as Drawn
from loka_jax.probe.compiling import UNTUNED, compile_all, leaves
from loka_jax.probe.site import SiteStats
from loka_jax.probe.timing import Case, KernelTime, time_kernels
from loka_jax.quality import relative_l2
from loka_jax.site import Choice
from loka_jax.survey.config import FP8_RECIPES
from loka_jax.survey.errors import draw_learned, draw_normal, site_errors
from loka_jax.survey.times import rotated
from loka_jax.tuning.passes import Operands, exact, in_rows, inference, training

# A kernel may add this to what its recipe costs: factor, and relative L2.
_SLACK, _ROUNDING = 1.25, 0.01
_MOST_CHAINED = 3
_MOST = 0.5  # relative L2 beyond which nothing is right, XLA included


class Job(NamedTuple):
    """What is to be measured.

    Attributes:
        site: where.
        choices: whom; nobody for errors alone, where times are known.
        stats: what Probe knows of the operands; None for N(0, 1).
        source: what they are called in the table.
        pairs: draws for the errors.
        rows: of these draws, at most.
        seed: of all draws.
        is_serial: compile one program after another, to find the one that crashes.
    """

    site: SiteKey
    choices: tuple[Choice, ...]
    stats: SiteStats | None
    source: str
    pairs: int
    rows: int
    seed: int
    is_serial: bool = False


def measure_site(
    job: Job,
    begin: Callable[[str], None],
    alone: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> Entry:
    """Returns what was measured.

    Args:
        job: what is to be.
        begin: told which candidate is next, "" for several at a time, for whoever must
            know if it ends the process.
        alone: a context in which nobody else uses the GPU, for times.
    """
    begin("")
    errors = {job.source: _errors(job)}
    if not job.choices:
        return Entry(errors=errors)
    draw = _draw(job, job.site.m)
    sets = [_as_read(draw(key)) for key in _keys(job, rotated(job.site))]
    compiled, failures = _compiled(job, sets, begin)
    right: dict[str, _Compiled] = {}
    reference = _reference(job.site, sets[0])
    known: dict[str, dict[str, float]] = {}
    for choice in job.choices:
        if choice.name in failures:
            continue
        begin(choice.name)
        why_not, known[choice.name] = _check(
            choice, compiled[choice.name], reference, known
        )
        if why_not is None:
            right[choice.name] = compiled[choice.name]
        else:
            failures[choice.name] = why_not
    begin("")
    with alone():
        times = _times(right)
    cases = _cases_in_rows(job, _chained(times), sets, begin)
    if cases:
        with alone():
            times |= _by_pass(time_kernels(cases))
    return Entry(times, errors, failures)


def _chained(times: dict[str, dict[str, float]]) -> list[Choice]:
    """Returns whom to measure in rows: kernels, the fastest of some forward casts."""
    found: list[Choice] = []
    of_all = times.get("training", {})
    for name in sorted(of_all, key=lambda one: of_all[one]):
        choice = Choice.parse(name)
        is_new = all(one.recipe.fwd != choice.recipe.fwd for one in found)
        if choice.provider == "pallas" and is_new:
            found.append(choice)
    return found[:_MOST_CHAINED]


def _cases_in_rows(
    job: Job, chosen: Sequence[Choice], sets: list[Operands], begin
) -> dict[str, Case]:
    """Returns what times choices in rows of sites, by pass and name.

    Each has run once, for it to be known whose does not.
    """
    passes, owners = {}, {}
    for choice in chosen:
        for what, one in in_rows(choice, job.site, sets).items():
            name = f"{what}:{choice.name}"
            passes[name], owners[name] = one, choice.name
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


def _keys(job: Job, count: int) -> Array:
    return jax.random.split(jax.random.key(job.seed), count)


def _draw(job: Job, rows: int) -> Callable[[Array], Drawn]:
    if job.stats is None:
        sizes = (rows, job.site.k, job.site.n)
        return functools.partial(draw_normal, sizes=sizes)
    return functools.partial(draw_learned, stats=job.stats, rows=rows)


def _errors(job: Job) -> RoleErrors:
    """Returns the errors of all products in all recipes."""
    draw = _draw(job, min(job.site.m, job.rows))
    sources = {"drawn": (draw, _keys(job, job.pairs))}
    found = site_errors(job.site, sources, FP8_RECIPES)
    return {
        role: {
            name.removeprefix("xla "): {
                measure: Interval(**_rounded(by_source["drawn"][measure]))
                for measure in MEASURES
            }
            for name, by_source in of_role.items()
            if name.startswith("xla ")
            and all(
                math.isfinite(by_source["drawn"][measure]["high"])
                for measure in MEASURES
            )
        }
        for role, of_role in found.items()
    }


def _rounded(interval: dict[str, float]) -> dict[str, float]:
    """Returns it to four digits, for a table that one can read."""
    return {name: float(f"{value:.4g}") for name, value in interval.items()}


# By pass: a function and its sets of arguments.
type _Compiled = dict[str, Case]


def _compiled(
    job: Job, sets: list[Operands], begin
) -> tuple[dict[str, _Compiled], dict[str, str]]:
    """Returns each candidate's compiled passes, and why others have none."""
    passes, owners = {}, {}
    for choice in job.choices:
        for what, make in (("training", training), ("inference", inference)):
            name = _program_name(what, choice)
            if name not in passes:
                passes[name], owners[name] = make(choice, job.site, sets), choice.name
    programs = _compile(job, passes, owners, begin)
    found: dict[str, _Compiled] = {}
    failures = {}
    for choice in job.choices:
        for what in ("training", "inference"):
            program = programs[_program_name(what, choice)]
            if isinstance(program, Exception):
                failures[choice.name] = f"does not compile: {_one_line(program)}"
            else:
                found.setdefault(choice.name, {})[what] = program
    return found, failures


def _compile(
    job: Job, passes: dict[str, Case], owners: dict[str, str], begin
) -> dict[str, Case | Exception]:
    """Returns passes as they are timed, or why one does not compile."""
    programs = {name: (one.function, one.arguments[0]) for name, one in passes.items()}
    compiled: dict[str, Any] = {}
    if job.is_serial:
        for name, program in programs.items():
            begin(owners[name])
            compiled |= compile_all({name: program})
    else:
        # bfloat16 finds kernels that the others have in common with it.
        first = {k: v for k, v in programs.items() if owners[k] == BF16.name}
        compiled = compile_all(first) if first else {}
        compiled |= compile_all({k: v for k, v in programs.items() if k not in first})
    return {
        name: found
        if isinstance(found, Exception)
        else Case(found, [leaves(one) for one in passes[name].arguments])
        for name, found in compiled.items()
    }


def _program_name(what: str, choice: Choice) -> str:
    """Returns one name for what is one program: backward is no part of inference."""
    if what == "inference":
        return f"{what}:{choice.provider} {choice.recipe.fwd}"
    return f"{what}:{choice.name}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _reference(site: SiteKey, operands: Operands) -> tuple[Array, Array, Array]:
    """Returns y, dlhs and drhs in float32."""
    function, arguments = exact(site, operands)
    options = UNTUNED if jax.default_backend() == "gpu" else {}
    y, (dlhs, drhs) = jax.jit(function, compiler_options=dict(options))(*arguments)
    return y, dlhs, drhs


def _check(choice: Choice, passes: _Compiled, reference, known):
    """Returns why a candidate is not right, or None; and how far off it is."""
    try:
        y, (dlhs, drhs) = _run_once(passes["training"])
        inferred = _run_once(passes["inference"])
    except Exception as error:  # a candidate's failure is what is to be noted
        return f"does not run: {_one_line(error)}", {}
    found = {
        name: float(relative_l2(ref, x.astype(jnp.float32)))
        for name, ref, x in zip(
            ("y", "dlhs", "drhs", "inferred y"),
            (*reference, reference[0]),
            (y, dlhs, drhs, inferred),
            strict=True,
        )
    }
    by_xla = known.get(Choice("xla", choice.recipe).name, {})
    for name, error in found.items():
        bound = min(_MOST, _SLACK * by_xla.get(name, _MOST) + _ROUNDING)
        if not error <= bound:
            return f"{name} is off by {error:.3g} (relative L2), above {bound:.3g}", {}
    return None, found


def _run_once(case: Case):
    return jax.block_until_ready(case.function(*case.arguments[0]))


def _times(right: dict[str, _Compiled]) -> dict[str, dict[str, float]]:
    """Returns microseconds by pass and candidate, out of the L2 and in it."""
    # Some share the program of a pass, which is timed once.
    cases: dict[int, Case] = {
        id(case): case for passes in right.values() for case in passes.values()
    }
    warm = {
        -key: Case(case.function, case.arguments[:1]) for key, case in cases.items()
    }
    taken = time_kernels({str(key): case for key, case in (cases | warm).items()})
    named = {}
    for name, passes in right.items():
        for what, case in passes.items():
            named[f"{what}:{name}"] = taken[str(id(case))]
            named[f"{what} warm:{name}"] = taken[str(-id(case))]
    return _by_pass(named)


def _by_pass(taken: Mapping[str, KernelTime]) -> dict[str, dict[str, float]]:
    """Returns microseconds by pass, and by candidate, as a key has them."""
    found: dict[str, dict[str, float]] = {}
    for key, time in taken.items():
        what, _, name = key.partition(":")
        found.setdefault(what, {})[name] = round(time.median_us, 2)
    return found


def _as_read(drawn: Drawn) -> Operands:
    lhs, rhs, g = drawn
    return lhs.astype(jnp.bfloat16), rhs, g.astype(jnp.bfloat16)
