"""Checkpoints: verified, by one process or several, of rows in any order."""
