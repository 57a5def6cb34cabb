"""A process that measures is started as it is used."""

from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import Worker
from loka_jax.probe.site import ProbeConfig
from loka_jax.site import Choice, SiteSpec


def test_it_takes_statistics_and_answers(tmp_path):
    choice, stats = Choice.parse("pallas bf16"), ProbeConfig().init(64, 32, 16)
    with Worker(print, str(tmp_path)) as one:
        found = one.measure(Job(SiteSpec(64, 32, 16), choice, stats))
    assert found.failures[choice.name].startswith("does not run: ")
