"""Measures a candidate at one site, in this process.

right    the whole site, forward and backward, against the float32 product of the same
         quantized operands: see `measure.checking`
errors   of each product in each recipe, on operands drawn from Probe's statistics
times    kernel time of the whole site, its operands out of the L2

Programs are lowered at any time, and compiled too unless the compiler tries kernels on
the GPU; those that are tuned so are compiled, and all are checked, while no process
takes times. Times are taken alone.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax

from loka_jax.dispatch.table import MEASURES, Entry, RoleErrors
from loka_jax.measure.checking import lower_check
from loka_jax.measure.compiling import compile_lowered
from loka_jax.measure.intervals import Interval
from loka_jax.measure.programs import chain_forms, form_spec, num_rotated, operand_sets
from loka_jax.measure.site_errors import site_errors
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.probe.sampling import draw_learned, draw_normal
from loka_jax.probe.site import SiteStats
from loka_jax.recipe import RECIPES
from loka_jax.site import Choice, SiteSpec

# Turns on the GPU: in one of the first kind other processes may compile, and none takes
# times; in one of the second no other process uses the GPU.
TOGETHER, ALONE = "together", "alone"

_FP8_RECIPES = tuple(name for name in RECIPES if name.startswith("fp8"))
# Float32 arrays of the size of the largest operand, at once.
_HELD, _HELD_UNJUDGED = 40, 12

type Turn = Callable[[str], AbstractContextManager]


class Job(NamedTuple):
    """A candidate to check and to time at a site, or errors to measure there.

    Attributes:
        choice: the candidate; None to measure errors.
        stats: Probe's statistics of the operands of the errors; None for N(0, 1).
        source: name of these operands in the table.
        pairs: draws for the errors.
        rows: most rows of these draws.
        passes: to time, "training" and "inference".
        in_chain: whether to time the passes as parts of a chain, too.
        is_judged: compare results with the reference; False for candidates that were
            found right on this device with these kernels.
    """

    spec: SiteSpec
    choice: Choice | None
    stats: SiteStats | None = None
    source: str = ""
    pairs: int = 0
    rows: int = 0
    passes: tuple[str, ...] = ("training", "inference")
    in_chain: bool = False
    is_judged: bool = True

    def __str__(self) -> str:
        """Returns the site and what is measured there."""
        what = f"errors, {self.source}" if self.choice is None else self.choice.name
        return f"{self.spec}: {what}"


def bytes_needed(job: Job) -> int:
    """Returns the bytes of the GPU that a job takes, about.

    Most is the check's, which holds a few references and their errors in float32: a
    site of 8,192 x 4,096 x 4,096 took 5 GB.
    """
    m, k, n = job.spec.m, job.spec.k, job.spec.n
    held = _HELD if job.is_judged else _HELD_UNJUDGED
    return 4 * held * max(m * k, m * n, k * n)


def measure_site(job: Job, turn: Turn) -> Entry:
    """Returns the measurements of a job: errors, or times, or why there are none."""
    if job.choice is None:
        with turn(TOGETHER):
            return Entry(errors={job.source: measure_errors(job)})
    chained = chain_forms(job.spec, job.choice) if job.in_chain else ()
    times: dict[str, dict[str, float]] = {}
    for form in ("", *chained):
        # The last form of a chain has all that the others do.
        is_judged = job.is_judged and form in ("", *chained[-1:])
        found = _measure_form(job, job.choice, form, turn, is_judged=is_judged)
        if isinstance(found, str):
            reason = f"{found}, in chains" if form else found
            return Entry(failures={job.choice.name: reason})
        for pass_name, us in found.items():
            times[f"{pass_name} {form}".strip()] = {job.choice.name: us}
    return Entry(times)


def _measure_form(
    job: Job, choice: Choice, form: str, turn: Turn, *, is_judged: bool
) -> dict[str, float] | str:
    """Returns microseconds by pass, or why a form of a candidate cannot be timed."""
    check = lower_check(form_spec(job.spec, form), choice)
    # Only what is timed is tuned.
    lowered = {
        name: program if name in job.passes else program.untuned()
        for name, program in check.programs.items()
        if is_judged or name != "judge"
    }
    tuned = {name: x for name, x in lowered.items() if x.is_tuned}
    compiled = compile_lowered({n: x for n, x in lowered.items() if n not in tuned})
    with turn(TOGETHER):
        compiled |= compile_lowered(tuned)
        ask = check.why_wrong if is_judged else check.why_not_compiled
        if (reason := ask(compiled)) is not None:
            return reason
    # Only times need the GPU alone: nothing else may wait for one process at a time.
    with turn(ALONE):
        arguments = operand_sets(compiled, num_rotated(job.spec))
        cases = {name: Case(compiled[name], arguments[name]) for name in job.passes}
        times = time_kernels(cases)
    return {name: round(time.median_us, 2) for name, time in times.items()}


def measure_errors(job: Job) -> RoleErrors:
    """Returns the errors of XLA's products in all recipes, where they are finite."""
    rows = min(job.spec.m, job.rows)
    if job.stats is None:
        sizes = (rows, job.spec.k, job.spec.n)
        draw = functools.partial(draw_normal, sizes=sizes)
    else:
        draw = functools.partial(draw_learned, stats=job.stats, rows=rows)
    keys = jax.random.split(jax.random.key(0), job.pairs)
    by_role = site_errors(job.spec, {"drawn": (draw, keys)}, _FP8_RECIPES)
    found: RoleErrors = {}
    for role, candidates in by_role.items():
        found[role] = {}
        for name, by_source in candidates.items():
            provider, _, recipe = name.partition(" ")
            errors = {measure: by_source["drawn"][measure] for measure in MEASURES}
            is_finite = all(math.isfinite(error.high) for error in errors.values())
            if provider == "xla" and is_finite:
                found[role][recipe] = {m: _rounded(e) for m, e in errors.items()}
    return found


def _rounded(interval: Interval) -> Interval:
    """Returns an interval with four digits, so that the table can be read."""
    return Interval(*(float(f"{value:.4g}") for value in interval))
