"""The stamp of a table: renewed if all programs are as they were, else left alone."""

import dataclasses

import pytest

from experiments import restamp
from loka_jax.dispatch import sources
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import Entry, Table
from loka_jax.site import SiteSpec

SITE = SiteSpec(64, 32, 32, "none", "relu", True)
TIMES = {"training": {"xla bf16": 2.0, "xla fp8_rowwise": 3.0}}
STALE = "0123456789abcdef"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Returns the file of a table whose programs are recorded."""

    def programs_of(each, workers):
        # In this process, which has compiled nothing that a new one would have to load.
        return [
            {k: restamp.site_programs(k, x.passes()) for k, x in table.sites.items()}
            for table in each
        ]

    monkeypatch.setattr(restamp, "programs_of", programs_of)
    path = tmp_path / "table.json"
    tables.write(path, Table(header_here(), {SITE: Entry(TIMES)}))
    assert restamp.main([str(path), "--record"]) == 0
    return path


def _change(path, programs=None):
    table = tables.read(path)
    table.sites[SITE].programs.update(programs or {})
    header = dataclasses.replace(table.header, kernels=STALE)
    tables.write(path, Table(header, table.sites))


def test_equal_programs_renew_the_stamp_and_others_are_listed(path, capsys):
    before = tables.read(path)
    _change(path)
    assert restamp.main([str(path)]) == 0
    assert tables.read(path) == before
    assert before.header.kernels == sources.digest()

    _change(path, {"xla fp8_rowwise": STALE})
    before = path.read_bytes()
    assert restamp.main([str(path)]) == 1
    assert path.read_bytes() == before
    out = capsys.readouterr().out
    assert f"{SITE}: xla fp8_rowwise" in out and "xla bf16" not in out


def test_programs_of_other_sources_are_refused(path, capsys):
    _change(path)
    assert restamp.main([str(path), "--record"]) == 2
    assert "check out the commit" in capsys.readouterr().err
