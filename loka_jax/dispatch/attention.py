"""The choice for an attention: in bfloat16, or with its forward pass in FP8.

    served      by kernels: `ops.jagged_attention` says why not
    fast        forward in FP8 at least `speedup` times as fast as in bfloat16, casts
                and layouts included, timed on this device at the site's own sizes
    accurate    the result of the forward pass in FP8 within the limits of a product

Both are timed once, with sequences that are as long as the mean of a full batch, and
kept in the user's cache. FP8 rounds to E4M3 under one scale, which is 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import checked
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import cache_path
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.policy import (
    Decision,
    Limits,
    Terms,
    largest_error,
    why_inaccurate,
)
from loka_jax.dispatch.table import ATTENTION, Entry, Table
from loka_jax.measure.compiling import NO_CAPTURE
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.nn import Site
from loka_jax.ops.jagged_attention import AttentionPlan, jagged_attention
from loka_jax.recipe import get_recipe
from loka_jax.site import BF16, Choice, SiteSpec
from loka_jax.terminal import one_line

IN_BF16 = Choice("pallas", BF16.recipe)
IN_FP8 = Choice("pallas", get_recipe("fp8_tensorwise/bf16/bf16"))
_SETS = 2  # of operands, so that a call does not find its own in the L2


def decide_attention(
    site: Site, performance: PerformanceModel, limits: Limits, terms: Terms
) -> Decision:
    """Returns the decision on an attention."""
    entry = performance.estimates(site.spec).entry
    times = known_times(site, performance)
    speedup = times[IN_BF16.name] / times[IN_FP8.name] if times else None
    reason = (
        _why_not_served(site)
        or terms.why_not_fp8
        or _why_slow(speedup, limits)
        or why_inaccurate(IN_FP8, entry, limits, terms)
    )
    if reason is not None:
        return Decision(in_bf16(site), reason)
    error = largest_error(IN_FP8, entry, terms)
    return Decision(IN_FP8, f"FP8 forward, {speedup:.2f}x", speedup, error)


def ruled_attention(site: Site, asked: Choice) -> tuple[Choice, str | None]:
    """Returns the choice by a rule, and why kernels cannot run it, or None.

    It is FP8 if the forward product of what is asked for is.
    """
    is_known = asked.provider in ("xla", "pallas")
    provider = asked.provider if is_known else in_bf16(site).provider
    recipe = IN_FP8.recipe if asked.recipe.fwd is not None else BF16.recipe
    reason = site.attention.why_xla if site.attention is not None else None
    return Choice(provider, recipe), reason


def in_bf16(site: Site) -> Choice:
    """Returns what a site runs by in bfloat16: attention by kernels that serve it."""
    is_served = site.attention is not None and site.attention.why_xla is None
    return IN_BF16 if is_served else BF16


def known_times(site: Site, performance: PerformanceModel) -> Mapping[str, float]:
    """Returns the microseconds of an attention's forward pass by choice, if timed."""
    entry = performance.table.sites.get(_key(site), Entry())
    return entry.times.get(ATTENTION, {})


def with_attention_times(
    performance: PerformanceModel, sites: Sequence[Site], say: Callable[[str], None]
) -> PerformanceModel:
    """Returns what is known after timing attentions that may gain by FP8.

    What is measured goes to the user's cache.
    """
    unknown = {
        _key(site): site
        for site in sites
        if site.attention is not None
        and site.recipe not in ("bf16", "f32")
        and _why_not_served(site) is None
        and not known_times(site, performance)
    }
    for key, site in unknown.items():
        say(f"Timing {site.path} in bfloat16 and forward in FP8.")
        try:
            times = time_attention(site.spec, site.batch or 1)
        except Exception as error:  # of any kind: it runs in bfloat16
            say(f"{site.path} was not timed, and runs in bfloat16: {one_line(error)}")
            continue
        measured = Table(header_here(), {key: Entry({ATTENTION: times})})
        tables.add(cache_path(), measured)
        performance = performance.with_table(performance.table.merged(measured))
    return performance


def time_attention(spec: SiteSpec, heads: int) -> dict[str, float]:
    """Returns the microseconds of the forward pass in bfloat16 and in FP8, by choice.

    With N(0, 1) operands, and sequences of `spec.n` rows each.
    """
    rows, size, length = spec.m, spec.k // 2, spec.n
    offsets = np.append(np.arange(0, rows, length), rows).astype(np.int32)
    shape = 3, rows, heads, size
    draw = jax.jit(lambda key: tuple(jax.random.normal(key, shape, jnp.bfloat16)))
    ends = jax.device_put(offsets)
    sets = [(*draw(jax.random.key(seed)), ends) for seed in range(_SETS)]
    how = dict(scale=size**-0.5, max_length=length)
    plans = {IN_BF16: AttentionPlan(None), IN_FP8: AttentionPlan(None, None, None)}
    cases = {}
    for choice, plan in plans.items():
        forward = functools.partial(jagged_attention, plan=plan, **how)
        compiled = jax.jit(forward, compiler_options=NO_CAPTURE)
        cases[choice.name] = Case(compiled, sets)
    times = time_kernels(cases)
    return {name: round(time.median_us, 2) for name, time in times.items()}


def _key(site: Site) -> SiteSpec:
    """Returns an attention as tables name it: the rows are those of all heads."""
    return dataclasses.replace(site.spec, m=site.spec.m * (site.batch or 1))


def _why_not_served(site: Site) -> str | None:
    assert site.attention is not None
    return site.attention.why_xla or checked.why_wrong("jagged_attention_fp8")


def _why_slow(speedup: float | None, limits: Limits) -> str | None:
    if speedup is None:
        return "the time of its FP8 is not known"
    if speedup < limits.speedup:
        return f"not faster: FP8 forward is {speedup:.2f} times bfloat16"
    return None
