"""Times the dense part of MLPerf's DLRM-DCNv2, and its cross network alone.

    python experiments/bench/cross_network.py --out cross_network.json

Kernel time of a training pass (forward, and gradients of parameters and inputs) and of
inference with weights prepared once, with peak temporary memory. Arms:

    xla bf16     XLA alone
    xla fp8      XLA alone, all sites in FP8 with delayed scaling, one after another
    cross fp8    the cross network in FP8 as one operation, the rest in bfloat16
    all fp8      the same, and FP8 with delayed scaling at all other sites

Without a GPU times are wall clock: `--batches 64 --models cross --width 64 --rank 16`.
"""

import dataclasses
import functools
import pathlib
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import linen

from experiments.bench import models
from experiments.bench import result as results
from experiments.bench.dispatch import forced
from loka_jax import nn
from loka_jax.measure.compiling import UNTUNED, compile_all, leaves
from loka_jax.measure.timing import Case, profile_kernels, time_kernels
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.serving import fold
from loka_jax.site import Choice

_SETS = 2  # of inputs; one alone exceeds the L2
_FEW = 256  # rows that set the delayed scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every model; printed only if None.
        models: the whole dense part, and the cross network alone.
        batches: rows.
        arms: of those above.
        recipe: of FP8, with delayed scaling.
        width, rank: of the cross network alone.
        budget_s: begin no model after that many seconds.
    """

    out: pathlib.Path | None = None
    models: tuple[Literal["dcnv2", "cross"], ...] = ("dcnv2", "cross")
    batches: tuple[int, ...] = (65536, 8192)
    arms: tuple[str, ...] = ("xla bf16", "xla fp8", "cross fp8", "all fp8")
    recipe: str = "fp8_tensorwise_delayed"
    width: int = 3456
    rank: int = 512
    budget_s: float | None = None


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    result = results.head("cross_network", arguments) | {
        "inputs": "N(0, 1)",
        "runs": [],
    }
    for batch in arguments.batches:
        for name in arguments.models:
            seconds = time.perf_counter() - start
            if arguments.budget_s is not None and seconds > arguments.budget_s:
                print(f"stopped before {name} {batch}: {seconds:.0f} s are over")
                return result
            run = measure(name, batch, arguments)
            result["runs"].append(run)
            result["seconds"] = time.perf_counter() - start
            print(f"{name}, {batch} rows [{result['seconds']:.0f} s]")
            _print(run["programs"])
            results.write(arguments.out, result)
    return result


def measure(name: str, batch: int, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of all arms of a model."""
    model, shapes = _model(name, arguments)
    inputs = [_normal(shapes(batch), seed) for seed in range(_SETS)]
    programs: dict[str, Any] = {}
    params = _params(model, _normal(shapes(_FEW), 0))
    for arm, planned in _arms(model, shapes(_FEW), arguments).items():
        variables = _initialized(planned, params, _normal(shapes(_FEW), 0))
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
    return {"model": name, "batch": batch, "programs": _timed(programs, compiled)}


def _timed(programs, compiled) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    cases = {}
    for key, program in compiled.items():
        if isinstance(program, Exception):
            records[key] = {"failed": str(program)[:500]}
            continue
        memory = program.memory_analysis()
        records[key] = {"temporary_bytes": getattr(memory, "temp_size_in_bytes", None)}
        cases[key] = Case(program, [leaves(x) for x in programs[key][1]])
    for key, taken in time_kernels(cases).items():
        records[key] |= taken._asdict()
        longest = profile_kernels(functools.partial(_calls, cases[key]))
        records[key]["longest"] = None if longest is None else longest.longest
    return records


def _calls(case: Case, calls: int):
    """Returns the results of the last of some calls."""
    return [case.function(*case.arguments[i % _SETS]) for i in range(calls)][-1]


def _model(name: str, arguments: Arguments):
    if name == "dcnv2":
        return models.wide("mlperf_dcnv2")
    model = nn.CrossNet(3, rank=arguments.rank, recipe="bf16")
    return model, lambda m: ((m, arguments.width),)


def _arms(model: linen.Module, shapes, arguments: Arguments) -> dict[str, nn.Planned]:
    recipe = arguments.recipe
    inputs = _normal(shapes, 0)
    sites = nn.list_sites(model.clone(recipe="fp8_rowwise"), *inputs)
    free = [site for site in sites if site.has_choice and site.recipe != "f32"]
    of_cross = [s for s in free if s.path.rpartition("/")[2][:2] in ("u_", "v_")]
    choices = tuple((site.path, Choice.parse(f"xla {recipe}")) for site in of_cross)
    name = "fused" if isinstance(model, nn.CrossNet) else "fused_wide"
    option: dict[str, Any] = {name: True}
    arms = {
        "xla bf16": forced(model, free, "xla bf16"),
        "xla fp8": forced(model, free, f"xla {recipe}"),
        "cross fp8": nn.Planned(model.clone(recipe="bf16", **option), choices),
        "all fp8": nn.Planned(model.clone(recipe=recipe, **option)),
    }
    return {name: arms[name] for name in arguments.arms}


def _params(model, inputs):
    init = jax.jit(model.init, compiler_options=_untuned())
    return init(jax.random.key(0), *inputs)["params"]


def _initialized(planned: nn.Planned, params, inputs) -> dict[str, Any]:
    """Returns variables whose delayed scales are set, from few rows."""
    variables: dict[str, Any] = {"params": params}
    if not planned.is_delayed:
        return variables
    shapes = jax.eval_shape(planned.init, jax.random.key(0), *inputs)
    # A table of zeros is that of a site before its first step, but for its factors.
    states = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), shapes[OVERWRITE_WITH_GRADIENT]
    )
    variables[OVERWRITE_WITH_GRADIENT] = states
    first = planned.by_xla()
    out = jax.eval_shape(first.apply, variables, *inputs)
    g = jax.random.normal(jax.random.key(9), out.shape, out.dtype)
    train = jax.jit(functools.partial(_train, first), compiler_options=_untuned())
    _, (grads, *_) = train(variables, inputs, g)
    return variables | {OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}


def _untuned() -> dict[str, str]:
    return dict(UNTUNED) if jax.default_backend() == "gpu" else {}


def _train(planned: nn.Planned, variables, inputs, g):
    """Returns the output, and the gradients of variables and inputs for its g."""

    def run(variables, *inputs):
        return jnp.asarray(planned.apply(variables, *inputs))

    y, pull = jax.vjp(run, variables, *inputs)
    return y, pull(g)


def _normal(shapes, seed: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )


def _print(records: dict[str, dict[str, Any]]):
    for key, record in records.items():
        if "failed" in record:
            print(f"  {key:28} failed: {record['failed'][:200]}")
            continue
        kind, _, _ = key.partition(" ")
        base = records.get(f"{kind} xla bf16", record).get("median_us")
        ratio = base / record["median_us"] if base else float("nan")
        memory = (record["temporary_bytes"] or 0) / 1e9
        count = record["kernels"] or 0
        print(
            f"  {key:28} {record['median_us']:9.0f} us {ratio:5.2f}x "
            f"{count:4.0f} kernels {memory:6.2f} GB",
            flush=True,
        )
        for name, taken_us, calls in (record["longest"] or [])[:8]:
            print(f"      {taken_us:8.1f} us {calls:4.0f}  {name[:90]}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
