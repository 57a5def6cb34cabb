"""Differentiable operations that follow a recipe; array functions without state."""
