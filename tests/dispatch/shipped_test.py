"""The tables that are shipped hold for the kernels beside them."""

import pathlib

import jax
import pytest

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.plan import make_plan

SHIPPED = sorted((pathlib.Path(tables.__file__).parent / "tables").glob("*.json"))
# Dense features, and categorical ones, of the generated stream.
DENSE, FIELDS, DIM = 13, 26, 16


def _sites(name, rows):
    shapes = ((rows, DENSE), (rows, FIELDS, DIM))
    inputs = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    sites = nn.list_sites(get_config(name).model, *inputs)
    return [site for site in sites if site.has_choice and site.recipe != "f32"]


def test_there_is_one():
    assert [path.stem for path in SHIPPED] == ["nvidia_h200"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_was_measured_with_these_kernels(path):
    assert tables.read(path).header.kernels == tables.kernels_digest(), (
        f"kernels have changed since {path.name} was measured, and nobody would follow "
        "it: measure it again (README, 'Reproduce each number'), or take it out."
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["fp8_dlrm", "fp8_dcnv2"])
def test_it_has_the_sites_of_the_shipped_configurations(path, name):
    table = tables.read(path)
    for rows in (get_config(name).loop.batch_size, 8192, 65536):
        sites = _sites(name, rows)
        for site in sites:
            assert f"{name} {site.path}" in table.sites[table_key(site.spec)].errors
        plan = make_plan(sites, table, config=name)
        assert {path for path, _ in plan.decisions} == {site.path for site in sites}
        assert all(decision.speedup for _, decision in plan.decisions)
