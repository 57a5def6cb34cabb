"""Mistakes in Dispatch, Probe, measurements and surveys."""

from tests.drills.mistakes import Mistake

_DISPATCH, _PROBE = "loka_jax/dispatch", "loka_jax/probe"
_MEASURE, _SURVEY = "loka_jax/measure", "loka_jax/survey"

MISTAKES = [
    Mistake(
        "by default inference may be slower",
        f"{_DISPATCH}/by_default.py",
        "    if choice != inference.choice:",
        "    if False:",
        "unit/dispatch/by_default_test.py",
    ),
    Mistake(
        "an error counts by its lower end",
        f"{_DISPATCH}/policy.py",
        "high = errors[name].high",
        "high = errors[name].low",
        "unit/dispatch/policy_test.py",
    ),
    Mistake(
        "sites are demoted by the upper end of their live errors",
        f"{_DISPATCH}/review.py",
        'errors, limits, end="mean")',
        'errors, limits, end="high")',
        "unit/dispatch/review_test.py",
    ),
    Mistake(
        "inference asks for the errors of all products",
        f"{_DISPATCH}/policy.py",
        """    for role in terms.roles:
        gemm = choice.recipe.gemm(role)
        if gemm is None:
            continue
        if""",
        """    for role in ROLES:
        gemm = choice.recipe.gemm(role)
        if gemm is None:
            continue
        if""",
        "unit/dispatch/policy_test.py",
    ),
    Mistake(
        "borrowed errors make FP8 safe for training",
        f"{_DISPATCH}/policy.py",
        "if has_own or terms.roles != ROLES:",
        "if has_own or terms.roles == ROLES:",
        "unit/dispatch/policy_test.py",
    ),
    Mistake(
        "kernels need not be worth leaving XLA for",
        f"{_DISPATCH}/policy.py",
        'if choice.provider != "xla" and speedup < limits.leave_xla:',
        'if choice.provider == "xla" and speedup < limits.leave_xla:',
        "unit/dispatch/policy_test.py",
    ),
    Mistake(
        "half widths of effects add up",
        f"{_DISPATCH}/policy.py",
        "math.hypot(*(effect.half for effect in effects))",
        "sum(effect.half for effect in effects)",
        "unit/dispatch/plan_test.py",
    ),
    Mistake(
        "the site with the largest mean effect is given up",
        f"{_DISPATCH}/plan.py",
        "effects[path].high)",
        "effects[path].mean)",
        "unit/dispatch/plan_test.py",
    ),
    Mistake(
        "measurements of an earlier tuner win",
        f"{_DISPATCH}/table.py",
        "name: old.times.get(name, {}) | entry.times.get(name, {})",
        "name: entry.times.get(name, {}) | old.times.get(name, {})",
        "unit/dispatch/table_test.py",
    ),
    Mistake(
        "a tuner adds to a table without its lock",
        f"{_DISPATCH}/table.py",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "fcntl.flock(file, fcntl.LOCK_SH)",
        "unit/dispatch/table_test.py",
    ),
    Mistake(
        "a choice of inference is checked by its training pass",
        f"{_DISPATCH}/first_use.py",
        "candidate_job(spec, choice, pass_name, in_chain",
        'candidate_job(spec, choice, "training", in_chain',
        "unit/dispatch/at_start_test.py",
    ),
    Mistake(
        "a hopeful model takes the slow ends of kernels",
        f"{_DISPATCH}/performance.py",
        "(1 if choice == BF16 else -1)",
        "(-1 if choice == BF16 else 1)",
        "unit/dispatch/performance_test.py",
    ),
    Mistake(
        "errors of the farthest rows win",
        f"{_DISPATCH}/performance.py",
        "key=lambda x: -abs(math.log",
        "key=lambda x: abs(math.log",
        "unit/dispatch/performance_test.py",
    ),
    Mistake(
        "sizes are followed by the look and not by the step",
        f"{_DISPATCH}/drift.py",
        "pace = steps * _PACE",
        "pace = _PACE",
        "unit/dispatch/drift_test.py",
    ),
    Mistake(
        "a site waits as long each time that it left",
        f"{_DISPATCH}/drift.py",
        "HOME_LOOKS * 2**doublings",
        "HOME_LOOKS",
        "unit/dispatch/drift_test.py",
    ),
    Mistake(
        "what failed for want of memory is kept for good",
        f"{_DISPATCH}/at_start.py",
        "if x != NO_MEMORY}",
        "if x != name}",
        "unit/dispatch/at_start_test.py",
    ),
    Mistake(
        "the next step's interval is that of the mean",
        f"{_MEASURE}/intervals.py",
        "math.sqrt(1 + 1 / count)",
        "math.sqrt(1 / count)",
        "unit/measure/timing_test.py",
    ),
    Mistake(
        "times are taken while others compile",
        f"{_DISPATCH}/measuring.py",
        "with turn(ALONE):",
        "with turn(TOGETHER):",
        "unit/dispatch/measuring_test.py",
    ),
    Mistake(
        "decayed moments keep their scatter",
        f"{_PROBE}/moments.py",
        "before, scatter = decay * a.count, decay * a.scatter",
        "before, scatter = decay * a.count, a.scatter",
        "unit/probe/moments_test.py",
    ),
    Mistake(
        "the scatter of a device is about its own mean",
        f"{_PROBE}/moments.py",
        "jax.lax.pmean(jnp.mean(rows, axis=0), axis_names)",
        "jnp.mean(rows, axis=0)",
        "unit/probe/moments_test.py",
    ),
    Mistake(
        "the third moment is merged with the shares swapped",
        f"{_PROBE}/elements.py",
        "3 * d * (p * b2 - q * a2)",
        "3 * d * (q * b2 - p * a2)",
        "unit/probe/elements_test.py",
    ),
    Mistake(
        "the last amax of devices is that of the last device",
        f"{_PROBE}/elements.py",
        "amax = fp8.amax_over_devices(amax_of(x), axis_names)",
        "amax = amax_of(x)",
        "unit/probe/elements_test.py",
    ),
    Mistake(
        "the columns of a weight are whitened by its rows before these are updated",
        f"{_PROBE}/matrix_normal.py",
        "_gram(_whiten(deviation.T, rows))",
        "_gram(_whiten(deviation.T, state.rows))",
        "unit/probe/matrix_normal_test.py",
    ),
    Mistake(
        "dlhs is cast by the stored scale of lhs",
        f"{_PROBE}/live_errors.py",
        "stored = operands.scales[place]",
        "stored = operands.scales[0]",
        "unit/probe/live_errors_test.py",
    ),
    Mistake(
        "the earlier steps of live errors do not decay",
        f"{_PROBE}/live_errors.py",
        "jnp.where(b.steps > 0, decay, 1.0)",
        "jnp.where(b.steps > 0, 1.0, decay)",
        "unit/probe/live_errors_test.py",
    ),
    Mistake(
        "elements of a weight are those of the first one",
        f"{_PROBE}/site.py",
        "jnp.where(is_seen, batch.rhs.elements.values, stats.rhs.elements.values)",
        "jnp.where(is_seen, stats.rhs.elements.values, batch.rhs.elements.values)",
        "unit/probe/site_test.py",
    ),
    Mistake(
        "events after a long kernel look like a pause",
        f"{_MEASURE}/timing.py",
        "end_ns = max(end_ns, event.start_ns + event.duration_ns)",
        "end_ns = event.start_ns + event.duration_ns",
        "unit/measure/timing_test.py",
    ),
    Mistake(
        "results of the last partial tile are not compared",
        f"{_MEASURE}/check_scores.py",
        "x = jnp.pad(x, ((0, -m % TILE), (0, -n % TILE)))",
        "x = jnp.pad(x[: max(m - m % TILE, 1)], ((0, -m % TILE), (0, -n % TILE)))",
        "unit/measure/checking_test.py",
    ),
    Mistake(
        "a survey compares losses without their weights",
        f"{_SURVEY}/sensitivity.py",
        "shares = weights / np.where(totals > 0, totals, 1.0)",
        "shares = (weights > 0) / np.maximum(np.sum(weights > 0, axis=0), 1)",
        "unit/survey/survey_test.py",
    ),
    Mistake(
        "the site with the smallest effect is given up first",
        f"{_SURVEY}/sensitivity.py",
        "worst = max(left, key=",
        "worst = min(left, key=",
        "unit/survey/survey_test.py",
    ),
    Mistake(
        "a verdict on speed takes the limit for leaving XLA",
        f"{_SURVEY}/survey.py",
        "speedup >= limits.speedup",
        "speedup >= limits.leave_xla",
        "unit/survey/survey_test.py",
    ),
    Mistake(
        "errors of other tables and optimizers count as own",
        "loka_jax/train/config.py",
        "parts = self.model, self.embedding, self.optim",
        "parts = (self.model,)",
        "unit/train/config_test.py",
    ),
    Mistake(
        "a head reads only the site right before it",
        f"{_DISPATCH}/heads.py",
        "return after is head or after.spec.k != site.spec.n",
        "return after is head",
        "unit/dispatch/heads_test.py",
    ),
    Mistake(
        "what rows have alike grows as what is independent",
        f"{_PROBE}/live_errors.py",
        "return copies * own + pairs * jnp.maximum(others, 0.0)",
        "return copies * (own + jnp.maximum(others, 0.0))",
        "unit/probe/live_errors_test.py",
    ),
    Mistake(
        "every jump of a size is followed",
        f"{_DISPATCH}/drift.py",
        "before=_as_json(np.where(has_jumped, np.nan, measures))",
        "before=_as_json(measures)",
        "unit/dispatch/drift_test.py",
    ),
    Mistake(
        "operations are priced by tails that do not run on a device",
        f"{_DISPATCH}/plan.py",
        "return None if why_no_kernels(performance.device) else performance.roofline",
        "return performance.roofline",
        "unit/dispatch/groups_test.py",
    ),
]
