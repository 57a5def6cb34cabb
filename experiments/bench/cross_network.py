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
import pathlib
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import linen

from experiments.bench import models
from experiments.bench import result as results
from experiments.bench.arms import measure_arms, print_records
from experiments.bench.dispatch import forced
from loka_jax import nn
from loka_jax.site import Choice

_FEW = 256  # rows with which sites are listed


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
            print_records(run["programs"])
            results.write(arguments.out, result)
    return result


def measure(name: str, batch: int, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of all arms of a model."""
    model, shapes = _model(name, arguments)
    arms = _arms(model, shapes(_FEW), arguments)
    programs = measure_arms(model, arms, shapes, batch)
    return {"model": name, "batch": batch, "programs": programs}


def _model(name: str, arguments: Arguments):
    if name == "dcnv2":
        return models.wide("mlperf_dcnv2")
    model = nn.CrossNet(3, rank=arguments.rank, recipe="bf16")
    return model, lambda m: ((m, arguments.width),)


def _arms(model: linen.Module, shapes, arguments: Arguments) -> dict[str, nn.Planned]:
    recipe = arguments.recipe
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
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


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
