"""Which candidates tuning measures."""

from loka_jax import nn
from loka_jax.dispatch.candidates import candidates, table_key
from loka_jax.dispatch.local import fitted_table
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.tuning import TuneConfig, jobs_of
from loka_jax.site import SiteSpec
from tests.unit.dispatch.plan_test import _site


def _jobs(site: nn.Site, most: int | None):
    performance = PerformanceModel(fitted_table("NVIDIA H200"))
    return list(jobs_of("model", [site], {}, TuneConfig(most=most), (), performance))


def test_only_the_most_promising_candidates_are_measured_if_asked():
    spec = SiteSpec(4096, 384, 640, "layer", "swish")
    site = _site(m=4096, k=384, n=640, norm="layer", activation="swish")
    (every,), (few,) = _jobs(site, None), _jobs(site, 3)
    assert every.choices == tuple(candidates(table_key(spec)))
    in_bf16 = {choice for choice in every.choices if not choice.is_fp8}
    assert in_bf16 < set(few.choices) < set(every.choices)
    assert len(few.choices) <= 3 + len(in_bf16)
