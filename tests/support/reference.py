"""The float32 reference of what follows a product, and the parameters of each norm."""

from loka_jax.measure import reference
from loka_jax.normed import Epilogue, NormVectors
from tests import support


def after_product(z, vectors, norm, activation):
    """Returns `activation(gamma norm(z + bias) + beta)`."""
    epilogue = Epilogue(norm, activation)
    return reference.norm_activation(z, NormVectors(**vectors), epilogue)


def normalize(z, norm):
    """Returns the normalized rows."""
    return reference.normalize(z, Epilogue(norm))[0]


def vectors(n, norm, *, with_bias=False):
    """Returns the parameters that a site with this norm has."""
    names = {"layer": ["gamma", "beta"], "rms": ["gamma"]}.get(norm, [])
    if with_bias:
        names = [*names, "bias"]
    centre = {"gamma": 1.0}
    return {
        name: centre.get(name, 0.0) + 0.3 * support.normal(n, seed=10 + i)
        for i, name in enumerate(names)
    }
