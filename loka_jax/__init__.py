"""FP8 that pays in large recommendation models: Probe, Mods, Dispatch, in JAX."""

__version__ = "0.1.0"
