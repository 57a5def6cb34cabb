"""Times a tower of dense layers with LayerNorm and swish: Flax against this library.

    python experiments/bench/tower.py --out tower.json

The tower is 512 -> 512 -> 512 -> 256 -> 256 and one logit. For each arm: wall clock of
queued inferences and training steps (binary cross entropy, Adam, state donated), and
the kernels they launch. Then the arms are trained from the same parameters on the same
batches of a task that can be learned, and their losses compared.

Flax's layers have no bias before the norm, as ours have none: it would do nothing but
cost time ("flax bf16 with bias", as Flax does by default).
"""

import dataclasses
import json
import pathlib
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bench.roofline import Roofline, measure_roofline
from experiments.bench.tower_arms import (
    ARMS,
    FLAX,
    Arm,
    Batch,
    State,
    check_arm,
    make_arm,
)
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.train.record import versions

LEAST_INFERENCE, LEAST_STEP = 3.0, 1.8  # times faster than Flax's bfloat16
NUM_BATCHES = 4  # rotated; one alone exceeds the L2
LAST = 50  # steps whose losses are compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        arms: what to time: Flax's, and of ours "xla RECIPE", "pallas RECIPE", or "auto
            RECIPE" for kernels where they serve.
        inputs: features of the batch.
        features: widths of the layers.
        batch_size: rows.
        calls: calls queued in one timing.
        steps: of the training whose losses are compared.
        smoke: tiny sizes and no kernels of ours, to try the script on any machine.
    """

    out: pathlib.Path | None = None
    arms: tuple[str, ...] = ARMS
    inputs: int = 512
    features: tuple[int, ...] = (512, 512, 256, 256)
    batch_size: int = 65536
    calls: int = 40
    steps: int = 500
    smoke: bool = False

    def __post_init__(self):  # noqa: D105
        if self.arms[0] != FLAX:
            raise ValueError(
                f"--arms begins with {FLAX!r}, which others are compared to."
            )
        for arm in self.arms:
            check_arm(arm)


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints a table, writes and returns the result."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if arguments.smoke:
        arguments = dataclasses.replace(
            arguments,
            arms=(FLAX, "xla fp8_tensorwise_delayed_bf16_drhs"),
            inputs=32,
            features=(16,),
            batch_size=64,
            calls=2,
            steps=3,
        )
    roofline = measure_roofline(**(_SMOKE_ROOFLINE if arguments.smoke else {}))
    print(f"{jax.devices()[0].device_kind}: {roofline}")
    floor_us = inference_floor_us(arguments, roofline)
    arms = {
        name: make_arm(name, arguments.inputs, arguments.features)
        for name in arguments.arms
    }
    result: dict[str, Any] = {
        "benchmark": "tower",
        "command": shlex.join(["python", *sys.argv]),
        "arguments": dataclasses.asdict(arguments) | {"out": None},
        "versions": versions(),
        "inputs": "N(0, 1); labels of a random two-layer network",
        "roofline": dataclasses.asdict(roofline),
        "inference_floor_us": floor_us,
    }
    batch = make_batches(arguments)
    batches = [batch(number) for number in range(NUM_BATCHES)]
    inferences, steps, result["failed"] = start(arms, batches)
    result["arms"] = measure(inferences, steps, arguments.calls, floor_us)
    losses = {name: train(arms[name], batch, arguments.steps) for name in steps}
    result["losses"] = compare_losses(losses)
    _print_tables(result)
    if arguments.out is not None:
        text = json.dumps(result, indent=1, allow_nan=False)
        arguments.out.write_text(text + "\n")
    return result


_SMOKE_ROOFLINE = {"side": 128, "copied": 1 << 12}


def make_batches(arguments: Arguments) -> Callable[[int], Batch]:
    """Returns the batches by number, made on the device.

    Labels are drawn with the odds that a random network of two layers gives.
    """
    inputs, hidden = arguments.inputs, 64
    key = jax.random.key(1, impl="rbg")
    first = jax.random.normal(key, (inputs, hidden)) / np.sqrt(inputs)
    second = jax.random.normal(jax.random.fold_in(key, 1), (hidden,))

    @jax.jit
    def make(number):
        keys = jax.random.split(jax.random.fold_in(key, number), 2)
        x = jax.random.normal(keys[0], (arguments.batch_size, inputs), jnp.bfloat16)
        logits = jnp.tanh(2.0 * (x.astype(jnp.float32) @ first)) @ second / 2.0
        draws = jax.random.uniform(keys[1], logits.shape)
        return Batch(x, (draws < jax.nn.sigmoid(logits)).astype(jnp.float32))

    return make


Chain = Callable[[int], Any]


def start(arms: dict[str, Arm], batches: list[Batch]):
    """Returns chains of inferences and of training steps, and why arms have none."""
    inferences: dict[str, Chain] = {}
    steps: dict[str, Chain] = {}
    failed = {}
    for name, arm in arms.items():
        try:
            state = arm.init(jax.random.key(0))
            for number in range(3):  # sets delayed scales
                state, _ = arm.first_step(state, batches[number])
            variables = jax.tree.map(jnp.copy, state.variables)  # `state` is donated
            step = _step_chain(arm, state, batches)
            inference = _inference_chain(arm, variables, batches)
            jax.block_until_ready((step(1), inference(1)))
        except Exception as error:  # one arm's failure must not lose the others' times
            if name == FLAX:
                raise
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"failed: {name}: {failed[name]}")
            continue
        inferences[name], steps[name] = inference, step
    return inferences, steps, failed


def measure(
    inferences: dict[str, Chain], steps: dict[str, Chain], calls: int, floor_us: float
) -> dict[str, Any]:
    """Returns a record an arm: wall clock and kernels of inference and of a step."""
    records: dict[str, Any] = {name: {} for name in steps}
    for what, chains in (("inference", inferences), ("step", steps)):
        times = time_chains(chains, calls=calls)
        base = times[FLAX].median_us
        for name, chain in chains.items():
            kernels = profile_kernels(chain)
            records[name][what] = {
                "wall": times[name]._asdict(),
                "kernels": None if kernels is None else kernels._asdict(),
                "vs_flax_bf16": base / times[name].median_us,
            }
    for record in records.values():
        one = record["inference"]
        one["of_floor"] = floor_us / one["wall"]["median_us"]
    return records


def _step_chain(arm: Arm, state: State, batches: list[Batch]):
    held = {"state": state}

    def chain(count: int):
        loss = None
        for i in range(count):
            held["state"], loss = arm.step(held["state"], batches[i % len(batches)])
        return loss

    return chain


def _inference_chain(arm: Arm, variables, batches: list[Batch]):
    def chain(count: int):
        logits = None
        for i in range(count):
            logits = arm.infer(variables, batches[i % len(batches)].x)
        return logits

    return chain


def inference_floor_us(arguments: Arguments, roofline: Roofline) -> float:
    """Returns the least time of the layers one after another.

    The batch is read in bfloat16, and FP8 handed from layer to layer.
    """
    total, k, width = 0.0, arguments.inputs, 2
    for n in arguments.features:
        num_bytes = arguments.batch_size * (width * k + n) + k * n
        flops = 2.0 * arguments.batch_size * k * n
        total += roofline.floor_us(num_bytes, flops, "fp8")
        k, width = n, 1
    return total + roofline.floor_us(arguments.batch_size * (k + 4), 0.0, "fp8")


def train(arm: Arm, batch: Callable[[int], Batch], num_steps: int) -> np.ndarray:
    """Returns the losses of the steps, all arms on the same batches."""
    state = arm.init(jax.random.key(0))
    losses = []
    for number in range(num_steps):
        step = arm.first_step if number < 3 else arm.step
        state, loss = step(state, batch(number))
        losses.append(loss)
    return np.asarray(jnp.stack(losses), np.float64)


def compare_losses(losses: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns, by arm, the mean of the last losses against bfloat16's.

    `noise` is how much bfloat16's own loss varies from step to step there.
    """
    base = losses[FLAX][-LAST:]
    noise = float(np.std(base))
    return {
        name: {
            "first": float(values[0]),
            "last_mean": float(np.mean(values[-LAST:])),
            "noise": noise,
            "difference": float(np.mean(values[-LAST:] - base)),
            "paired_noise": float(np.std(values[-LAST:] - base)),
            "is_equal": bool(abs(np.mean(values[-LAST:] - base)) <= noise),
        }
        for name, values in losses.items()
    }


def _print_tables(result: dict[str, Any]) -> None:
    for what in ("inference", "step"):
        print(f"{what}: wall clock, kernel time, kernels, times faster than {FLAX}")
        for name, record in result["arms"].items():
            one = record[what]
            kernels = one["kernels"]
            busy = f"{kernels['busy_us']:9.1f}" if kernels else f"{'-':>9}"
            count = f"{kernels['count']:6.0f}" if kernels else f"{'-':>6}"
            print(
                f"  {name:42}{one['wall']['median_us']:9.1f} us {busy} us {count} "
                f"{one['vs_flax_bf16']:6.2f}x"
                + (f" {100 * one['of_floor']:4.0f} %" if "of_floor" in one else "")
            )
    print(f"floor of inference: {result['inference_floor_us']:.1f} us")
    for name, record in result["losses"].items():
        print(
            f"  {name:42}loss {record['first']:.4f} -> {record['last_mean']:.5f}, "
            f"difference {record['difference']:+.5f} (paired noise "
            f"{record['paired_noise']:.5f}) of step-to-step noise "
            f"{record['noise']:.5f}: {'equal' if record['is_equal'] else 'NOT EQUAL'}"
        )
    _print_targets(result)


def _print_targets(result: dict[str, Any]) -> None:
    """Prints what the best arm of ours reached whose losses equal bfloat16's."""
    ours = [
        name
        for name in result["arms"]
        if name.startswith(("auto", "pallas")) and result["losses"][name]["is_equal"]
    ]
    for what, least in (("inference", LEAST_INFERENCE), ("step", LEAST_STEP)):
        ratios = {name: result["arms"][name][what]["vs_flax_bf16"] for name in ours}
        if not ratios:
            continue
        best = max(ratios, key=lambda name: ratios[name])
        word = "met" if ratios[best] >= least else "MISSED"
        print(f"{word:7}{what} at least {least}x {FLAX}: {ratios[best]:.2f} {best}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
