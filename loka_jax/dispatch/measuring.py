"""Measures candidates at one site, in this process.

right    the whole site, forward and backward, against the float32 product of the same
         quantized operands: see `measure.checking`
errors   of each product in each recipe, on operands drawn from Probe's statistics
times    kernel time of the whole site, its operands out of the L2

Programs are lowered at any time, and compiled too unless the compiler tries kernels on
the GPU; those that are tuned so are compiled, and all are checked, while no process
takes times. Times are taken alone.
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
from loka_jax.measure.check_operands import Trial
from loka_jax.measure.checking import Check, lower_check
from loka_jax.measure.compiling import Lowered, compile_lowered, leaves
from loka_jax.measure.intervals import Interval
from loka_jax.measure.passes import num_rotated
from loka_jax.measure.programs import chain_forms, form_spec
from loka_jax.measure.site_errors import site_errors
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.probe.live_errors import Operands as Drawn
from loka_jax.probe.sampling import draw_learned, draw_normal
from loka_jax.probe.site import SiteStats
from loka_jax.recipe import RECIPES
from loka_jax.site import Choice, SiteSpec
from loka_jax.terminal import one_line

_FP8_RECIPES = tuple(name for name in RECIPES if name.startswith("fp8"))
_MAX_CHAINED = 3
# Float32 arrays of the size of the largest operand, at once.
_HELD, _HELD_UNJUDGED = 40, 12

type _Times = dict[str, dict[str, float]]
type _Begin = Callable[[str], None]
type _LowerCheck = Callable[[SiteSpec, Choice], Check]


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
        digests: whether to digest the programs, for tables that are shipped.
        is_judged: compare results with the reference; False for candidates that were
            found right on this device with these kernels.
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
    digests: bool = True
    is_judged: bool = True

    def split(self, parts: int) -> list["Job"]:
        """Returns jobs that together measure the same, for several processes.

        The candidates are dealt out; the first job measures the errors.
        """
        parts = max(1, min(parts, len(self.choices)))
        jobs = [self._replace(choices=self.choices[i::parts]) for i in range(parts)]
        return [jobs[0], *(job._replace(pairs=0) for job in jobs[1:])]


def bytes_needed(job: Job) -> int:
    """Returns the bytes of the GPU that a job takes, about.

    Most is the check's, which holds a few references and their errors in float32: a
    site of 8,192 x 4,096 x 4,096 took 5 GB.
    """
    m, k, n = job.spec.m, job.spec.k, job.spec.n
    held = _HELD if job.is_judged else _HELD_UNJUDGED
    return 4 * held * max(m * k, m * n, k * n)


class GpuUse(NamedTuple):
    """Contexts that share the GPU between processes.

    Attributes:
        together: other processes may compile, and none takes times.
        alone: no other process uses the GPU.
    """

    together: Callable[[], AbstractContextManager] = contextlib.nullcontext
    alone: Callable[[], AbstractContextManager] = contextlib.nullcontext


_UNSHARED = GpuUse()


class _Candidate(NamedTuple):
    """A candidate, alone or in a chain.

    Attributes:
        choice: of provider and recipe.
        checks: its programs by form of chain, "" alone. The last form is checked.
    """

    choice: Choice
    checks: Mapping[str, Check]

    @property
    def checked(self) -> str:
        """The form that is checked."""
        return list(self.checks)[-1]

    def programs(self, job: Job) -> dict[str, Lowered]:
        """Returns the lowered programs to compile, by their names.

        Only those that are timed are tuned.
        """
        return {
            self.name(form, name): x if name in job.passes else x.untuned()
            for form, check in self.checks.items()
            for name, x in check.programs.items()
            if name != "judge" or (job.is_judged and form == self.checked)
        }

    def compiled(self, form: str, programs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the compiled programs of a form, by their names in a check."""
        return {
            name: programs[self.name(form, name)]
            for name in self.checks[form].programs
            if self.name(form, name) in programs
        }

    def name(self, form: str, program: str) -> str:
        """Returns the name of a program among those of all candidates."""
        return f"{program} {form}:{self.choice.name}"


def measure_site(
    job: Job,
    begin: _Begin,
    gpu: GpuUse = _UNSHARED,
    errors_of: Callable[[Job], RoleErrors] | None = None,
    check: _LowerCheck = lower_check,
) -> Entry:
    """Returns the measurements of a site.

    Args:
        job: the site and its candidates.
        begin: called with the name of the candidate that runs next, "" for several at a
            time: the last name is known if a candidate ends the process.
        gpu: contexts in which the GPU is used.
        errors_of: returns the errors of all products; `measure_errors` if None.
        check: returns the check of a candidate.
    """
    begin("")
    with gpu.together():
        errors = {job.source: (errors_of or measure_errors)(job)} if job.pairs else {}
    if not job.choices:
        return Entry(errors=errors)
    entry = Entry(errors=errors)
    candidates = []
    for choice in job.choices:
        why_not = resolve(job.spec, choice, local_device()).why_not
        if why_not is not None:
            entry.failures[choice.name] = f"does not run: {why_not}"
            continue
        if job.is_serial:
            begin(choice.name)
        candidates.append(_Candidate(choice, {"": check(job.spec, choice)}))
    measure = functools.partial(_measure, job=job, begin=begin, gpu=gpu)
    times = measure(candidates, failures=entry.failures)
    if job.in_chain:
        chained = [_chained(job, choice, check) for choice in _fastest_kernels(times)]
        times |= measure(chained, failures=entry.failures)
    entry = Entry(_without(times, entry.failures), errors, entry.failures)
    if job.digests:
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


def _draw(job: Job, rows: int) -> Callable[[Array], Drawn]:
    if job.stats is None:
        sizes = (rows, job.spec.k, job.spec.n)
        return functools.partial(draw_normal, sizes=sizes)
    return functools.partial(draw_learned, stats=job.stats, rows=rows)


def _keys(job: Job, count: int) -> Array:
    return jax.random.split(jax.random.key(job.seed), count)


def _chained(job: Job, choice: Choice, check: _LowerCheck) -> _Candidate:
    forms = chain_forms(job.spec, choice)
    return _Candidate(
        choice, {form: check(form_spec(job.spec, form), choice) for form in forms}
    )


def _measure(
    candidates: Sequence[_Candidate],
    failures: dict[str, str],
    job: Job,
    begin: _Begin,
    gpu: GpuUse,
) -> _Times:
    """Returns the times of candidates that are right; adds the others to `failures`.

    Args:
        candidates: in one form.
        failures: why a candidate does not compile, or what is wrong with it, by name.
        job, begin, gpu: as in `measure_site`.
    """
    right = []
    lowered = {x.choice.name: x.programs(job) for x in candidates}
    compiled = _compile(lowered, job, begin, is_tuned=False)
    with gpu.together():
        compiled |= _compile(lowered, job, begin, is_tuned=True)
        for candidate in candidates:
            name = candidate.choice.name
            begin(name)
            reason = _why_failed(candidate, compiled, job)
            if reason is None:
                right.append(candidate)
            else:
                failures[name] = reason
    if not right:
        return {}
    # Only times need the GPU alone: nothing else may wait for one process at a time.
    with gpu.alone():
        begin("")
        return _time(right, compiled, job)


def _compile(
    lowered: Mapping[str, Mapping[str, Lowered]],
    job: Job,
    begin: _Begin,
    *,
    is_tuned: bool,
) -> dict[str, Any]:
    """Returns compiled programs, or why one does not compile, by their names.

    Args:
        lowered: programs by candidate and name.
        job, begin: as in `measure_site`.
        is_tuned: compile the programs that are tuned; else the others, without a GPU.
    """
    own = {
        choice_name: {n: x for n, x in programs.items() if x.is_tuned == is_tuned}
        for choice_name, programs in lowered.items()
    }
    if not job.is_serial:
        begin("")
        return compile_lowered({n: x for some in own.values() for n, x in some.items()})
    compiled: dict[str, Any] = {}
    for choice_name, programs in own.items():
        begin(choice_name)
        compiled |= compile_lowered(programs)
    return compiled


def _why_failed(
    candidate: _Candidate, compiled: Mapping[str, Any], job: Job
) -> str | None:
    """Returns why a candidate cannot be timed, or what is wrong with it; else None."""
    suffix = ", in chains" if candidate.checked else ""
    for form, check in candidate.checks.items():
        if check.refusal is not None:
            return f"{check.refusal}{suffix}"
        programs = candidate.compiled(form, compiled)
        for name in job.passes:
            if isinstance(programs[name], Exception):
                return f"does not compile: {one_line(programs[name])}{suffix}"
    if not job.is_judged:
        return None
    form = candidate.checked
    reason = candidate.checks[form].why_wrong(candidate.compiled(form, compiled))
    return None if reason is None else f"{reason}{suffix}"


def _time(
    candidates: Sequence[_Candidate], compiled: Mapping[str, Any], job: Job
) -> _Times:
    """Returns microseconds by pass and candidate."""
    cases: dict[Any, Case] = {}
    programs: dict[tuple[str, str], Any] = {}
    drawn: dict[Any, list[Trial]] = {}
    for candidate in candidates:
        for form, check in candidate.checks.items():
            own = candidate.compiled(form, compiled)
            # Candidates with equal draws share the operands, which are large.
            if own["draw"] not in drawn:
                drawn[own["draw"]] = check.draw(own, num_rotated(job.spec))
            arguments = _arguments(check, own, drawn[own["draw"]])
            for name in job.passes:
                cases.setdefault(own[name], Case(own[name], arguments[name]))
                programs[f"{name} {form}".strip(), candidate.choice.name] = own[name]
    times, by_pass = time_kernels(cases) if cases else {}, {}
    for (pass_name, choice_name), program in programs.items():
        us = round(times[program].median_us, 2)
        by_pass.setdefault(pass_name, {})[choice_name] = us
    return by_pass


def _arguments(
    check: Check, compiled: Mapping[str, Any], trials: Sequence[Trial]
) -> dict[str, list[tuple]]:
    """Returns what the compiled passes take, for each set of operands."""
    sets = check.inputs(compiled, trials)
    weights, lhs = sets[0].split()
    ready = compiled["prepare"](*leaves((weights, *lhs)))
    pairs = zip(sets, trials, strict=True)
    return {
        "training": [leaves((inputs, trial.g)) for inputs, trial in pairs],
        "inference": [leaves((ready, *inputs.split()[1])) for inputs in sets],
    }


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
