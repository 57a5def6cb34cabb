"""Times tuning configs of the fused forward kernel and writes the fastest ones.

    python experiments/bench/tune_kernels.py --out loka_jax/pallas/tuned_h200.json

Every shape, number of rows and set of outputs is timed with every config of its search
space: kernel time by JAX's profiler over rotated inputs. All times are written beside
the fastest configs. Entries of other problems stay in the table.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.normed import Epilogue, NormVectors, Outputs
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.dense_norm_layout import (
    Problem,
    TuningConfig,
    problem_key,
    search_space,
)
from loka_jax.site import SiteSpec
from loka_jax.train.record import versions

BF16 = jnp.bfloat16
FORMS = {
    "fp8 to fp8": (E4M3, Outputs(y=False, y_fp8="tensorwise")),
    "fp8 to fp8 rows": (E4M3, Outputs(y=False, y_fp8="rowwise")),
    "fp8 to bf16": (E4M3, Outputs()),
    "training": (E4M3, Outputs(y_fp8="tensorwise", xhat=E4M3, rstd=True)),
    "bf16": (BF16, Outputs()),
}
ROTATED_BYTES = 120e6  # twice the L2
MAX_SETS = 16
_NO_CAPTURE = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to time.

    Attributes:
        out: the table to write.
        m: numbers of rows.
        shapes: K x N.
        forms: dtypes and outputs, by name.
    """

    out: pathlib.Path
    m: tuple[int, ...] = (2048, 8192, 65536)
    shapes: tuple[str, ...] = ("128x128", "256x256", "512x256", "512x512")
    forms: tuple[str, ...] = tuple(FORMS)


def main(arguments: Arguments):
    """Times all problems and writes the table."""
    best: dict[str, dict[str, Any]] = {}
    times: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.out.exists():
        table = json.loads(arguments.out.read_text())
        best, times = table["configs"]["dense_norm"], table["times_us"]
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
            "last_command": shlex.join(["python", *sys.argv]),
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
            "configs": {"dense_norm": best},
            "times_us": times,
        }
        arguments.out.write_text(json.dumps(table, indent=1) + "\n")


def time_configs(problem: Problem) -> dict[TuningConfig, float]:
    """Returns microseconds per launch with each config of the search space."""
    p, spec = problem, problem.spec
    epilogue = Epilogue(spec.norm, spec.activation)
    itemsize = jnp.dtype(p.dtype).itemsize
    sets = max(2, min(MAX_SETS, int(ROTATED_BYTES / (spec.m * spec.k * itemsize))))
    keys = jax.random.split(jax.random.key(0), sets + 1)
    make = jax.jit(lambda key: jax.random.normal(key, (spec.m, spec.k)).astype(p.dtype))
    rows = [(make(key),) for key in keys[:-1]]
    w = jax.random.normal(keys[-1], (spec.n, spec.k)).astype(p.dtype)
    vectors = NormVectors(gamma=jnp.ones((spec.n,)), beta=jnp.zeros((spec.n,)))

    def compiled(config):
        def launch(x):
            is_fp8 = p.dtype == E4M3
            scale = jnp.float32(1.0)
            return dense_norm(
                Fp8Array(x, scale) if is_fp8 else x,
                Fp8Array(w, scale) if is_fp8 else w,
                vectors,
                epilogue=epilogue,
                want=p.want,
                y_scale_inv=scale if p.want.y_fp8 == "tensorwise" else None,
                config=config,
            )

        return jax.jit(launch).lower(*rows[0]).compile(_NO_CAPTURE)

    space = search_space(p)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        functions = list(pool.map(compiled, space))
    cases = {str(i): Case(f, rows) for i, f in enumerate(functions)}
    return {
        config: time.median_us
        for config, time in zip(space, time_kernels(cases).values(), strict=True)
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
