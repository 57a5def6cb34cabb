"""What runs at the sites of a converted model that has no recipe.

All sites of the traced program are put before Dispatch at once, with their groups:
what runs at one depends on those that it reads.
"""

from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp

from loka_jax.chosen import Chosen, choose
from loka_jax.nn.context import current
from loka_jax.nn.found_layers import Layer
from loka_jax.nn.products import Product
from loka_jax.nn.program import Program
from loka_jax.nn.sites import Site
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.site import BF16

_OPEN = "nobody chose"


def chosen_by_default(
    program: Program, has_recipe: Callable[[str], bool]
) -> Mapping[str, Chosen]:
    """Returns what runs at the sites for which nobody chose, by path.

    Args:
        program: in which products were found.
        has_recipe: of a site's path.
    """
    products = [*_products(program)]
    open_paths = {
        x.name
        for x, _ in products
        if x.left is None and not has_recipe(x.name) and x.name not in current().choices
    }
    if not open_paths:
        return {}
    sites = [site for _, site in products]
    in_float32 = {x.name for x, _ in products if _is_float32(x)}
    chosen = choose(sites, in_float32 & open_paths)
    return {path: own for path, own in chosen.items() if path in open_paths}


def _products(program: Program) -> Iterator[tuple[Product, Site]]:
    """Yields the products of a program with their sites, in calling order."""
    specs = {
        member.product: (member.spec, together.group)
        for together in program.found.groups
        for layer in together.layers
        for member in layer.sites
    }
    of_step: dict = {}
    for product in program.found.products:
        of_step.setdefault(product.place, []).append(product)
    device = current().device or local_device()
    for step in program.steps:
        for product in of_step.get(step, ()):
            layer = Layer(product.data, product, product.fused)
            spec, group = specs.get(product, (layer.spec, None))
            site = Site(
                path=product.name,
                plan=resolve(spec, BF16, device),
                batch=product.batch if product.batch > 1 else None,
                left=product.left,
                group=group,
                default=_OPEN,
            )
            yield product, site
        for inner in step.inner:
            yield from _products(inner)


def _is_float32(product: Product) -> bool:
    return all(x.aval.dtype == jnp.float32 for x in product.step.inputs[:2])
