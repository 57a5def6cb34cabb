"""Moved to `loka_jax.normed`."""

from loka_jax.normed import XHAT_MAX_FEATURES, XHAT_SCALE_INV, Normed, Outputs

__all__ = ["XHAT_MAX_FEATURES", "XHAT_SCALE_INV", "Normed", "Outputs"]
