"""Times the end of a layer of embeddings, `norm([part_1; part_2] + x)`: XLA and Triton.

    python experiments/bench/joined_norm.py --out joined_norm.json

Kernel time forward, and forward and backward, of Wukong M, L and XL's shapes, with the
share of the floor: operands and results moved once, by the copy bandwidth measured
first. "xla" is the concatenation, sum and BlockNorm of the models, "twin" the same
equations with the backward pass of the operation.

Without a GPU times are wall clock: `--cases wukong_m@64 --forms xla twin`.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.forms import Form, print_records, time_forms
from loka_jax import nn
from loka_jax.measure.roofline import measure_roofline
from loka_jax.ops.joined_norm import joined_norm

SHAPES = {  # embeddings of each part, and d
    "wukong_m": ((32, 32), 128),
    "wukong_l": ((48, 48), 160),
    "wukong_xl": ((96, 96), 160),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every case; printed only if None.
        cases: shapes and examples.
        forms: of those above.
    """

    out: pathlib.Path | None = None
    cases: tuple[str, ...] = ("wukong_m@16384", "wukong_l@16384", "wukong_xl@4096")
    forms: tuple[str, ...] = ("xla", "twin", "triton")


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    roofline = measure_roofline()
    result = results.head("joined_norm", arguments) | {
        "inputs": "N(0, 1)",
        "roofline": dataclasses.asdict(roofline),
        "runs": [],
    }
    for case in arguments.cases:
        records = measure(case, arguments.forms)
        for record in records.values():
            if "us" in record:
                floor_us = roofline.floor_us(record["num_bytes"], 0.0, "bf16")
                record["of_floor"] = floor_us / record["us"]
        print(case)
        print_records(records)
        result["runs"].append({"case": case, "forms": records})
        results.write(arguments.out, result)
    return result


def measure(case: str, forms: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Returns the times of all forms of a case."""
    name, _, batch = case.partition("@")
    counts, d = SHAPES[name]
    shapes = [(int(batch), count, d) for count in (*counts, sum(counts), sum(counts))]
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(shapes))
    *parts, x, dy = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )
    forward, both = [(tuple(parts), x)], [(tuple(parts), x, dy)]
    timed: dict[str, Form] = {}
    for form in forms:
        run = _run(form)
        timed[f"forward {form}"] = Form(run, forward, _by_block_norm)
        exact = functools.partial(_both, _by_block_norm)
        timed[f"both {form}"] = Form(functools.partial(_both, run), both, exact)
    return time_forms(timed)


def _run(form: str):
    if form == "xla":
        return _by_block_norm
    provider = "triton" if form == "triton" else "xla"
    return functools.partial(joined_norm, implementation=provider)


def _by_block_norm(parts, x):
    return nn.BlockNorm().apply({}, jnp.concatenate(parts, axis=1) + x)


def _both(run, parts, x, dy):
    """Returns the result and the gradients of parts and x."""
    y, pull = jax.vjp(run, parts, x)
    return y, pull(dy)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
