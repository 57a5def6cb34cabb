"""A space whose speeds are known: predictions, and what they get wrong by choice."""

import itertools
import math

import numpy as np

from loka_jax.search.history import Trial

_WRONG = {  # factors of the parts of a step
    "recipe": {"bf16": 1.0, "fp8_tensorwise": 0.9, "fp8_rowwise": 0.65},
    "mods": {"none": 1.15, "loka": 1.0},
    "table-dtype": {"f32": 1.0, "bf16": 0.93},
}
_STEPS, _BATCHES = ("1", "2", "4", "8"), ("2048", "4096", "8192", "16384")


def space(seed=0, noise=0.003, memory=0.3):
    """Returns a trial of each of 192 points; the dense part is predicted badly."""
    rng = np.random.default_rng(seed)
    axes = {k: tuple(v) for k, v in _WRONG.items()}
    axes |= {"steps-per-call": _STEPS, "batch-size": _BATCHES}
    trials = []
    for values in itertools.product(*axes.values()):
        choices = dict(zip(axes, values, strict=True))
        size, steps = int(choices["batch-size"]), int(choices["steps-per-call"])
        us = {"dense": 200 + 0.1 * size, "fetch": 0.05 * size}
        us["host"] = max(900 / steps - sum(us.values()), 1.0)
        wrong = math.prod(_WRONG[axis][choices[axis]] for axis in _WRONG)
        together = 1.1 if choices["recipe"] == "fp8_rowwise" and steps > 2 else 1.0
        took = 1.6 * wrong * together * us["dense"] + 1.2 * us["fetch"] + us["host"]
        rates = 1e6 * size / took * np.exp(noise * rng.standard_normal(9))
        share = memory * size / 8192
        is_ok = share < 1
        trials.append(
            Trial(
                choices=choices,
                batch_size=size,
                us=us,
                memory_share=share,
                status="ok" if is_ok else "memory",
                rates=tuple(rates) if is_ok else (),
                why=None if is_ok else "RESOURCE_EXHAUSTED",
            )
        )
    return trials
