"""Times training and inference of a model in several forms, the arms.

Kernel time of a training pass (forward, and gradients of parameters and inputs) and of
inference with weights prepared once, with peak temporary memory, and of training passes
the SQNR of results and gradients against those of the first arm.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from loka_jax import nn, quality
from loka_jax.measure.compiling import compile_all, leaves, untuned_here
from loka_jax.measure.timing import Case, profile_kernels, time_kernels
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.serving import fold

_SETS = 2  # of inputs; one alone exceeds the L2
_FEW = 256  # rows that set the delayed scales

type Shapes = tuple[tuple[int, ...], ...]
type Records = dict[str, dict[str, Any]]


def measure_arms(
    model: linen.Module,
    arms: Mapping[str, nn.Planned],
    shapes: Callable[[int], Shapes],
    batch: int,
) -> Records:
    """Returns the records of "training NAME" and "inference NAME" of all arms.

    Args:
        model: has the parameters of all arms.
        arms: forms of the model by name.
        shapes: of the inputs by the number of rows.
        batch: rows that are timed.
    """
    inputs = [_normal(shapes(batch), seed) for seed in range(_SETS)]
    few = _normal(shapes(_FEW), 0)
    programs: dict[str, Any] = {}
    params = _params(model, few)
    for arm, planned in arms.items():
        variables = initialized(planned, params, few)
        if planned.is_delayed:
            planned = planned.with_initialized_scales()
        out = jax.eval_shape(planned.apply, variables, *inputs[0])
        sets = [
            (x, jax.random.normal(jax.random.key(9), out.shape, out.dtype))
            for x in inputs
        ]
        run = functools.partial(_train, planned)
        programs[f"training {arm}"] = (run, [(variables, *x) for x in sets])
        folded = fold(planned.apply, variables, *inputs[0])
        programs[f"inference {arm}"] = (
            folded.function,
            [(folded.ready, *x) for x in inputs],
        )
    compiled = compile_all(
        {key: (run, sets[0]) for key, (run, sets) in programs.items()}
    )
    return _timed(programs, compiled)


def print_records(records: Records):
    """Prints the records of a model, with the ratio to the first arm's time."""
    for key, record in records.items():
        if "failed" in record:
            print(f"  {key:28} failed: {record['failed'][:200]}")
            continue
        kind, _, _ = key.partition(" ")
        first = next(name for name in records if name.startswith(kind))
        base = records[first].get("median_us")
        ratio = base / record["median_us"] if base else float("nan")
        memory = (record["temporary_bytes"] or 0) / 1e9
        count = record["kernels"] or 0
        quality_db = "".join(
            f" {record[name]:5.1f} dB"
            for name in ("y_db", "least_db")
            if name in record
        )
        print(
            f"  {key:28} {record['median_us']:9.0f} us {ratio:5.2f}x "
            f"{count:4.0f} kernels {memory:6.2f} GB{quality_db}",
            flush=True,
        )
        for name, taken_us, calls in (record["longest"] or [])[:8]:
            print(f"      {taken_us:8.1f} us {calls:4.0f}  {name[:90]}")


def _timed(programs, compiled) -> Records:
    records: Records = {}
    cases, reference = {}, None
    for key, program in compiled.items():
        if isinstance(program, Exception):
            records[key] = {"failed": str(program)[:500]}
            continue
        memory = program.memory_analysis()
        records[key] = {"temporary_bytes": getattr(memory, "temp_size_in_bytes", None)}
        cases[key] = Case(program, [leaves(x) for x in programs[key][1]])
        if key.startswith("training"):
            results = _results(program(*cases[key].arguments[0]))
            reference = results if reference is None else reference
            records[key] |= _quality(results, reference)
    for key, timing in time_kernels(cases).items():
        records[key] |= timing._asdict()
        longest = profile_kernels(functools.partial(_calls, cases[key]))
        records[key]["longest"] = None if longest is None else longest.longest
    return records


def _results(outputs) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the output of a training pass, and the gradients of params and inputs."""
    y, (variables, *inputs) = outputs
    return y, jax.tree.leaves((variables["params"], inputs))


def _quality(results, reference) -> dict[str, float]:
    """Returns the SQNR of the output and the least one of a gradient."""
    sqnr = jax.jit(quality.sqnr, compiler_options=untuned_here())
    gradients = zip(reference[1], results[1], strict=True)
    return {
        "y_db": float(sqnr(reference[0], results[0])),
        "least_db": min(float(sqnr(x, y)) for x, y in gradients),
    }


def _calls(case: Case, calls: int):
    """Returns the results of the last of some calls."""
    return [case.function(*case.arguments[i % _SETS]) for i in range(calls)][-1]


def _params(model, inputs):
    init = jax.jit(model.init, compiler_options=untuned_here())
    return init(jax.random.key(0), *inputs)["params"]


def initialized(planned: nn.Planned, params, inputs) -> dict[str, Any]:
    """Returns variables whose delayed scales are set, from few rows."""
    variables: dict[str, Any] = {"params": params}
    if not planned.is_delayed:
        return variables
    shapes = jax.eval_shape(planned.init, jax.random.key(0), *inputs)
    # As of sites before their first step.
    states = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), shapes[OVERWRITE_WITH_GRADIENT]
    )
    variables[OVERWRITE_WITH_GRADIENT] = states
    first = planned.by_xla()
    out = jax.eval_shape(first.apply, variables, *inputs)
    g = jax.random.normal(jax.random.key(9), out.shape, out.dtype)
    train = jax.jit(functools.partial(_train, first), compiler_options=untuned_here())
    _, (grads, *_) = train(variables, inputs, g)
    return variables | {OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}


def _train(planned: nn.Planned, variables, inputs, g):
    """Returns the output, and the gradients of variables and inputs for its g."""

    def run(variables, *inputs):
        return jnp.asarray(planned.apply(variables, *inputs))

    y, pull = jax.vjp(run, variables, *inputs)
    return y, pull(g)


def _normal(shapes: Shapes, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
