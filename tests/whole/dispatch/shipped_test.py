"""The tables that are shipped have the sites of the configurations."""

import functools
import pathlib

import jax
import pytest

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.plan import is_open

SHIPPED = sorted((pathlib.Path(tables.__file__).parent / "tables").glob("*.json"))
# Dense features, and categorical ones, of the generated stream.
DENSE, FIELDS, DIM = 13, 26, 16


@functools.cache
def _sites(name, rows):
    shapes = ((rows, DENSE), (rows, FIELDS, DIM))
    inputs = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return list(filter(is_open, nn.list_sites(get_config(name).model, *inputs)))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["fp8_dlrm", "fp8_dcnv2"])
def test_it_has_the_sites_of_the_shipped_configurations(path, name):
    table = tables.read(path)
    for rows in (get_config(name).loop.batch_size, 65536):
        for site in _sites(name, rows):
            entry = table.sites[table_key(site.spec)]
            sources = (source.split() for source in entry.errors)
            runs = {run.partition("@")[0] for run, path in sources if path == site.path}
            assert name in runs and entry.times["training"]
