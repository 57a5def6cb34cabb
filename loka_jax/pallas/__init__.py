"""Mosaic GPU kernels for Hopper: arrays in, arrays out."""
