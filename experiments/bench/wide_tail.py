"""Times what follows wide products: a cross layer's tail, a norm's, and the products.

    python experiments/bench/wide_tail.py --out wide_tail.json

For every shape: kernel time of each form (`wide_tail_forms.py`) by JAX's profiler,
operands beyond the L2, with its number of kernels and its share of the floor: operands
and results moved once, by the copy bandwidth measured first. Triton's kernels are timed
with every tuning config; smaller sets of results with the best one. They are checked
against XLA's results first (`wide_tail_check.py`) and not timed if they differ.

The products are those of MLPerf's DLRM-DCNv2, operands K-major, in bfloat16 and FP8.

`--only triton` leaves out XLA's forms and the products. Without a GPU times are wall
clock and only XLA's forms run, to try the script: `--shapes 128x256 --batches 256`.
"""

import dataclasses
import pathlib
import time
from typing import Any, Literal

import jax
import tyro

from experiments.bench import result as results
from experiments.bench import wide_product_forms as products
from experiments.bench import wide_tail_forms as forms
from experiments.bench.wide_tail_check import difference
from experiments.bench.wide_tail_forms import Form
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.measure.roofline import Roofline, measure_roofline
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.terminal import one_line
from loka_jax.triton.tail import TuningConfig

SHAPES = ("65536x3456", "8192x3456", "16384x4096", "16384x7680", "4096x8192")
ROTATED_BYTES = 120e6  # twice the L2
NOT_TIMED = ("why_not", "wrong", "failed")  # keys in place of a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every shape; printed only if None.
        shapes: rows by columns of the tails.
        batches: of the products.
        only: leave out all but the tails of this provider.
        tune: time Triton's kernels with every config, not only the default.
        budget_s: begin no shape after that many seconds.
    """

    out: pathlib.Path | None = None
    shapes: tuple[str, ...] = SHAPES
    batches: tuple[int, ...] = (65536, 8192)
    only: Literal["xla", "triton"] | None = None
    tune: bool = True
    budget_s: float | None = None


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    roofline = measure_roofline()
    print(f"{jax.devices()[0].device_kind}: {roofline}")
    result = results.head("wide_tail", arguments) | {
        "inputs": "N(0, 1)",
        "roofline": dataclasses.asdict(roofline),
        "tails": [],
        "products": [],
    }
    steps = [("tails", shape) for shape in arguments.shapes]
    if arguments.only is None:
        steps[2:2] = [("products", f"{batch}") for batch in arguments.batches]
    for kind, name in steps:
        seconds = time.perf_counter() - start
        if arguments.budget_s is not None and seconds > arguments.budget_s:
            result["stopped_before"] = f"{kind} {name}"
            print(f"stopped before {kind} {name}: {seconds:.0f} s are over the budget")
            break
        if kind == "products":
            row = measure_products(int(name), roofline)
        else:
            m, n = map(int, name.split("x"))
            row = measure_tails(m, n, roofline, arguments)
        result[kind].append(row)
        result["seconds"] = time.perf_counter() - start
        print(f"{kind} {name} [{result['seconds']:.0f} s]")
        for form, record in row["forms"].items():
            print(f"  {form:58} {_describe(record)}", flush=True)
        results.write(arguments.out, result)
    return result


def measure_tails(
    m: int, n: int, roofline: Roofline, arguments: Arguments
) -> dict[str, Any]:
    """Returns a record of every tail by name, for (m, n) matrices."""
    operands = forms.make_operands(m, n)
    candidates = []
    if arguments.only != "triton":
        candidates += forms.xla_forms()
    if arguments.only != "xla":
        candidates += forms.triton_forms(m, n, arguments.tune)
    records = _measure(candidates, _arguments(candidates, operands))
    best = _best_configs(candidates, records)
    parts = forms.triton_parts(m, n, best)
    records |= _measure(parts, _arguments(parts, operands))
    for record in records.values():
        _add_floor(record, roofline, 0.0)
    configs = {name: dataclasses.asdict(config) for name, config in best.items()}
    return {"m": m, "n": n, "best_configs": configs, "forms": records}


def _best_configs(candidates: list[Form], records) -> dict[str, TuningConfig]:
    """Returns the config with which each of Triton's kernels was fastest."""
    best: dict[str, tuple[float, TuningConfig]] = {}
    for form in candidates:
        taken_us = records[form.name].get("us")
        if form.config is None or taken_us is None:
            continue
        if form.kernel not in best or taken_us < best[form.kernel][0]:
            best[form.kernel] = taken_us, form.config
    return {name: config for name, (_, config) in best.items()}


def measure_products(batch: int, roofline: Roofline) -> dict[str, Any]:
    """Returns a record of every product of a batch."""
    candidates, operands, flops = [], {}, {}
    for (m, k, n), names in products.sizes(batch).items():
        arrays = products.make_operands(m, k, n)
        for form in products.product_forms():
            name = f"{m}x{k}x{n} ({', '.join(names)}) {form.name}"
            candidates.append(form._replace(name=name))
            operands[name] = form.arguments(arrays)
            flops[name] = 2.0 * m * k * n
    records = _measure(candidates, operands)
    for name, record in records.items():
        _add_floor(record, roofline, flops[name], name.endswith(" bf16"))
    return {"batch": batch, "forms": records}


def _arguments(candidates: list[Form], operands: dict[str, Any]) -> dict[str, tuple]:
    """Returns the arguments of each form, by its name."""
    return {form.name: form.arguments(operands) for form in candidates}


def _measure(
    candidates: list[Form], arguments: dict[str, tuple]
) -> dict[str, dict[str, Any]]:
    """Returns a record of every form by name.

    A record has `us`, or a reason: `why_not` (it does not serve the shape), `wrong`
    (its results are) or `failed` (it does not compile).

    Args:
        candidates: the forms.
        arguments: of each form, by its name.
    """
    records: dict[str, dict[str, Any]] = {
        form.name: {"why_not": form.why_not} if form.why_not else {}
        for form in candidates
    }
    served = {form.name: form for form in candidates if form.why_not is None}
    references = _References(served, arguments)
    cases = {}
    for name, function in _compiled(served, arguments).items():
        form, record = served[name], records[name]
        if isinstance(function, Exception):
            record["failed"] = one_line(function)
            continue
        outputs = function(*leaves(arguments[name]))
        arrays = jax.tree.leaves((arguments[name], outputs))
        record["num_bytes"] = sum(array.nbytes for array in arrays)
        error = references.error(form, outputs, arguments[name])
        if error:
            record["wrong"] = error
        else:
            sets = _rotated(arguments[name], record["num_bytes"])
            cases[name] = Case(function, sets)
    for name, timing in time_kernels(cases).items():
        records[name] |= {
            "us": timing.median_us,
            "min_us": timing.min_us,
            "max_us": timing.max_us,
            "kernels": timing.kernels,
        }
    return records


class _References:
    """XLA's results, which those of other forms are compared with.

    Args:
        served: the forms, by name.
        arguments: of each form, by its name.
    """

    def __init__(self, served: dict[str, Form], arguments: dict[str, tuple]):
        programs = {
            _reference(form): (form.reference, arguments[name])
            for name, form in served.items()
            if form.reference is not None
        }
        self._programs = compile_all(programs)
        self._latest: tuple[str, Any] = "", None  # more would fill the memory

    def error(self, form: Form, outputs: Any, arguments: tuple) -> str:
        """Returns which results of a form are wrong, or why none can be compared."""
        if form.reference is None:
            return ""
        key = _reference(form)
        program = self._programs[key]
        if isinstance(program, Exception):
            return f"no reference: {one_line(program)}"
        if self._latest[0] != key:
            self._latest = "", None
            self._latest = key, program(*leaves(arguments))
        return difference(outputs, self._latest[1])


def _reference(form: Form) -> str:
    """Returns a name that forms share whose expected results are the same."""
    return f"{id(form.reference)} {form.reads}"


def _compiled(served: dict[str, Form], arguments: dict[str, tuple]) -> dict[str, Any]:
    """Returns compiled forms by name, or the exception where one failed."""
    compiled: dict[str, Any] = {}
    for options in {form.options for form in served.values()}:
        programs = {
            name: (form.run, arguments[name])
            for name, form in served.items()
            if form.options == options
        }
        compiled |= compile_all(programs, dict(options))
    return compiled


def _rotated(arguments: tuple, num_bytes: int) -> list[tuple]:
    """Returns copies of the arguments that together exceed the L2."""
    copies = max(1, round(ROTATED_BYTES / num_bytes + 0.5))
    if copies == 1:
        return [leaves(arguments)]
    return [leaves(jax.tree.map(lambda x: x.copy(), arguments)) for _ in range(copies)]


def _add_floor(
    record: dict[str, Any], roofline: Roofline, flops: float, is_bf16: bool = False
):
    """Adds the least time of a record's bytes and products, and what it reaches."""
    if "us" not in record:
        return
    num_bytes = record["num_bytes"]
    floor_us = roofline.floor_us(num_bytes, flops, "bf16" if is_bf16 else "fp8")
    record |= {
        "floor_us": floor_us,
        "of_floor": floor_us / record["us"],
        "tb_per_s": num_bytes / record["us"] / 1e6,
        "tflop_per_s": flops / record["us"] / 1e6,
    }


def _describe(record: dict[str, Any]) -> str:
    if "us" not in record:
        return ", ".join(f"{key}: {record[key]}" for key in record if key in NOT_TIMED)
    kernels = record["kernels"]
    count = "" if kernels is None else f"{kernels:4.0f} kernels"
    rate = f"{record['tb_per_s']:6.2f} TB/s {record['tflop_per_s']:6.0f} TFLOP/s"
    return f"{record['us']:9.1f} us{count}{rate}{record['of_floor']:6.0%} of the floor"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
