"""The tables that are shipped hold for the kernels beside them."""

import pathlib

import jax
import pytest

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.dispatch import sources
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.site_programs import site_programs

SHIPPED = sorted((pathlib.Path(tables.__file__).parent / "tables").glob("*.json"))
# Dense features, and categorical ones, of the generated stream.
DENSE, FIELDS, DIM = 13, 26, 16

# All choices of XLA, and the kernels that are lowered fastest.
SAMPLE = (
    "128 x 64 x 64, relu, bias",
    "128 x 13 x 128, swish, bias",
    "65536 x 13 x 512, layer, relu",
)


def _sites(name, rows):
    shapes = ((rows, DENSE), (rows, FIELDS, DIM))
    inputs = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    sites = nn.list_sites(get_config(name).model, *inputs)
    return [site for site in sites if site.has_choice and site.recipe != "f32"]


def test_there_are_those_of_two_devices():
    assert [path.stem for path in SHIPPED] == ["nvidia_h100_80gb_hbm3", "nvidia_h200"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_is_stamped_for_these_sources(path):
    assert tables.read(path).header.kernels == sources.digest(), (
        f"the sources have changed since {path.name} was stamped, and nobody would "
        "follow it: run `python experiments/restamp.py`; if programs differ, measure "
        "the table again (experiments/time_sites.py), or take it out."
    )


def _all_sites():
    """Returns all sites: a sample in every run, each twelfth in CI, others as a drill.

    `experiments/restamp.py` compares the programs of all sites before it stamps.
    """
    return [
        pytest.param(path, site, marks=_marks(site, i), id=f"{path.stem} {site}")
        for path in SHIPPED
        for i, site in enumerate(sorted(tables.read(path).sites))
    ]


def _marks(site, i):
    if str(site) in SAMPLE:
        return []
    return [pytest.mark.drill] if i % 12 else [pytest.mark.slow]


@pytest.mark.parametrize(("path", "site"), _all_sites())
def test_its_programs_are_those_that_were_measured(path, site):
    entry = tables.read(path).sites[site]
    assert entry.programs == site_programs(site, entry.passes())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["fp8_dlrm", "fp8_dcnv2"])
def test_it_has_the_sites_of_the_shipped_configurations(path, name):
    table = tables.read(path)
    for rows in (get_config(name).loop.batch_size, 8192, 65536):
        sites = _sites(name, rows)
        for site in sites:
            assert f"{name} {site.path}" in table.sites[table_key(site.spec)].errors
        plan = make_plan(sites, PerformanceModel(table), config=name)
        assert {path for path, _ in plan.decisions} == {site.path for site in sites}
        assert all(decision.speedup for _, decision in plan.decisions)
