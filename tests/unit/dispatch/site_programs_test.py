"""Digests of a site's candidates: over all passes with times, computed abstractly."""

from loka_jax.dispatch.site_programs import site_programs
from loka_jax.site import SiteSpec

SITE = SiteSpec(128, 13, 128, "none", "swish", True)
XLA, PALLAS = "xla bf16", "pallas bf16"


def _digest(name, *passes, site=SITE):
    return site_programs(site, {name: passes})[name]


def test_each_pass_counts():
    passes = ("training", "inference", "training out")
    digests = {_digest(PALLAS, *passes[: i + 1]) for i in range(len(passes))}
    assert len(digests) == len(passes)


def test_choices_and_sites_differ():
    other = SiteSpec(128, 16, 128, "none", "swish", True)
    names = (XLA, "xla fp8_tensorwise", "xla fp8_tensorwise_delayed")
    digests = {_digest(name, "training", site=other) for name in names}
    assert len(digests | {_digest(XLA, "training")}) == 4


def test_no_array_is_made():
    huge = SiteSpec(1 << 30, 1 << 12, 1 << 12)
    assert _digest("xla fp8_tensorwise_delayed", "training", "inference", site=huge)


def test_digests_do_not_depend_on_those_computed_before():
    names = ("xla fp8_tensorwise_delayed/bf16/bf16", "xla fp8_tensorwise_delayed")
    site = SiteSpec(128, 64, 64, use_bias=True)
    passes = dict.fromkeys(names, ("training", "inference"))
    swapped = dict.fromkeys(reversed(names), ("training", "inference"))
    assert site_programs(site, passes) == site_programs(site, swapped)
