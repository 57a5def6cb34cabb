"""A server with what no HTTP framework has: batches, and restarts under load."""

from loka_jax.server.restarts import supervise

__all__ = ["supervise"]
