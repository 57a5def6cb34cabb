"""Decisions by rules: a choice for all sites whose paths match a pattern."""

import fnmatch
from collections.abc import Mapping, Sequence

from loka_jax.dispatch.attention import in_bf16, ruled_attention
from loka_jax.dispatch.candidates import why_not
from loka_jax.dispatch.policy import Decision
from loka_jax.nn import Site
from loka_jax.site import PROVIDERS, Choice


def by_rules(sites: Sequence[Site], rules: Mapping[str, str]) -> dict[str, Decision]:
    """Returns the decisions by path; the last rule that matches a site counts.

    Args:
        rules: names of choices by patterns of paths.

    Raises:
        ValueError: if a rule matches no site, names no choice, or one whose kernels
            cannot run.
    """
    decisions = {}
    for pattern, name in rules.items():
        matched = [
            site
            for site in sites
            if (site.has_choice or site.attention is not None)
            and fnmatch.fnmatchcase(site.path, pattern)
        ]
        if not matched:
            paths = ", ".join(site.path for site in sites)
            raise ValueError(f"rule {pattern!r} matches no site: there are {paths}.")
        for site in matched:
            decisions[site.path] = _ruled(site, pattern, name)
    return decisions


def _ruled(site: Site, pattern: str, name: str) -> Decision:
    own = "xla" if site.attention is None else in_bf16(site).provider
    has_provider = name.partition(" ")[0] in PROVIDERS
    choice = Choice.parse(name if has_provider else f"{own} {name}")
    if site.attention is None:
        reason = why_not(choice, site.spec)
    else:
        choice, reason = ruled_attention(site, choice)
    # XLA falls back to the compute dtype where the sizes rule FP8 out, and reports it.
    if reason is not None and choice.provider != "xla":
        raise ValueError(
            f"rule {pattern!r}: {name} cannot run at {site.path}: {reason}."
        )
    return Decision(choice, f"rule {pattern!r}")
