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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import fp8
from loka_jax.choice import Choice
from loka_jax.dispatch.candidates import SiteKey
from loka_jax.dispatch.chains import hands_on
from loka_jax.dispatch.table import MEASURES, Entry, Interval, RoleErrors
from loka_jax.fp8 import E4M3
from loka_jax.nn import Activations, Site
from loka_jax.ops.plan import Out, hand_over
from loka_jax.probe.capture import Operands
from loka_jax.probe.compiling import UNTUNED, compile_all, leaves
from loka_jax.probe.site import SiteStats
from loka_jax.probe.timing import Case, time_kernels
from loka_jax.quality import relative_l2
from loka_jax.recipe import get_recipe
from loka_jax.survey.config import FP8_RECIPES
from loka_jax.survey.errors import draw_learned, draw_normal, site_errors
from loka_jax.survey.times import (
    operand_amaxes,
    rotated,
    run_site,
    scaling_state,
    train_site,
)

# A kernel may add this to what its recipe costs: factor, and relative L2.
_SLACK, _ROUNDING = 1.25, 0.01
_MOST_CHAINED = 3
_MOST = 0.5  # relative L2 beyond which nothing is right, XLA included
_FLOAT32 = Choice("xla", get_recipe("f32"))


class Job(NamedTuple):
    """What is to be measured.

    Attributes:
        site: where.
        choices: whom.
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
    errors = _errors(job)
    draw = _draw(job, job.site.m)
    operands = [_as_read(draw(key)) for key in _keys(job, rotated(job.site))]
    compiled, failures = _compiled(job, operands[0], begin)
    right = {}
    reference = _results(
        _program(_FLOAT32, job.site, operands[0], train_site), operands
    )
    known: dict[str, dict[str, float]] = {}
    for choice in job.choices:
        if choice.name in failures:
            continue
        begin(choice.name)
        why_not, known[choice.name] = _check(
            choice, compiled[choice.name], reference, operands[0], known
        )
        if why_not is None:
            right[choice.name] = compiled[choice.name]
        else:
            failures[choice.name] = why_not
    begin("")
    with alone():
        times = _times(right, operands)
    cases = _chain_cases(job, _chained(times), operands, begin)
    if cases:
        with alone():
            times |= _medians(cases)
    return Entry(times, {job.source: errors}, failures)


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


def _chain_cases(
    job: Job, chosen: Sequence[Choice], operands: list[tuple], begin
) -> dict[str, Case]:
    """Returns what times choices where lhs, or what they make, is in FP8.

    Each has run once, for it to be known whose does not.
    """
    if not chosen:
        return {}
    handed = [(_hand_over(job.site, lhs), rhs, g) for lhs, rhs, g in operands]
    programs, owners, read = {}, {}, {}
    for choice in chosen:
        forms: list[tuple[str, Sequence[tuple], Out]] = [(" out", operands, "fp8")]
        if hands_on(choice, choice):
            forms.append((" in", handed, "wide"))
            forms.append((" in out", handed, "fp8"))
        for what, run in (("training", train_site), ("inference", _infer)):
            for form, sets, out in forms:
                name = f"{what}{form}:{choice.name}"
                program = _program(choice, job.site, operands[0], run, out=out)
                programs[name] = (program, sets[0])
                owners[name], read[name] = choice.name, sets
    if job.is_serial:
        compiled = _compile_serially(programs, owners, begin)
    else:
        compiled = compile_all(programs)
    cases = {}
    for name, program in compiled.items():
        if isinstance(program, Exception):
            continue
        cases[name] = Case(program, [leaves(one) for one in read[name]])
        begin(owners[name])
        jax.block_until_ready(program(*cases[name].arguments[0]))
    begin("")
    return cases


def _hand_over(site: SiteKey, lhs: Array) -> Activations:
    """Returns rows as a site before this one hands them on."""
    if hand_over(site.norm) == "row":
        return Activations(lhs, fp8.quantize(lhs, E4M3, axes=(1,)))
    scale_inv = fp8.compute_scale_inv(fp8.amax(lhs), E4M3)
    return Activations(lhs, fp8.cast(lhs, scale_inv, E4M3))


def _keys(job: Job, count: int) -> Array:
    return jax.random.split(jax.random.key(job.seed), count)


def _draw(job: Job, rows: int) -> Callable[[Array], Operands]:
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
                measure: Interval(**by_source["drawn"][measure]) for measure in MEASURES
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


def _compiled(job: Job, operands: tuple, begin) -> tuple[dict[str, dict], dict]:
    """Returns each candidate's compiled passes, and why others have none."""
    programs, owners = {}, {}
    for choice in job.choices:
        for what, run in (("training", train_site), ("inference", _infer)):
            name = _program_name(what, choice)
            owners.setdefault(name, choice.name)
            programs[name] = (_program(choice, job.site, operands, run), operands)
    if job.is_serial:
        compiled = _compile_serially(programs, owners, begin)
    else:
        # The first, bfloat16, finds kernels that the others have in common with it.
        first, *others = programs.items()
        compiled = compile_all(dict([first])) | compile_all(dict(others))
    found: dict[str, dict[str, Any]] = {}
    failures = {}
    for choice in job.choices:
        for what in ("training", "inference"):
            program = compiled[_program_name(what, choice)]
            if isinstance(program, Exception):
                failures[choice.name] = f"does not compile: {_one_line(program)}"
            else:
                found.setdefault(choice.name, {})[what] = program
    return found, failures


def _compile_serially(programs: dict, owners: dict[str, str], begin) -> dict[str, Any]:
    """Returns as `compile_all` does; says before each whose it is."""
    compiled = {}
    for name, program in programs.items():
        begin(owners[name])
        compiled |= compile_all({name: program})
    return compiled


def _program_name(what: str, choice: Choice) -> str:
    """Returns one name for what is one program: backward is no part of inference."""
    if what == "inference":
        return f"{what}:{choice.provider} {choice.recipe.fwd}"
    return f"{what}:{choice.name}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _program(
    choice: Choice, site: Site | SiteKey, operands: tuple, run, *, out: Out = "wide"
) -> Callable:
    """Returns a function of (lhs, rhs, g) that runs a pass of the site."""
    recipe, state = choice.recipe, None
    if recipe.is_delayed:
        state = scaling_state(recipe, operand_amaxes(operands))
        recipe = choice.calibrated().recipe  # as all steps but the first are
    of_site = functools.partial(run_site, site, recipe, state, choice.provider, out=out)
    return functools.partial(run, of_site)


def _infer(run, lhs, rhs, g):
    del g
    out = run(lhs, rhs)
    # In a row of inferences nobody reads the wide form, and it is not made.
    return out.fp8 if isinstance(out, Activations) else out


def _results(program, operands: Sequence[tuple]) -> tuple[Array, Array, Array]:
    lhs, rhs, g = (x.astype(jnp.float32) for x in operands[0])
    options = UNTUNED if jax.default_backend() == "gpu" else {}
    run = jax.jit(program, compiler_options=dict(options))
    y, (dlhs, drhs) = run(lhs, rhs, g)
    return y, dlhs, drhs


def _check(choice: Choice, passes, reference, operands, known):
    """Returns why a candidate is not right, or None; and how far off it is."""
    try:
        y, (dlhs, drhs) = jax.block_until_ready(passes["training"](*operands))
        inferred = jax.block_until_ready(passes["inference"](*operands))
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


def _times(right, operands: list[tuple]) -> dict[str, dict[str, float]]:
    """Returns microseconds by pass and candidate, out of the L2 and in it."""
    cases = {}
    for name, passes in right.items():
        for what, program in passes.items():
            cases[f"{what}:{name}"] = Case(program, operands)
            cases[f"{what} warm:{name}"] = Case(program, operands[:1])
    return _medians(cases)


def _medians(cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """Returns microseconds by what is timed, and by candidate, as a key has them."""
    found: dict[str, dict[str, float]] = {}
    for key, taken in time_kernels(cases).items():
        what, _, name = key.partition(":")
        found.setdefault(what, {})[name] = taken.median_us
    return found


def _as_read(operands: Operands) -> tuple[Array, Array, Array]:
    lhs, rhs, g = operands
    return lhs.astype(jnp.bfloat16), rhs, g.astype(jnp.bfloat16)
