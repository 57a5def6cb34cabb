"""Times the tails of wide layers by tile: norms of whole rows beside block norms.

    python experiments/bench/norm_tails.py --out norm_tails.json

A tail writes E4M3 and its transpose forward, E5M2 backward, with the amax, as in
training, and E4M3 alone in inference; "layer" and "rms" have gamma, "layer" beta, all
have swish. For every shape, norm and pass: kernel time of each tile by JAX's profiler,
over input sets that together exceed twice the L2, and its time over that of the block
norm (`vs_block`). Norms of whole rows take two kernels in training, of statistics and
of the tail.

Needs a Hopper GPU and the extra triton.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.forms import Form, num_sets, print_records, time_forms
from loka_jax import xla
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Epilogue, NormName, NormVectors
from loka_jax.tails import Forms, Scale, Scaled, Tails
from loka_jax.triton import tails
from loka_jax.triton.tails import Tile

_NORMS: tuple[NormName, ...] = ("block", "layer", "rms")
_LEAST_DB = 20.0  # E5M2 rounds to 2 bits: a wrong tail is far below


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        shapes: rows by columns, as "8192x3072".
    """

    shapes: tuple[str, ...] = ("8192x3072", "16384x2048", "8192x1024", "65536x4096")

    def cases(self) -> list[tuple[int, int, NormName]]:
        """Returns rows, columns and norm of each case, block norms first."""
        sizes = (map(int, shape.split("x")) for shape in self.shapes)
        return [(m, n, norm) for m, n in sizes for norm in _NORMS]


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    result = results.head("norm_tails", arguments) | {"rows": []}
    fastest: dict[tuple, float] = {}
    for m, n, norm in results.in_time(arguments.cases(), result, arguments):
        for name, forms in forms_of(m, n, norm).items():
            records = time_forms(forms)
            times = [x["us"] for form, x in records.items() if "us" in x]
            if norm == "block":  # without a GPU XLA is the only form
                fastest[m, n, name] = min(times)
            for record in records.values():
                if "us" in record:
                    record["vs_block"] = record["us"] / fastest[m, n, name]
            row = {"m": m, "n": n, "norm": norm, "pass": name, "forms": records}
            result["rows"].append(row)
            print(f"{m} x {n}, {norm}, {name}")
            print_records(records)


def tiles_of(norm: NormName) -> list[Tile]:
    """Returns the tiles to time."""
    sizes = [(32, 256, 8), (32, 256, 4), (64, 256, 8)]
    if norm != "block":
        sizes = [(64, 64, 4), (64, 128, 4), (64, 128, 8), (32, 128, 4), (128, 64, 8)]
    return [Tile(*size) for size in sizes]


def forms_of(m: int, n: int, norm: NormName) -> dict[str, dict[str, Form]]:
    """Returns the forms of each pass: a tile each, and XLA's."""
    sets = [_operands(m, n, norm, i) for i in range(num_sets(6.0 * m * n))]
    epilogue = Epilogue(norm, "swish")
    passes: dict[str, dict[str, Form]] = {}
    for kind in ("forward", "backward", "inference"):
        exact = _run(kind, xla.tails, epilogue)
        runs = {"xla": exact} | {
            str(tuple(tile)): _run(kind, tails, epilogue, tile=tile)
            for tile in tiles_of(norm)
        }
        passes[kind] = {
            name: Form(run, sets, exact, _LEAST_DB) for name, run in runs.items()
        }
    return passes


def _run(kind: str, by: Tails, epilogue: Epilogue, **how: Any) -> Callable[..., Any]:
    """Returns the function of a pass by a provider of tails."""
    scale = Scale.of(jnp.float32(1 / 16))
    want = Forms(bf16=False, fp8=E4M3, transposed=True, amax=True)

    def forward(z, d, residuals, vectors):
        del d, residuals
        how_y = dict(epilogue=epilogue, want=want, y_scale_inv=scale)
        return _numbers(by.norm_tail([z], vectors, **how_y, **how).y)

    def backward(z, d, residuals, vectors):
        del z
        in_e5m2 = dataclasses.replace(want, fp8=E5M2)
        how_dz = dict(epilogue=epilogue, want=in_e5m2, dz_scale_inv=scale)
        out = by.norm_tail_backward([d], residuals, vectors, **how_dz, **how)
        return _numbers(out.dz), out.vectors

    def inference(z, d, residuals, vectors):
        del d, residuals
        alone = Forms(bf16=False, fp8=E4M3)
        how_y = dict(epilogue=epilogue, want=alone, y_scale_inv=scale, xhat=None)
        return by.norm_tail([z], vectors, **how_y, **how).y.fp8

    return {"forward": forward, "backward": backward, "inference": inference}[kind]


def _numbers(y: Any) -> tuple[Any, ...]:
    return y.fp8, y.fp8_t, y.amaxes.max()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _operands(m: int, n: int, norm: NormName, seed: int) -> tuple[Any, ...]:
    """Returns products z and d, what the forward pass keeps, and vectors."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
    z, d = (jax.random.normal(key, (m, n), jnp.bfloat16) for key in keys[:2])
    gamma, beta = (jax.random.normal(key, (n,)) for key in keys[2:])
    vectors = {
        "block": NormVectors(),
        "rms": NormVectors(gamma=1 + 0.1 * gamma),
        "layer": NormVectors(gamma=1 + 0.1 * gamma, beta=beta),
    }[norm]
    options: dict[str, Any] = dict(epilogue=Epilogue(norm, "swish"), want=Forms())
    residuals = xla.tails.norm_tail([Scaled(z)], vectors, **options).residuals
    assert residuals is not None
    return Scaled(z), Scaled(d), residuals, vectors


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
