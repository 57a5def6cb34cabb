"""Times the exchange of embedding rows over GPUs, by codec, by XLA and by kernels.

    python experiments/bench/exchange.py --out exchange.json --budget-s 120

One process drives the GPUs. On each, `ids` ids of a power law look up rows that are
spread over all of them (`loka_jax.ops.exchange`):

    fetch        rows of a table -> codes -> all_to_all -> the row of each id
    give_back    sums of gradients by row -> codes -> all_to_all -> decoded
    wire         the all_to_all of such a payload alone; the difference is local work

Codecs are f32, bf16, e4m3 and int8 with a scale a row; `xla` casts in passes, `triton`
in kernels that gather and cast at once. Each is repeated in one program, every time
behind the last one, so that its dispatch (about 150 us) is shared; times are wall clock
of queued programs, over the repetitions. The summing by row is in none of them.
`error` is that of the fetched rows relative to the largest value of each, at worst, and
`equal_bits` says whether kernels gave what XLA did.

On a CPU, to try it: `--ids 512 --rows 4096 --dims 16 --calls 1` and
XLA_FLAGS=--xla_force_host_platform_device_count=2.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.bench import result as results
from loka_jax import triton
from loka_jax.measure.timing import time_chains
from loka_jax.ops import exchange, row_codec, row_order
from loka_jax.ops.exchange import Routed
from loka_jax.ops.joint_collectives import swap
from loka_jax.ops.row_codec import CODECS, Codec
from loka_jax.ops.row_order import VIRTUAL_SHARDS, Order
from loka_jax.ops.tables import TableSpec
from loka_jax.train.mesh.routing import capacity_for
from loka_jax.triton import Implementation

AXIS = "shard"
_SPREAD = P(AXIS)
ROUNDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        devices: numbers of GPUs; those that are not there are left out.
        dims: values of a row.
        ids: that each GPU looks up.
        rows: of the table, over all GPUs.
        codecs: of the payload.
        repeat: exchanges in a program.
        calls: programs in a round.
    """

    devices: tuple[int, ...] = (1, 2, 4, 8)
    dims: tuple[int, ...] = (16, 128)
    ids: int = 65_536 * 26
    rows: int = 10**7
    codecs: tuple[Codec, ...] = CODECS
    repeat: int = 4
    calls: int = 4


class Operands(NamedTuple):
    """What is exchanged; first dims are spread over the devices."""

    table: jax.Array
    sums: jax.Array
    routed: Routed


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    result = results.head("exchange", arguments) | {
        "time": f"wall clock, {arguments.repeat} exchanges in a program, queued",
        "inputs": "ids: 1 / rank; rows and sums: N(0, 1)",
        "triton": triton.why_not_here() or "runs",
        "cases": [],
    }
    there = [n for n in arguments.devices if n <= jax.device_count()]
    cases = list(itertools.product(there, arguments.dims))
    for devices, dim in results.in_time(cases, result, arguments):
        case = {"devices": devices, "dim": dim} | measure(arguments, devices, dim)
        result["cases"].append(case)
        _print(case)


def measure(arguments: Arguments, devices: int, dim: int) -> dict[str, Any]:
    """Returns the times of all forms on so many devices."""
    auto = (AxisType.Auto,)
    used = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=auto, devices=used)
    order = Order(arguments.rows, VIRTUAL_SHARDS)
    operands, need = _operands(arguments, mesh, order, dim)
    programs = _compiled(
        {
            f"{name} {part}": _repeated(mesh, arguments.repeat, run)
            for name, parts in forms(arguments, dim).items()
            for part, run in parts.items()
        },
        operands,
    )
    chains = {
        name: functools.partial(_queue, program, operands)
        for name, program in programs.items()
    }
    times = time_chains(chains, calls=arguments.calls, rounds=ROUNDS)
    records: dict[str, Any] = {}
    for key, timing in times.items():
        name, _, part = key.rpartition(" ")
        us = {k: value / arguments.repeat for k, value in timing._asdict().items()}
        records.setdefault(name, {})[part] = us
    capacity = operands.routed.asked.shape[1]
    for name, checks in _checks(arguments, mesh, operands, dim).items():
        num_bytes = devices * capacity * row_codec.row_bytes(_codec(name), dim)
        records[name] |= checks | {"payload_bytes": num_bytes}
    return {"capacity": capacity, "longest_list": need, "forms": records}


def forms(arguments: Arguments, dim: int) -> dict[str, dict[str, Callable]]:
    """Returns the parts of an exchange by form; each takes `Operands` of a device."""
    parts = {}
    for codec in arguments.codecs:
        has_kernels = codec != "f32" and not triton.why_not_here()
        for provider in ("xla", "triton") if has_kernels else ("xla",):
            parts[f"{codec} {provider}"] = {
                "fetch": functools.partial(_fetch, codec, provider),
                "give_back": functools.partial(_give_back, codec, provider),
                "wire": functools.partial(_wire, codec, dim),
            }
    return parts


def _fetch(codec: Codec, provider: Implementation | None, on: Operands) -> jax.Array:
    how: Any = {"implementation": provider}
    payload = swap(exchange.rows_to_send(on.table, on.routed, codec, **how), AXIS)
    return exchange.receive_rows(payload, on.routed, codec, on.table.shape[1], **how)


def _give_back(codec: Codec, provider: Implementation, on: Operands) -> Any:
    payload = row_codec.gather(
        *(on.sums, on.routed.ends, codec, jnp.zeros(2, jnp.uint32)),
        implementation=provider,
    )
    received = jax.lax.all_to_all(payload, AXIS, 0, 0, tiled=True)
    return row_codec.decode(received, codec, on.sums.shape[-1])


def _wire(codec: Codec, dim: int, on: Operands) -> jax.Array:
    lists, capacity = on.routed.asked.shape
    shape = (lists, capacity * row_codec.row_bytes(codec, dim))
    # Of the operands, so that it is neither a constant nor moved out of the program.
    payload = jnp.broadcast_to(on.routed.asked[:, :1].astype(jnp.uint8), shape)
    return jax.lax.all_to_all(payload, AXIS, 0, 0, tiled=True)


def _repeated(mesh: Mesh, count: int, run: Callable) -> Callable:
    """Returns a jitted function of `Operands` that runs so often, one after the other.

    It returns all results whole: XLA would leave out what is not used.
    """

    def repeated(on: Operands) -> list[Any]:
        outputs = []
        for _ in range(count):
            on, out = jax.lax.optimization_barrier((on, run(on)))
            outputs.append(out)
        return outputs

    return _over(mesh, repeated)


def _over(mesh: Mesh, function: Callable, out_specs: Any = _SPREAD) -> Callable:
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=P(AXIS),
            out_specs=out_specs,
            check_vma=False,
        )
    )


def _compiled(functions: Mapping[str, Any], operands: Operands) -> dict[str, Any]:
    """Returns programs by name, compiled side by side."""
    lowered = {name: function.lower(operands) for name, function in functions.items()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        return dict(zip(lowered, compiled, strict=True))


def _queue(program: Any, operands: Operands, calls: int) -> Any:
    for _ in range(calls - 1):
        program(operands)
    return program(operands)


def _operands(
    arguments: Arguments, mesh: Mesh, order: Order, dim: int
) -> tuple[Operands, int]:
    """Returns table, sums and routes, and the length of the longest list."""
    devices = mesh.size
    spec = TableSpec(rows=(arguments.rows,), dim=dim)

    def ids_of(key: jax.Array) -> Any:
        # Ranks whose frequency is 1 / rank: their logarithm is uniform.
        u = jax.random.uniform(key[0], (arguments.ids, 1))
        ids = jnp.exp(u * jnp.log(float(arguments.rows))).astype(jnp.int32) - 1
        places = row_order.places_of_ids(spec, jnp.clip(ids, 0), order)
        return jax.tree.map(jnp.ravel, places)

    def route(key: jax.Array, capacity: int) -> Any:
        routed, need = exchange.route(ids_of(key), order, capacity, AXIS)
        routed = routed._replace(asked=swap(routed.asked, AXIS))
        return routed, jax.lax.pmax(need, AXIS)

    keys = jax.random.split(jax.random.key(0), devices)
    keys = jax.device_put(keys, NamedSharding(mesh, P(AXIS)))
    specs = P(AXIS), P()
    find = functools.partial(route, capacity=1)
    need = int(_over(mesh, find, specs)(keys)[1])
    capacity = capacity_for(float(need), order.places // devices)
    run = functools.partial(route, capacity=capacity)
    routed, _ = _over(mesh, run, specs)(keys)

    def normal(key: jax.Array) -> Any:
        counts = order.places // devices, arguments.ids
        return tuple(jax.random.normal(key[0], (count, dim)) for count in counts)

    table, sums = _over(mesh, normal)(keys)
    return Operands(table, sums, routed), need


def _checks(
    arguments: Arguments, mesh: Mesh, operands: Operands, dim: int
) -> dict[str, Any]:
    """Returns each form's error of fetched rows, and whether kernels agree with XLA."""

    fetches = {name: parts["fetch"] for name, parts in forms(arguments, dim).items()}

    def check(on: Operands) -> dict[str, Any]:
        fetched = {name: run(on) for name, run in fetches.items()}
        exact = _fetch("f32", None, on)
        largest = jnp.maximum(jnp.max(jnp.abs(exact), axis=1), 1e-30)
        checks = {}
        for name, rows in fetched.items():
            off = jnp.max(jnp.abs(rows.astype(jnp.float32) - exact), axis=1)
            is_equal = jnp.all(rows == fetched[f"{_codec(name)} xla"])
            worst = jax.lax.pmax(jnp.max(off / largest), AXIS)
            checks[name] = worst, jax.lax.pmin(is_equal.astype(jnp.int32), AXIS)
        return checks

    return {
        name: {"error": float(worst), "equal_bits": bool(is_equal)}
        for name, (worst, is_equal) in _over(mesh, check, P())(operands).items()
    }


def _codec(form: str) -> Any:
    return form.split()[0]


def _print(case: dict[str, Any]) -> None:
    print(f"{case['devices']} devices, D = {case['dim']}, C = {case['capacity']}")
    for form, record in case["forms"].items():
        times = ", ".join(
            f"{part} {record[part]['median_us']:.0f}"
            for part in ("fetch", "give_back", "wire")
        )
        print(
            f"  {form:12} us: {times}; {record['payload_bytes'] / 1e6:.1f} MB, "
            f"error {record['error']:.1e}, equal bits {record['equal_bits']}",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
