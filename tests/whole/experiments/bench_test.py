"""Programs that processes lower."""

from experiments import restamp
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import Entry, Table
from loka_jax.site import SiteSpec


def test_processes_lower_the_programs_that_this_one_does():
    site = SiteSpec(64, 32, 32, "none", "relu", True)
    times = {"training": {"xla bf16": 2.0, "xla fp8_rowwise": 3.0}}
    table = Table(header_here(), {site: Entry(times)})
    expected = {site: restamp.site_programs(site, table.sites[site].passes())}
    assert restamp.programs_of([table, table], 1) == [expected] * 2
