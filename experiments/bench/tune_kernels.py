"""Times tuning configs of the fused forward kernel and writes the fastest ones.

    python experiments/bench/tune_kernels.py --out loka_jax/pallas/tuned_h200.json

Every shape, number of rows and set of outputs is timed with every config of its search
space: kernel time by JAX's profiler over rotated inputs. All times are written beside
the fastest configs. Entries of other problems stay in the table. It needs a Hopper GPU.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.forms import num_sets
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.measure.compiling import compile_all
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.normed import Epilogue, NormVectors, Outputs
from loka_jax.ops.device import local_device
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.dense_norm_layout import (
    Problem,
    TuningConfig,
    problem_key,
    search_space,
)
from loka_jax.site import SiteSpec

BF16 = jnp.bfloat16
FORMS = {
    "fp8 to fp8": (E4M3, Outputs(y=False, y_fp8="tensorwise")),
    "fp8 to fp8 rows": (E4M3, Outputs(y=False, y_fp8="rowwise")),
    "fp8 to bf16": (E4M3, Outputs()),
    "training": (E4M3, Outputs(y_fp8="tensorwise", xhat=E4M3, rstd=True)),
    "bf16": (BF16, Outputs()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The problems to time.

    Attributes:
        out: the table to write.
        m: numbers of rows.
        shapes: K x N.
        forms: names of input dtypes and outputs.
    """

    out: pathlib.Path
    m: tuple[int, ...] = (2048, 8192, 65536)
    shapes: tuple[str, ...] = ("128x128", "256x256", "512x256", "512x512")
    forms: tuple[str, ...] = tuple(FORMS)


def main(arguments: Arguments) -> None:
    """Times all problems and writes the table.

    Raises:
        SystemExit: without a Hopper GPU.
    """
    why_not = local_device().why_not_pallas
    if why_not is not None:
        raise SystemExit(f"There is {why_not}: run this on one.")
    best: dict[str, dict[str, Any]] = {}
    times: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.out.exists():
        table = json.loads(arguments.out.read_text())
        best, times = table["configs"]["dense_norm"], table["times_us"]
    head = results.head("tune_kernels", arguments)
    for shape, form, m in itertools.product(
        arguments.shapes, arguments.forms, arguments.m
    ):
        k, n = map(int, shape.split("x"))
        dtype, want = FORMS[form]
        spec = SiteSpec(m=m, k=k, n=n, norm="layer", activation="swish")
        problem = Problem(spec=spec, dtype=dtype, want=want)
        time_by_config = time_configs(problem)
        if not time_by_config:
            continue
        key = problem_key(problem)
        fastest = min(time_by_config, key=time_by_config.__getitem__)
        best.setdefault(key, {})[str(m)] = dataclasses.asdict(fastest)
        times.setdefault(key, {})[str(m)] = {
            json.dumps(dataclasses.asdict(c)): t for c, t in time_by_config.items()
        }
        print(f"{key} m={m}: {time_by_config[fastest]:.2f} us, {fastest}", flush=True)
        table = {
            "last_command": head["command"],
            "device": head["versions"]["device_kind"],
            "versions": head["versions"],
            "configs": {"dense_norm": best},
            "times_us": times,
        }
        results.write(arguments.out, table)


def time_configs(problem: Problem) -> dict[TuningConfig, float]:
    """Returns microseconds per launch with each config of the search space."""
    spec, dtype = problem.spec, problem.dtype
    num_bytes = spec.m * spec.k * jnp.dtype(dtype).itemsize
    *row_keys, key = jax.random.split(jax.random.key(0), num_sets(num_bytes) + 1)
    make = jax.jit(lambda key: jax.random.normal(key, (spec.m, spec.k)).astype(dtype))
    rows = [(make(key),) for key in row_keys]
    w = jax.random.normal(key, (spec.n, spec.k)).astype(dtype)
    vectors = NormVectors(gamma=jnp.ones((spec.n,)), beta=jnp.zeros((spec.n,)))
    space = {str(config): config for config in search_space(problem)}
    programs = {
        name: (functools.partial(_launch, problem, config, w, vectors), rows[0])
        for name, config in space.items()
    }
    cases = {}
    for name, function in compile_all(programs).items():
        if isinstance(function, Exception):
            raise function
        cases[name] = Case(function, rows)
    times = time_kernels(cases)
    return {config: times[name].median_us for name, config in space.items()}


def _launch(problem: Problem, config: TuningConfig, w, vectors: NormVectors, x):
    spec, want, scale = problem.spec, problem.want, jnp.float32(1.0)
    is_fp8 = problem.dtype == E4M3
    return dense_norm(
        Fp8Array(x, scale) if is_fp8 else x,
        Fp8Array(w, scale) if is_fp8 else w,
        vectors,
        epilogue=Epilogue(spec.norm, spec.activation),
        want=want,
        y_scale_inv=scale if want.y_fp8 == "tensorwise" else None,
        config=config,
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
