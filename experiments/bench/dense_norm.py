"""Times dense layers with LayerNorm and swish: XLA's forms and our kernels.

    python experiments/bench/dense_norm.py --out dense_norm.json

For every shape: kernel time of each form (`dense_norm_forms.py`) by JAX's profiler,
median over input sets that together exceed twice the L2; its share of the floor (its
operands and results moved once, or its product) by the copy bandwidth and GEMM rates
measured first; and its speed over the best of XLA's
bfloat16 forms. Ours are checked against float32 first and not timed if they are wrong.

Without a GPU times are wall clock and only XLA's forms run, to try the script:
`--m 128 --shapes 128x128`.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import tyro

from experiments.bench import dense_norm_forms as forms
from experiments.bench import result as results
from experiments.bench.dense_norm_forms import Form, Operands
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.measure.roofline import Roofline, measure_roofline
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.site import SiteSpec
from loka_jax.terminal import one_line

SHAPES = ("128x128", "256x256", "512x256", "512x512")
SHAPES += ("1024x512", "1024x1024", "2048x1024")
ROTATED_BYTES = 120e6  # twice the L2
MAX_SETS = 256
NOT_TIMED = ("why_not", "wrong", "failed")  # keys in place of a time
MAX_BACKWARD = 512  # K and N of the shapes whose backward pass is timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every shape; printed only if None.
        m: rows.
        shapes: input by output features, as "512x256".
        budget_s: begin no shape after that many seconds.
    """

    out: pathlib.Path | None = None
    m: tuple[int, ...] = (131072, 32768, 8192, 2048)
    shapes: tuple[str, ...] = SHAPES
    budget_s: float | None = None

    def specs(self) -> list[SiteSpec]:
        """Returns the layers, small ones first."""
        return [
            SiteSpec(m=m, k=k, n=n, norm="layer", activation="swish")
            for k, n in (map(int, shape.split("x")) for shape in self.shapes)
            for m in self.m
        ]


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    roofline = measure_roofline()
    print(f"{jax.devices()[0].device_kind}: {roofline}")
    result = results.head("dense_norm", arguments) | {
        "inputs": "N(0, 1); weights N(0, 1 / K)",
        "roofline": dataclasses.asdict(roofline),
        "rows": [],
    }
    for spec in arguments.specs():
        seconds = time.perf_counter() - start
        if arguments.budget_s is not None and seconds > arguments.budget_s:
            result["stopped_before"] = str(spec)
            print(f"stopped before {spec}: {seconds:.0f} s are over the budget")
            break
        records = measure(spec, roofline)
        result["rows"].append({"m": spec.m, "k": spec.k, "n": spec.n, "forms": records})
        result["seconds"] = time.perf_counter() - start
        print(f"{spec} [{result['seconds']:.0f} s]")
        for name, record in records.items():
            print(f"  {name:22}{_describe(record)}", flush=True)
        results.write(arguments.out, result)
    return result


def measure(spec: SiteSpec, roofline: Roofline) -> dict[str, Any]:
    """Returns a record of every form by name.

    A record has `us`, or a reason: `why_not` (it does not serve the shape), `wrong`
    (its results are) or `failed` (it does not compile).
    """
    candidates = forms.forward_forms(spec)
    if max(spec.k, spec.n) <= MAX_BACKWARD:
        candidates += forms.backward_forms(spec)
    records: dict[str, Any] = {
        form.name: {"why_not": form.why_not} if form.why_not else {}
        for form in candidates
    }
    served = {form.name: form for form in candidates if form.why_not is None}
    # Of the least that a call touches, FP8 in and out.
    num_sets = round(ROTATED_BYTES / (spec.m * (spec.k + spec.n)) + 0.5)
    operands = forms.make_operands(spec, min(max(2, num_sets), MAX_SETS))
    cases = _cases(served, operands, records)
    flops = 2.0 * spec.m * spec.k * spec.n
    for name, timing in time_kernels(cases).items():
        form = served[name]
        floor_us = roofline.floor_us(records[name]["num_bytes"], flops, form.gemm)
        records[name] |= {
            "us": timing.median_us,
            "min_us": timing.min_us,
            "max_us": timing.max_us,
            "kernels": timing.kernels,
            "floor_us": floor_us,
            "of_floor": floor_us / timing.median_us,
        }
    compare(records)
    return records


def _cases(
    served: dict[str, Form], operands: Operands, records: dict[str, Any]
) -> dict[str, Case]:
    """Returns the forms to time; records why the others are not."""
    sets = {name: operands.arguments(form.reads) for name, form in served.items()}
    programs = {name: (form.run, sets[name][0]) for name, form in served.items()}
    cases = {}
    for name, function in compile_all(programs).items():
        record = records[name]
        if isinstance(function, Exception):
            record["failed"] = one_line(function)
            continue
        outputs = function(*leaves(sets[name][0]))
        record |= check(served[name], sets[name][0], outputs)
        arrays = jax.tree.leaves((sets[name][0], outputs))
        record["num_bytes"] = sum(array.nbytes for array in arrays)
        if "wrong" not in record:
            cases[name] = Case(function, [leaves(arrays) for arrays in sets[name]])
    return cases


def check(form: Form, arguments: tuple, outputs: dict) -> dict[str, Any]:
    """Returns the SQNR of a form's outputs, and which of them are `wrong`."""
    least = form.least_db
    if least is None:
        return {}
    sqnr_db = forms.sqnr_db(form, arguments, outputs)
    wrong = [
        f"{name} {db:.1f} dB of {least:.0f}"
        for name, db in sqnr_db.items()
        if not db >= least
    ]
    return {"sqnr_db": sqnr_db} | ({"wrong": ", ".join(wrong)} if wrong else {})


def compare(records: dict[str, dict[str, Any]]) -> None:
    """Adds to each record the speed over XLA's fastest forms: `vs_xla` over bfloat16.

    For the fused kernels also `vs_best_xla`, over the fastest of XLA's forms that read
    the same operands.
    """
    bf16 = _fastest(records, forms.XLA_BF16)
    fp8 = _fastest(records, forms.XLA_FP8)
    backward = _fastest(records, forms.XLA_BACKWARD)
    for name, record in records.items():
        if "us" not in record or name in (*forms.XLA_BF16, *forms.XLA_BACKWARD):
            continue
        base = backward if name.startswith("bwd") else bf16
        if base is not None:
            record["vs_xla"] = base / record["us"]
        rivals = [bf16] if name in forms.READING_BF16 else [bf16, fp8]
        times_us = [time_us for time_us in rivals if time_us is not None]
        if name in forms.FUSED and times_us:
            record["vs_best_xla"] = min(times_us) / record["us"]


def _fastest(records: dict[str, dict[str, Any]], names: tuple[str, ...]):
    times_us = [records[n]["us"] for n in names if "us" in records.get(n, {})]
    return min(times_us, default=None)


def _describe(record: dict[str, Any]) -> str:
    if "us" not in record:
        return ", ".join(f"{key}: {record[key]}" for key in record if key in NOT_TIMED)
    ratio = f"{record['vs_xla']:6.2f}x" if "vs_xla" in record else " " * 7
    return f"{record['us']:9.1f} us{ratio}{record['of_floor']:6.0%} of the floor"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
