"""Times a DLRM's training step in every recipe, beside bfloat16 and Flax's FP8 op.

    python experiments/bench/train_step.py --out train_step.json

For each batch size and arm: microseconds a step (wall clock of queued steps, on batches
made before and, as in training, made by the prefetch thread meanwhile), the device's
kernels a step and their time, and
for a chain of dense layers with LayerNorm the kernels that FP8 adds to each.
Inputs are the generated click stream; parameters train while they are timed.
"""

import argparse
import json
import pathlib
import shlex
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from loka_jax import nn
from loka_jax.data import DataConfig, Position
from loka_jax.data.prefetch import Prefetcher
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.models import Dlrm
from loka_jax.recipe import INITIALIZED, RECIPES
from loka_jax.train.build import Run, build
from loka_jax.train.config import (
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    ProbeOptions,
)
from loka_jax.train.record import versions

FLAX = "flax Fp8DirectDotGeneralOp"
ARMS = ("bf16", FLAX, *(name for name in RECIPES if name.startswith("fp8")))
MODELS = {
    "fp8_dlrm": Dlrm(bottom_mlp=(64,), top_mlp=(256, 128)),
    # The dense part of the MLPerf benchmark's DLRM.
    "mlperf_dlrm": Dlrm(bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256)),
}
DIMS = {"fp8_dlrm": 16, "mlperf_dlrm": 128}


class FlaxMlp(linen.Module):
    """`nn.Mlp` from Flax's layers and its FP8 op where ours would run FP8."""

    features: tuple[int, ...]
    norm: str = "none"

    @linen.compact
    def __call__(self, x, *, train: bool = False):
        """Returns the last layer's activations."""
        for features in self.features:
            fits = x.shape[-1] % 16 == 0 and features % 16 == 0
            op = linen.Fp8DirectDotGeneralOp if fits else None
            x = linen.Dense(features, dtype=jnp.bfloat16, dot_general_cls=op)(x)
            if self.norm == "layer":
                x = linen.LayerNorm(dtype=jnp.bfloat16)(x)
            x = jax.nn.relu(x)
        return x


class FlaxDlrm(Dlrm):
    """`Dlrm` on `FlaxMlp`."""

    def _mlp(self, name, features, dropout_rate):
        return FlaxMlp(features, norm=self.norm, name=name)


def make_run(
    model: str, arm: str, batch_size: int, probe: ProbeOptions | None = None
) -> Run:
    """Returns a run of a model in one arm, on the generated stream."""
    prototype = MODELS[model]
    cls = FlaxDlrm if arm == FLAX else Dlrm
    recipe = "bf16" if arm == FLAX else arm
    module = cls(
        bottom_mlp=prototype.bottom_mlp, top_mlp=prototype.top_mlp, recipe=recipe
    )
    return build(
        DlrmConfig(
            name=model,
            model=module,
            data=DataConfig(examples=batch_size * 64, eval_examples=1024),
            embedding=EmbeddingConfig(dim=DIMS[model]),
            loop=LoopConfig(batch_size=batch_size),
            probe=probe or ProbeOptions(),
            plan="off",
        )
    )


def step_chains(run: Run, batch_size: int):
    """Returns the training step as chains: on made batches, and on prefetched ones."""
    train = run.splits.train
    state = run.init()
    for i in range(3):  # initializes delayed scales
        batch = train.batch(Position(0, i, 0), batch_size, shuffle=True)
        state = run.first_step(state, batch)
    batches = [
        jax.block_until_ready(train.batch(Position(0, i, 0), batch_size, shuffle=True))
        for i in range(8)
    ]
    held = {"state": state}

    def steps(count):
        for i in range(count):
            held["state"] = run.step(held["state"], batches[i % len(batches)])
        return held["state"].step

    def steps_with_input(count):
        start = Position(0, 0, 0)
        with Prefetcher(
            train, start, batch_size, shuffle=True, num_batches=count
        ) as made:
            for _, batch in made:
                held["state"] = run.step(held["state"], batch)
        return held["state"].step

    return steps, steps_with_input


def input_chain(run: Run, batch_size: int):
    """Returns the making of batches as a chain."""
    train = run.splits.train

    def make(count):
        batches = None
        for i in range(count):
            batches = train.batch(Position(0, i % 64, 0), batch_size, shuffle=True)
        return batches

    return make


def measure_steps(model: str, batch_size: int, arms, calls: int) -> list[dict]:
    """Returns one record per arm."""
    plain, with_input, kernels, sites = {}, {}, {}, {}
    for arm in arms:
        run = make_run(model, arm, batch_size)
        plain[arm], with_input[arm] = step_chains(run, batch_size)
        kernels[arm] = profile_kernels(plain[arm])
        sites[arm] = sum(site.is_fp8 for site in run.sites)
        print(f"{model} {batch_size} {arm}: {kernels[arm] and kernels[arm][:2]}")
    times = time_chains(plain, calls=calls)
    times_with_input = time_chains(with_input, calls=calls)
    making = time_chains({"input": input_chain(run, batch_size)}, calls=calls)["input"]
    base = times["bf16"].median_us
    return [
        {
            "model": model,
            "batch_size": batch_size,
            "arm": arm,
            "step": times[arm]._asdict(),
            "step_with_input": times_with_input[arm]._asdict(),
            "input_alone": making._asdict(),
            "examples_per_second": batch_size / times[arm].median_us * 1e6,
            "speedup_over_bf16": base / times[arm].median_us,
            "kernels": kernels[arm] and kernels[arm]._asdict(),
            "fp8_sites": sites[arm],
        }
        for arm in arms
    ]


class Tower(linen.Module):
    """Dense layers with LayerNorm and relu, in one arm."""

    arm: str
    features: tuple[int, ...] = (512, 512, 256, 128)

    @linen.compact
    def __call__(self, x):
        """Returns the sum of the last layer's activations."""
        if self.arm == FLAX:
            x = FlaxMlp(self.features, norm="layer")(x)
        else:
            x = nn.Mlp(self.features, recipe=self.arm, norm="layer")(x)
        return jnp.sum(x.astype(jnp.float32) ** 2)


def measure_added_kernels(arms, rows: int = 8192) -> list[dict]:
    """Returns, per arm, the kernels that FP8 adds to a Dense, forward and backward."""
    x = jax.random.normal(jax.random.key(0), (rows, 512), jnp.bfloat16)
    counts, times = {}, {}
    for arm in arms:
        is_delayed = arm in RECIPES and RECIPES[arm].is_delayed
        tower = Tower(arm + INITIALIZED if is_delayed else arm)
        variables = tower.init(jax.random.key(1), x)

        @jax.jit
        def step(variables, tower=tower):
            grads = jax.grad(lambda v: tower.apply(v, x))(variables)
            params = jax.tree.map(
                lambda p, g: p - 1e-6 * g, variables["params"], grads["params"]
            )
            return dict(grads) | {"params": params}

        held = {"v": variables}

        def chain(count, step=step, held=held):
            for _ in range(count):
                held["v"] = step(held["v"])
            return held["v"]

        jax.block_until_ready(chain(3))
        counts[arm], times[arm] = profile_kernels(chain), chain
    timings = time_chains(times, calls=50)
    base = counts["bf16"]
    num_layers = len(Tower("bf16").features)
    return [
        {
            "arm": arm,
            "kernels": counts[arm] and counts[arm]._asdict(),
            "added_per_dense": counts[arm]
            and base
            and (counts[arm].count - base.count) / num_layers,
            "step": timings[arm]._asdict(),
        }
        for arm in arms
    ]


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the JSON."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--calls", type=int, default=60)
    options = parser.parse_args(argv)
    result = {
        "command": shlex.join(
            ["python", "experiments/bench/train_step.py", *(argv or sys.argv[1:])]
        ),
        "versions": versions(),
        "input": "generated click stream; the added-kernels tower: N(0, 1)",
        "added_kernels": measure_added_kernels(options.arms),
        "steps": [],
    }
    for model in options.models:
        for batch_size in options.batch_sizes:
            result["steps"] += measure_steps(
                model, batch_size, options.arms, options.calls
            )
            options.out.write_text(json.dumps(result, indent=1, default=np.asarray))
    for row in result["added_kernels"]:
        print(row["arm"], row["added_per_dense"], f"{row['step']['median_us']:.0f} us")
    for row in result["steps"]:
        print(
            f"{row['model']:12} {row['batch_size']:6} {row['arm']:36} "
            f"{row['step']['median_us']:9.1f} us {row['speedup_over_bf16']:.2f}x "
            f"{row['examples_per_second'] / 1e6:7.2f} M/s  with input "
            f"{row['step_with_input']['median_us']:9.1f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
