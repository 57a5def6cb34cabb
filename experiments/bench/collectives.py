"""Times sums over all GPUs of a host: XLA's in float32 and bfloat16, ours in 8 bits.

    python experiments/bench/collectives.py --out collectives.json [--table TABLE]

One process drives all GPUs. For every size of a device's float32 array:

    f32          psum
    bf16         cast, psum, cast back
    int8 xla     quantized_psum, XLA's passes around collectives; block after `b`
    int8 triton  the same with our kernels; e4m3 likewise

Each is repeated inside one program, a sum of sums, so that its dispatch (about 150 us,
one process for all devices) is shared by all repetitions; programs are queued one
behind the other, and those of all forms take turns. Times are wall clock of that
queue, divided by the repetitions. Sums are compared with psum's on the devices: SQNR,
and whether all devices have the same bits. `wire` is the dtypes of the collectives in
the compiled program: XLA may sum bfloat16 in float32.

`--table` adds the times to the table by which `gradients auto` chooses.
On a CPU, to try it: `--mib 0.01 --repeat 2` and
XLA_FLAGS=--xla_force_host_platform_device_count=2.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import result as results
from loka_jax import triton
from loka_jax.dispatch import gradient_wire
from loka_jax.measure.timing import time_chains
from loka_jax.ops.collectives import quantized_psum, sum_gradients
from loka_jax.terminal import one_line

AXIS = "device"
SMALL = 2.0**-60  # repeated sums grow: 20 over 8 devices by 2^60
_COLLECTIVE = re.compile(
    r"= (.+?) (?:all-to-all|all-gather|all-reduce|reduce-scatter)(?:-start)?\("
)

Sum = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        table: the table of `gradients auto` to which the times are added.
        mib: sizes of a device's array in float32.
        blocks: of 8-bit forms at every size.
        all_blocks_at: the size at which every block is timed.
        repeat: sums in a program.
    """

    table: pathlib.Path | None = None
    mib: tuple[float, ...] = (1, 4, 16, 64, 256)
    blocks: tuple[int, ...] = (128,)
    all_blocks_at: float = 64
    repeat: int = 20


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    mesh = jax.make_mesh(
        (jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
    )
    result = results.head("collectives", arguments) | {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "time": f"wall clock, {arguments.repeat} sums in a program, queued",
        "inputs": "N(0, 1), another seed on every device",
        "triton": triton.why_not_here() or "runs",
        "rows": [],
    }
    print(f"{result['devices']} x {result['device']}, Triton: {result['triton']}")
    for mib in results.in_time(arguments.mib, result, arguments):
        result["rows"].append({"mib": mib} | measure(mesh, arguments, mib))
        _print(result["rows"][-1])
    if arguments.table is not None:
        gradient_wire.add(arguments.table, host_times(result))


def forms(arguments: Arguments, mib: float) -> dict[str, Sum]:
    """Returns the sums by name."""
    key = jax.random.key(0)
    sums: dict[str, Sum] = {
        "f32": functools.partial(sum_gradients, axis_name=AXIS, wire="f32", key=key),
        "bf16": functools.partial(sum_gradients, axis_name=AXIS, wire="bf16", key=key),
    }
    every = {*arguments.blocks, 32, 128, 256}
    blocks = sorted(every) if mib == arguments.all_blocks_at else arguments.blocks
    for provider in ("xla",) if triton.why_not_here() else ("xla", "triton"):
        for block in arguments.blocks if provider == "xla" else blocks:
            for format in ("int8", "e4m3"):
                sums[f"{format} {provider} b{block}"] = functools.partial(
                    quantized_psum,
                    axis_name=AXIS,
                    key=key,
                    format=format,
                    block=block,
                    implementation=provider,
                )
    return sums


def measure(mesh: jax.sharding.Mesh, arguments: Arguments, mib: float):
    """Returns the times of all forms at a size, their errors and what travels."""
    size, devices = round(mib * 2**18), mesh.size
    spec = P(AXIS)
    make = jax.jit(
        lambda key: jax.random.normal(key, (devices, size)),
        out_shardings=NamedSharding(mesh, spec),
    )
    x = make(jax.random.key(0, impl="rbg"))
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False, in_specs=spec)
    sums = forms(arguments, mib)
    records: dict[str, dict[str, Any]] = {name: {} for name in sums}
    chains = {}
    for name, total in sums.items():
        repeated = over(
            functools.partial(_repeated, total, arguments.repeat), out_specs=spec
        )
        try:
            program = jax.jit(repeated).lower(x).compile()
            jax.block_until_ready(program(x))
        except Exception as error:  # the others are still worth timing
            records[name]["failed"] = one_line(error)
            continue
        records[name]["wire"] = wire_types(program.as_text() or "")
        chains[name] = functools.partial(_queue, program, x)
    for name, timing in time_chains(chains, calls=2, rounds=5).items():
        us = {key: value / arguments.repeat for key, value in timing._asdict().items()}
        bus = 2 * (devices - 1) / devices * 4 * size / us["median_us"] / 1e3
        records[name] |= us | {"bus_gb_s": bus}
    checks = jax.jit(
        over(
            functools.partial(_checks, {name: sums[name] for name in chains}),
            out_specs=P(),
        )
    )(x)
    for name, (sqnr_db, is_equal) in checks.items():
        records[name] |= {"sqnr_db": float(sqnr_db), "equal_bits": bool(is_equal)}
    for record in records.values():
        if "median_us" in record and "median_us" in records["f32"]:
            record["vs_f32"] = records["f32"]["median_us"] / record["median_us"]
            record["vs_bf16"] = records["bf16"]["median_us"] / record["median_us"]
    return {"forms": records}


def _repeated(total: Sum, count: int, x: jax.Array) -> jax.Array:
    """Returns a value of the last of many sums, each of the one before it.

    So a sum may be in place, as that of a step's gradients is: no copy is timed.
    """
    x = jax.lax.fori_loop(0, count, lambda _, y: total(y), SMALL * x[0])
    return x[:1]


def _queue(program: Any, x: jax.Array, calls: int) -> list[jax.Array]:
    return [program(x) for _ in range(calls)]


def _checks(sums: Mapping[str, Sum], x: jax.Array):
    """Returns each sum's SQNR against psum, and whether devices have equal bits."""
    x = x[0]
    exact = jax.lax.psum(x, AXIS)
    signal = jnp.sum(jnp.square(exact))

    def check(total: Sum):
        y = total(x)
        bits = jax.lax.bitcast_convert_type(y, jnp.int32)
        least, most = (f(bits, AXIS) for f in (jax.lax.pmin, jax.lax.pmax))
        noise = jnp.maximum(jnp.sum(jnp.square(y - exact)), 1e-30)
        return 10 * jnp.log10(signal / noise), jnp.all(least == most)

    return {name: check(total) for name, total in sums.items()}


def wire_types(hlo: str) -> list[str]:
    """Returns the dtypes of the arrays in a program's collectives."""
    types = " ".join(_COLLECTIVE.findall(hlo))
    return sorted(set(re.findall(r"([a-z]\w*)\[", types)))


def host_times(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of a result as the table of `gradients auto` has them."""
    names = {"f32": "f32", "bf16": "bf16"}
    names |= {f"int8 {p}": f"int8 {p} b128" for p in ("xla", "triton")}
    times: dict[str, dict[str, float]] = {}
    for name, form in names.items():
        times[name] = {
            str(round(row["mib"] * 2**20)): round(row["forms"][form]["median_us"], 1)
            for row in result["rows"]
            if "median_us" in row["forms"].get(form, {})
        }
    return {
        "device": result["device"],
        "devices": result["devices"],
        "source": result["command"],
        "us": {name: values for name, values in times.items() if values},
    }


def _print(row: dict[str, Any]) -> None:
    print(f"{row['mib']} MiB")
    for form, record in row["forms"].items():
        shown = {
            k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()
        }
        print(f"  {form:26}", shown, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
