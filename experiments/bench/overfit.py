"""Overfits one batch by each choice: errors of the backward pass that bias training.

    python experiments/bench/overfit.py --out overfit.json

A tower with LayerNorm and swish, and a head in float32, learns random labels of one
batch of normal rows by Adam. A gradient that is off in the same way at every step keeps
the loss from vanishing, however small its error. Kernels keep normalized rows in E4M3
only where dlhs is in FP8: compare "pallas R" with "pallas R/bf16/R".

On a CPU: `--choices "xla bf16" "xla fp8_rowwise" --features 64 32 --inputs 32
--batch-size 256`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from experiments.bench import apart
from experiments.bench import result as results
from experiments.bench.models import Tower
from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.site import Choice

CHOICES = ("xla bf16", "pallas bf16") + tuple(
    f"{provider} {recipe}"
    for name in ("fp8_rowwise", "fp8_tensorwise_delayed")
    for recipe in (name, f"{name}/bf16/{name}", f"{name}/bf16/bf16")
    for provider in ("xla", "pallas")
)
LAST = 8  # steps whose mean loss is reported


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        choices: of all sites of the tower.
        inputs: features of a row.
        features: widths of the layers.
        batch_size: rows.
        steps: of training.
        learning_rate: of Adam.
        seeds: of parameters and data.
        jobs: choices at a time, each in a process of its own.
    """

    out: pathlib.Path | None = None
    choices: tuple[str, ...] = CHOICES
    inputs: int = 640
    features: tuple[int, ...] = (1024, 1024, 768, 384)
    batch_size: int = 16384
    steps: int = 104
    learning_rate: float = 1e-3
    seeds: int = 3
    jobs: int = 1


def overfit(name: str, arguments: Arguments) -> list[list[float]]:
    """Returns the losses of all steps, for each seed."""
    choice = Choice.parse(name)
    paths = [f"tower/dense_{i}" for i in range(len(arguments.features))]
    choices = tuple((path, choice) for path in paths)
    model = nn.Planned(Tower(features=arguments.features), choices)
    optimizer = optax.adam(arguments.learning_rate)
    init = jax.jit(model.by_xla().init)

    def loss_of(params, fp8, x, labels):
        logits = model.apply({"params": params, OVERWRITE_WITH_GRADIENT: fp8}, x)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels * 1.0))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, labels):
        params, fp8, opt_state = state
        gradient = jax.value_and_grad(loss_of, (0, 1))
        loss, (grads, fp8) = gradient(params, fp8, x, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), fp8, opt_state), loss

    def run(seed: int) -> Iterator[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(keys[0], (arguments.batch_size, arguments.inputs))
        labels = jax.random.bernoulli(keys[1], 0.5, (arguments.batch_size,))
        variables = init(keys[2], x)
        params, fp8 = variables["params"], variables.get(OVERWRITE_WITH_GRADIENT, {})
        state = params, fp8, optimizer.init(params)
        for _ in range(arguments.steps):
            state, loss = step(state, x, labels)
            yield loss

    runs = [jax.device_get(list(run(seed))) for seed in range(arguments.seeds)]
    return [list(map(float, losses)) for losses in runs]


def main(arguments: Arguments):
    """Overfits by every choice, prints and writes the losses."""
    arms: dict[str, Any] = {}
    calls = [(name, arguments) for name in arguments.choices]
    for (name, _), runs in apart.measured(overfit, calls, arguments.jobs):
        last = [float(np.mean(losses[-LAST:])) for losses in runs]
        arms[name] = {"last": last, "losses": [losses[::LAST] for losses in runs]}
        print(f"{name:45} " + " ".join(f"{loss:.4f}" for loss in last), flush=True)
        head = results.head("overfit", arguments)
        results.write(arguments.out, head | {"arms": arms})


if __name__ == "__main__":
    main(tyro.cli(Arguments))
