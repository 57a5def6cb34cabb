"""Times a DLRM's training step in every recipe, beside bfloat16 and Flax's FP8 op.

    python experiments/bench/train_step.py --out train_step.json

For each batch size and arm: microseconds a step (wall clock of queued steps, on batches
made before, and with batches made meanwhile by the prefetch thread, as in training);
and for a chain of dense layers with LayerNorm the kernels that FP8 adds to each. Inputs
are the generated click stream; parameters train while they are timed.

On a CPU: `--batch-sizes 64 --models fp8_dlrm --arms bf16 fp8_tensorwise --calls 2`.
"""

import dataclasses
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import models
from experiments.bench import result as results
from experiments.bench.steps import READ_STEP, Chain, chain_of, warm_up
from loka_jax import nn
from loka_jax.data import DataConfig, Position
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.recipe import INITIALIZED, RECIPES
from loka_jax.train.build import Run, build
from loka_jax.train.config import (
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    ProbeOptions,
)

FLAX = "flax Fp8DirectDotGeneralOp"
ARMS = ("bf16", FLAX, *(name for name in RECIPES if name.startswith("fp8")))
# By name: the model, and the embedding dimension.
MODELS = {
    "fp8_dlrm": (models.DLRM, 16),
    "mlperf_dlrm": (models.MLPERF_DLRM, 128),
}
CHAIN_FEATURES = (512, 512, 256, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        batch_sizes: examples a step.
        models: fp8_dlrm, mlperf_dlrm.
        arms: what to time, bf16 first, which the others are compared to.
        calls: steps queued in a round.
    """

    out: pathlib.Path | None = None
    batch_sizes: tuple[int, ...] = (8192, 65536)
    models: tuple[str, ...] = tuple(MODELS)
    arms: tuple[str, ...] = ARMS
    calls: int = 60


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    result = results.head("train_step", arguments) | {
        "input": "generated click stream; the added-kernels tower: N(0, 1)",
        "added_kernels": measure_added_kernels(arguments),
        "steps": [],
    }
    for row in result["added_kernels"]:
        print(row["arm"], row["added_per_dense"], f"{row['step']['median_us']:.0f} us")
    for model in arguments.models:
        for batch_size in arguments.batch_sizes:
            rows = measure_steps(model, batch_size, arguments)
            result["steps"] += rows
            results.write(arguments.out, result)
            for row in rows:
                print(
                    f"{model:12} {batch_size:6} {row['arm']:36} "
                    f"{row['step']['median_us']:9.1f} us "
                    f"{row['speedup_over_bf16']:.2f}x, with input "
                    f"{row['step_with_input']['median_us']:9.1f} us"
                )
    return result


def make_run(
    model: str, arm: str, batch_size: int, probe: ProbeOptions | None = None
) -> Run:
    """Returns a run of a model in one arm, on the generated stream."""
    module, dim = MODELS[model]
    if arm == FLAX:
        module = models.FlaxDlrm(
            bottom_mlp=module.bottom_mlp, top_mlp=module.top_mlp, recipe="bf16"
        )
    else:
        module = module.clone(recipe=arm)
    return build(
        DlrmConfig(
            name=model,
            model=module,
            data=DataConfig(examples=batch_size * 64, eval_examples=1024),
            embedding=EmbeddingConfig(dim=dim),
            loop=LoopConfig(batch_size=batch_size),
            probe=probe or ProbeOptions(),
            plan="off",
        )
    )


def measure_steps(
    model: str, batch_size: int, arguments: Arguments
) -> list[dict[str, Any]]:
    """Returns a record an arm."""
    runs = {arm: make_run(model, arm, batch_size) for arm in arguments.arms}
    plain, with_input = {}, {}
    for arm, run in runs.items():
        plain[arm], with_input[arm] = _step_chains(run)
    times = time_chains(plain, calls=arguments.calls)
    times_with_input = time_chains(with_input, calls=arguments.calls)
    input_alone = {"input": _input_chain(next(iter(runs.values())))}
    making = time_chains(input_alone, calls=arguments.calls)["input"]
    base = times[arguments.arms[0]].median_us
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
            "fp8_sites": sum(site.is_fp8 for site in run.sites),
        }
        for arm, run in runs.items()
    ]


def _step_chains(run: Run) -> tuple[Chain, Chain]:
    """Returns the steps on batches made before, and on those that prefetch makes."""
    state, batches = warm_up(run)
    held = [state]

    def with_input(count: int):
        with run.prefetched(Position(0, 0, 0), count) as prefetched:
            for _, batch in prefetched:
                held[0] = run.step(held[0], batch)
        return held[0].step

    return chain_of(run.step, held, batches, READ_STEP), with_input


def _input_chain(run: Run) -> Chain:
    """Returns the making of batches."""

    def make(_, number: int):
        position, size = Position(0, number, 0), run.config.loop.batch_size
        return run.splits.train.batch(position, size, shuffle=True)

    return chain_of(make, [None], range(64))


def measure_added_kernels(arguments: Arguments) -> list[dict[str, Any]]:
    """Returns, by arm, the kernels that FP8 adds to a Dense, forward and backward."""
    rows = arguments.batch_sizes[0]
    chains = {arm: _dense_chain(arm, rows) for arm in arguments.arms}
    kernels = {arm: profile_kernels(chain) for arm, chain in chains.items()}
    times = time_chains(chains, calls=arguments.calls)
    base = kernels[arguments.arms[0]]
    return [
        {
            "arm": arm,
            "kernels": counted and counted._asdict(),
            "added_per_dense": counted
            and base
            and (counted.count - base.count) / len(CHAIN_FEATURES),
            "step": times[arm]._asdict(),
        }
        for arm, counted in kernels.items()
    ]


def _dense_chain(arm: str, rows: int) -> Chain:
    """Returns steps of dense layers with LayerNorm and relu, in one arm."""
    if arm == FLAX:
        module = models.FlaxMlp(CHAIN_FEATURES, norm="layer")
    else:
        recipe = arm + INITIALIZED if RECIPES[arm].is_delayed else arm
        module = nn.Mlp(CHAIN_FEATURES, recipe=recipe, norm="layer")
    x = jax.random.normal(jax.random.key(0), (rows, 512), jnp.bfloat16)

    def loss(variables):
        return jnp.sum(jnp.asarray(module.apply(variables, x), jnp.float32) ** 2)

    @jax.jit
    def step(variables, _):
        grads = jax.grad(loss)(variables)
        params = jax.tree.map(
            lambda p, g: p - 1e-6 * g, variables["params"], grads["params"]
        )
        return dict(grads) | {"params": params}

    chain = chain_of(step, [module.init(jax.random.key(1), x)], [None])
    jax.block_until_ready(chain(3))
    return chain


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
