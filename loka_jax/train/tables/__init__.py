"""Embedding tables on one device: options, lookups, stacks of tables of one dim."""
