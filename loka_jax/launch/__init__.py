"""Starts one process a GPU, and ends all of them if one fails; imports no JAX.

python -m loka_jax.launch --processes 4 experiments/train.py --config fp8_dlrm
"""
