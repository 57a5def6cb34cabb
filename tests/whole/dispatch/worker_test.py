"""A process that measures is started as it is used."""

from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import Turns, Worker
from loka_jax.dispatch.table import Entry
from loka_jax.probe.site import ProbeConfig
from loka_jax.site import SiteSpec


def test_it_takes_statistics_and_answers():
    job = Job(SiteSpec(64, 32, 16), (), ProbeConfig().init(64, 32, 16), pairs=0)
    with Worker(print, Turns()) as one:
        assert one.measure(job) == Entry()
