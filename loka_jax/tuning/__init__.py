"""Measures the candidates of a model's sites and writes the dispatch table."""

from loka_jax.tuning.tuner import TuneConfig, tune

__all__ = ["TuneConfig", "tune"]
