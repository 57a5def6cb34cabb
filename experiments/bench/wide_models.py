"""Times the dense part of wide models, its optimizer included.

    python experiments/bench/wide_models.py --models wukong_m --out wide_models.json

Kernel time of a training step, from gathered embeddings to new parameters: forward,
gradients of parameters and embeddings, clipping and Adam, with donated state; and of
inference with weights prepared once (`loka_jax.serving`). Beside each the memory of
the compiled program: arguments, results that are not in their place, temporaries.
Every arm has the same Mods, and a recipe: its name, or "fp8" for `--recipe`:

    xla bf16          XLA alone, the faster of two forms where a site has two
    xla fp8           XLA alone, all sites in FP8, one after another
    torchao RECIPE    XLA, FP8 at the sites that torchao's filter lets through
    ours bf16         kernels, and fused networks and stacks, in bfloat16
    ours fp8          the same in FP8
    wide fp8          the same, narrow sites in bfloat16
    dispatch          the choices for this GPU, as if all errors were small enough

Ours over XLA's bf16 is the gain; ours in FP8 over ours in bf16 is FP8's part of it.
With a recipe's name, `xla fp8_rowwise`, arms make the recipe table of the LoKA paper:
each recipe everywhere, torchao's filter, and a choice site by site.

Without a GPU times are wall clock: `--models wukong --batches 64`.
"""

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro

from experiments.bench import models
from experiments.bench import result as results
from experiments.bench.models import (
    forced,
    initialized,
    make_inputs,
    passes_torchao,
    train_pass,
)
from experiments.bench.steps import memory_bytes
from loka_jax import nn
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.plan import make_plan
from loka_jax.measure.compiling import NO_CAPTURE, Lowered, compile_lowered
from loka_jax.measure.timing import profile_kernels, time_chains
from loka_jax.nn.group import WIDE
from loka_jax.optim import OptimConfig, make_dense_optimizer
from loka_jax.serving import fold
from loka_jax.site import Choice

_SETS = 2  # of inputs; one alone exceeds the L2
_FEW = 256  # rows that set the delayed scales
_ROUNDS = 3
_DELAYED = "fp8_tensorwise_delayed"
_ARMS = ("xla bf16", "xla fp8", "ours bf16", "ours fp8")
_OPTIM = OptimConfig(lr=1e-3, clip_norm=10.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        models: of `models.wide`: mlperf_dcnv2, wukong_m, "wukong_m plain", dhen_l.
        batches: rows.
        arms: of those above.
        recipe: of arms "fp8".
        kinds: of programs to time.
        calls: of a program in each of three profiles.
    """

    models: tuple[str, ...] = ("mlperf_dcnv2", "wukong_m")
    batches: tuple[int, ...] = (16384,)
    arms: tuple[str, ...] = _ARMS
    recipe: str = _DELAYED
    kinds: tuple[Literal["training", "inference"], ...] = ("training", "inference")
    calls: int = 5


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    result = results.head("wide_models", arguments) | {"inputs": "N(0, 1)", "runs": []}
    cases = list(itertools.product(arguments.models, arguments.batches))
    for name, batch in results.in_time(cases, result, arguments):
        run: dict[str, Any] = {"model": name, "batch": batch, "programs": {}}
        run["least_us"] = least_us(name, batch, arguments.kinds)
        result["runs"].append(run)
        programs = make_programs(name, batch, arguments)
        for key, record in compiled_and_timed(programs, arguments.calls):
            run["programs"][key] = record
            print(f"{name}, {batch} rows, {key}")
            _print(run["programs"], key)
            results.write(arguments.out, result)
        del programs
        gc.collect()  # the next model needs the memory


def least_us(name: str, batch: int, kinds: Sequence[str]) -> dict[str, float]:
    """Returns what the products of a tower take at the limits of this device, if known.

    In microseconds, by kind and precision.
    """
    model, _ = models.wide(name)
    performance = local_performance().performance
    roofline = performance and performance.roofline
    if not isinstance(model, models.Tower) or roofline is None:
        return {}
    return {
        f"{kind} {precision}": model.least_us(
            batch,
            roofline,
            is_training=kind == "training",
            is_fp8=precision == "fp8",
        )
        for kind, precision in itertools.product(kinds, ("bf16", "fp8"))
    }


def make_programs(
    name: str, batch: int, arguments: Arguments
) -> dict[str, "Inference | Training"]:
    """Returns the programs of a model at a number of rows, by kind and arm."""
    model, shapes = models.wide(name)
    few = make_inputs(shapes(_FEW), 0)
    inputs = [make_inputs(shapes(batch), seed) for seed in range(_SETS)]
    by_xla = nn.Planned(model.clone(implementation="xla"))
    params = initialized(by_xla, few)["params"]
    programs: dict[str, Inference | Training] = {}
    for arm in arguments.arms:
        planned = arm_of(model, arm, arguments.recipe, inputs[0])
        variables = initialized(planned.by_xla(), few, params)
        if planned.is_delayed:
            planned = dataclasses.replace(planned, scales_initialized=True)
        for kind in arguments.kinds:
            program = {"training": Training, "inference": Inference}[kind]
            programs[f"{kind} {arm}"] = program(planned, variables, inputs)
    return programs


def compiled_and_timed(
    programs: Mapping[str, "Inference | Training"], calls: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the times and memory of programs, which are compiled at once."""
    lowered = {
        key: Lowered(program.lowered(), NO_CAPTURE) for key, program in programs.items()
    }
    for key, compiled in compile_lowered(lowered).items():
        if isinstance(compiled, Exception):
            yield key, {"failed": str(compiled)[:500]}
            continue
        try:
            yield key, _timed(compiled, programs[key].calls(compiled), calls)
        except jax.errors.JaxRuntimeError as error:  # out of memory
            yield key, {"failed": str(error)[:500]}
        gc.collect()


def arm_of(model, arm: str, recipe: str, inputs: tuple) -> nn.Planned:
    """Returns the planned model of an arm.

    Args:
        model: in bfloat16.
        arm: its name.
        recipe: of arms "fp8".
        inputs: of the model.

    Raises:
        ValueError: if there is no such arm.
    """
    kind, _, precision = arm.partition(" ")
    precision = recipe if precision == "fp8" else precision
    if kind == "xla":
        return nn.Planned(model.clone(recipe=precision, implementation="xla"))
    if kind == "ours":
        return nn.Planned(model.clone(recipe=precision))
    if kind == "dispatch":
        sites = nn.list_sites(model.clone(recipe=recipe), *inputs)
        performance = local_performance().performance
        plan = make_plan(sites, performance, errors=as_if_accurate(sites))
        return nn.Planned(model, plan.choices)
    sites = nn.list_sites(model.clone(recipe=precision), *inputs)
    free = [site for site in sites if site.has_choice and site.recipe != "f32"]
    if kind == "torchao":
        through = [s for s in free if passes_torchao(precision, s.spec.k, s.spec.n)]
        return forced(model, through, f"xla {precision}")
    if kind == "wide":
        choice = Choice.parse(f"group {precision}")
        wide = [site for site in free if max(site.spec.k, site.spec.n) >= WIDE]
        choices = tuple((site.path, choice) for site in wide)
        return nn.Planned(model.clone(recipe="bf16"), choices)
    raise ValueError(f"--arms {arm!r}: begin it with xla, ours, torchao, wide.")


class Inference:
    """Inference with weights prepared once."""

    def __init__(self, planned: nn.Planned, variables: dict[str, Any], sets: list):
        """Takes a model and the inputs that it is called with."""
        self._folded = fold(planned.apply, variables, *sets[0])
        self._sets = [(self._folded.ready, *x) for x in sets]

    def lowered(self) -> Any:
        """Returns the lowered program."""
        return jax.jit(self._folded.function).lower(*self._sets[0])

    def calls(self, compiled: Any) -> Callable[[int], Any]:
        """Returns a function that queues a number of calls."""

        def run(count: int):
            return [compiled(*self._sets[i % _SETS]) for i in range(count)][-1]

        return run


class Training:
    """A training step of the dense part, its state donated."""

    def __init__(self, planned: nn.Planned, variables: dict[str, Any], sets: list):
        """Takes a model and the inputs that it is called with."""
        self._planned, self._variables, self._sets = planned, variables, sets
        self._optimizer = make_dense_optimizer(_OPTIM, total_steps=1000)

    def lowered(self) -> Any:
        """Returns the lowered program."""
        state = jax.eval_shape(self._initial, self._variables)
        return jax.jit(self._step, donate_argnums=0).lower(state, self._sets[0])

    def calls(self, compiled: Any) -> Callable[[int], Any]:
        """Returns a function that queues a number of steps."""
        state = jax.jit(self._initial)(self._variables)

        def run(count: int):
            nonlocal state
            out: Any = None
            for i in range(count):
                state, *out = compiled(state, self._sets[i % _SETS])
            return out

        return run

    def _initial(self, variables):
        # Copies, as the step gives its arguments' memory away.
        variables = jax.tree.map(jnp.copy, variables)
        return variables, self._optimizer.init(variables["params"])

    def _step(self, state, inputs):
        variables, moments = state
        loss, (grads, dinputs) = train_pass(self._planned, variables, *inputs)
        params = variables["params"]
        updates, moments = self._optimizer.update(grads["params"], moments, params)
        variables = grads | {"params": optax.apply_updates(params, updates)}
        return (variables, moments), loss, dinputs


def _timed(program: Any, run: Callable[[int], Any], calls: int) -> dict[str, Any]:
    """Returns the kernel time of a call in each round, and the program's memory."""
    profiles = [profile_kernels(run, calls=calls) for _ in range(_ROUNDS)]
    record: dict[str, Any] = {"memory_bytes": memory_bytes(program)}
    if profiles[0] is None:
        start = time.perf_counter()
        jax.block_until_ready(run(1))
        us = (time.perf_counter() - start) * 1e6
        return record | {"us": us, "wall_us": us, "kernels": None, "longest": []}
    wall = time_chains({"": run}, calls=4 * calls, rounds=3)[""]
    times = [profile.busy_us for profile in profiles if profile is not None]
    return record | {
        "wall_us": wall.min_us,
        "us": statistics.median(times),
        "min_us": min(times),
        "max_us": max(times),
        "kernels": profiles[0].count,
        "longest": profiles[0].longest,
    }


def _print(programs: dict[str, dict[str, Any]], key: str):
    record = programs[key]
    if "failed" in record:
        return print(f"  failed: {record['failed'][:300]}", flush=True)
    base = programs.get(f"{key.partition(' ')[0]} xla bf16", {}).get("us", math.nan)
    print(
        f"  {record['us']:9.0f} us {base / record['us']:5.2f}x "
        f"{record['kernels'] or 0:5.0f} kernels {record['memory_bytes'] / 1e9:6.2f} GB",
        flush=True,
    )
    for name, us, count in record.get("longest", [])[:8]:
        print(f"      {us:8.1f} us {count:4.0f}  {name[:80]}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
