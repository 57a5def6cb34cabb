"""The sites whose output a head reads, with no norm between them.

Below a head g is one number of an example times the head's weights. Its roundings in
dlhs are alike for many examples, so that a batch does not average them out, and
training diverged (docs/recipes.md, "The layer below a head").

    head    a product too narrow for FP8 that nothing follows
    reads   the site before it, alone or joined with other features, and earlier ones
            with as many features as it takes, if the next site does not read those
"""

from collections.abc import Sequence

from loka_jax.fp8 import SIZE_MULTIPLE
from loka_jax.nn import Site

BELOW_HEAD = "a head reads it without a norm, where g is alike for many examples"
_SMALL = 1 / 16  # share of the work that is not worth the risk of any FP8


def below_heads(sites: Sequence[Site]) -> dict[str, bool]:
    """Returns the paths below a head, and whether each is a small part of the work."""
    all_work = sum(map(_work, sites))
    found: dict[str, bool] = {}
    for place, head in enumerate(sites):
        before = [site for site in sites[:place] if not _is_head(site)]
        for site, after in zip(before, [*before[1:], head], strict=False):
            is_read = _is_head(head) and _reads(head, site, after, before)
            if is_read and site.spec.norm == "none" and site.spec.m == head.spec.m:
                found[site.path] = _work(site) <= _SMALL * all_work
    return found


def _is_head(site: Site) -> bool:
    spec = site.spec
    is_last = spec.norm == spec.activation == "none" and not site.is_crossed
    return is_last and spec.n < SIZE_MULTIPLE and site.batch is None


def _reads(head: Site, site: Site, after: Site, before: Sequence[Site]) -> bool:
    """Returns whether a head reads a site, as far as their sizes tell."""
    if site.spec.n == head.spec.k:
        return after is head or after.spec.k != site.spec.n
    has_joined = head.spec.k not in [earlier.spec.k for earlier in before]
    return after is head and site.spec.n < head.spec.k and has_joined


def _work(site: Site) -> int:
    return site.spec.m * site.spec.k * site.spec.n * (site.batch or 1)
