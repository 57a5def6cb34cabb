"""A server with what no HTTP framework has: batches, and restarts under load."""

from loka_jax.server.batching import Batcher, Busy
from loka_jax.server.restarts import supervise

__all__ = ["Batcher", "Busy", "supervise"]
