"""Times dense layers with norm and activation: XLA's forms and our kernels.

    python experiments/bench/dense_norm.py --out dense_norm.json

For every shape: kernel time of each form (`dense_norm_forms.py`) by JAX's profiler,
median over input sets that together exceed twice the L2; its share of the floor, from
the copy bandwidth and GEMM rates measured first; how many times faster it is than the
best of XLA's bfloat16 forms; SQNR of ours against the exact product of the operands
read. A form that is wrong there is not timed.

Few rows are also timed by wall clock in chains of layers, each reading what the one
before wrote, launched kernel by kernel and captured in a command buffer.
"""

import dataclasses
import json
import pathlib
import shlex
import sys
import time
from typing import Any

import jax
import tyro

from experiments.bench import dense_norm_forms as forms
from experiments.bench import dense_norm_targets as targets
from experiments.bench.dense_norm_site import (
    Operands,
    Site,
    check,
    make_operands,
    with_scale,
)
from experiments.bench.roofline import Roofline, measure_roofline
from loka_jax.fp8 import Fp8Array
from loka_jax.measure.compiling import NO_CAPTURE, compile_all, leaves
from loka_jax.measure.timing import Case, time_chains, time_kernels
from loka_jax.normed import ActivationName, NormName
from loka_jax.train.record import versions

SHAPES = ("128x128", "256x256", "512x256", "512x512")
SHAPES += ("1024x512", "1024x1024", "2048x1024")
ROTATED_BYTES = 120e6  # twice the L2
MAX_SETS = 256
MAX_BACKWARD = 512  # K and N of the shapes whose backward pass is timed
# Chains: up to that many rows and features, for K = N.
CHAINED_ROWS, CHAINED_FEATURES, CHAINED_LAYERS = 8192, 256, 48
# What a layer of a chain hands on, by form.
CHAINED = {
    "xla_bf16": "y",
    "xla_bf16_f32_gemm": "y",
    "xla_fp8_to_fp8": "y_fp8",
    "fp8_to_fp8": "y_fp8",
    "fp8_to_fp8_tensor": "y_fp8",
    "bf16_twin": "y",
}

COLUMNS = {
    "XLA bf16": targets.XLA_BF16,
    "XLA 8>16": ("xla_fp8_to_bf16",),
    "XLA 8>8": ("xla_fp8_to_fp8",),
    "lib 8>8": targets.LIBRARY,
    "lib 8>16": ("library_to_bf16",),
    "8>8 row": ("fp8_to_fp8",),
    "8>8 one": ("fp8_to_fp8_tensor",),
    "8>16": ("fp8_to_bf16",),
    "twin": ("bf16_twin",),
    "quant": ("bf16_quantized",),
    "training": ("training",),
    "XLA bwd": targets.XLA_BACKWARD,
    "bwd fp8": ("bwd_fp8",),
    "bwd bf16": ("bwd_bf16",),
    "bwd 8>16": ("bwd_bf16_of_fp8",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every shape; printed only if None.
        norm: of every layer.
        activation: of every layer.
        m: rows.
        shapes: input by output features, as "512x256".
        forms: only forms whose names begin so.
        backward: time the backward pass too, up to 512 features.
        chains: time chains of layers too, up to 8192 rows and 256 features.
        budget_s: begin no shape after that many seconds.
        smoke: tiny sizes and XLA's forms, to try the script on any machine.
    """

    out: pathlib.Path | None = None
    norm: NormName = "layer"
    activation: ActivationName = "swish"
    m: tuple[int, ...] = (131072, 32768, 8192, 2048)
    shapes: tuple[str, ...] = SHAPES
    forms: tuple[str, ...] = ("",)
    backward: bool = True
    chains: bool = True
    budget_s: float | None = None
    smoke: bool = False

    def sites(self) -> list[Site]:
        """Returns the layers, small ones first."""
        return [
            Site(m=m, k=k, n=n, norm=self.norm, activation=self.activation)
            for k, n in (map(int, shape.split("x")) for shape in self.shapes)
            for m in self.m
        ]


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints a table and the targets, writes and returns the result."""
    start = time.perf_counter()
    if arguments.smoke:
        arguments = dataclasses.replace(
            arguments, m=(128,), shapes=("128x128",), forms=("xla",)
        )
        roofline = measure_roofline(side=128, copied=1 << 12)
    else:
        roofline = measure_roofline()
    result: dict[str, Any] = {
        "benchmark": "dense_norm",
        "command": shlex.join(["python", *sys.argv]),
        "arguments": dataclasses.asdict(arguments) | {"out": None},
        "versions": versions(),
        "inputs": "N(0, 1); weights N(0, 1 / K)",
        "roofline": dataclasses.asdict(roofline),
        "rows": [],
    }
    print(f"{jax.devices()[0].device_kind}: {roofline}")
    print(f"{arguments.norm} norm, {arguments.activation}; microseconds a call")
    print(" " * 16 + "".join(f"{label:>10}" for label in COLUMNS))
    for site in arguments.sites():
        seconds = time.perf_counter() - start
        if arguments.budget_s is not None and seconds > arguments.budget_s:
            result["stopped_before"] = str(site)
            print(f"stopped before {site}: {seconds:.0f} s are over the budget")
            break
        records = measure(site, roofline, arguments)
        row = {"m": site.m, "k": site.k, "n": site.n, "forms": records}
        result["rows"].append(row)
        print(_line(row, _cell_us), f"  [{time.perf_counter() - start:.0f} s]")
        result["targets"] = targets.judge(result["rows"])
        result["seconds"] = time.perf_counter() - start
        if arguments.out is not None:
            text = json.dumps(result, indent=1, allow_nan=False)
            arguments.out.write_text(text + "\n")
    _print_summary(result)
    return result


def measure(site: Site, roofline: Roofline, arguments: Arguments) -> dict[str, Any]:
    """Returns a record of every form by name.

    A record has `us`, or why there is none: `why_not` (the kernel refuses the shape),
    `wrong` (its results are) or `failed` (it does not compile or run).
    """
    backward = arguments.backward and max(site.k, site.n) <= MAX_BACKWARD
    found = forms.forward_forms(site)
    found += forms.backward_forms(site) if backward else []
    found = [form for form in found if form.name.startswith(arguments.forms)]
    reasons = {form.name: form.why_not() for form in found}
    records: dict[str, Any] = {k: {"why_not": v} for k, v in reasons.items() if v}
    found = [form for form in found if form.name not in records]
    # Of the least that a call touches, FP8 in and out.
    num_sets = ROTATED_BYTES / (site.m * (site.k + site.n))
    num_sets = 2 if arguments.smoke else min(max(2, round(num_sets + 0.5)), MAX_SETS)
    operands = make_operands(site, num_sets, backward=backward)
    compiled = compile_all({form.name: _program(form, operands) for form in found})
    cases = {}
    for form in found:
        record: dict[str, Any] = {}
        records[form.name] = record
        function, sets = compiled[form.name], operands.arguments(form.reads)
        if isinstance(function, Exception):
            record["failed"] = _one_line(function)
        elif _passes(site, form, function, sets[0], record):
            cases[form.name] = Case(function, [leaves(one) for one in sets])
    for name, taken in time_kernels(cases).items():
        (form,) = (form for form in found if form.name == name)
        floor_us = roofline.floor_us(form.num_bytes, site.flops, form.gemm)
        records[name] |= {
            "us": taken.median_us,
            "min_us": taken.min_us,
            "max_us": taken.max_us,
            "kernels": taken.kernels,
            "floor_us": floor_us,
            "of_floor": floor_us / taken.median_us,
        }
    small = site.m <= CHAINED_ROWS and site.k == site.n <= CHAINED_FEATURES
    if arguments.chains and small:
        timed = [form for form in found if form.name in cases]
        _time_chains(timed, operands, records, calls=2 if arguments.smoke else 30)
    targets.compare(records)
    return records


def _passes(site: Site, form: forms.Form, function, arguments, record) -> bool:
    """Runs a form once; checks it if it is ours. Notes what came out."""
    try:
        results = jax.block_until_ready(function(*leaves(arguments)))
    except Exception as error:  # a kernel's failure must not lose the others' times
        record["failed"] = _one_line(error)
        return False
    if not form.is_ours:
        return True
    checks, wrong = check(
        site, form.reads, arguments, results, casts_rows=form.casts_rows
    )
    record["checks"] = {name: one._asdict() for name, one in checks.items()}
    if wrong is not None:
        record["wrong"] = wrong
    return wrong is None


def _time_chains(found, operands: Operands, records, *, calls: int) -> None:
    """Adds the wall clock a layer, launched one by one and captured."""
    programs = {
        form.name: _chain_program(form, operands)
        for form in found
        if form.name in CHAINED
    }
    # Captured is what XLA does by itself.
    for measure, options in (("launched_us", NO_CAPTURE), ("captured_us", {})):
        chains = {}
        for name, function in compile_all(programs, options).items():
            if isinstance(function, Exception):
                records[name]["chain_failed"] = _one_line(function)
            else:
                chains[name] = _repeat(function, leaves(programs[name][1]))
        for name, taken in time_chains(chains, calls=calls).items():
            records[name][measure] = taken.median_us / CHAINED_LAYERS


def _program(form: forms.Form, operands: Operands):
    return form.run, operands.arguments(form.reads)[0]


def _chain_program(form: forms.Form, operands: Operands):
    layer = jax.jit(form.run)  # traced once for all layers
    result = CHAINED[form.name]

    def chain(rows, *others):
        for _ in range(CHAINED_LAYERS):
            given_scale = isinstance(rows, Fp8Array) and rows.scale_inv.ndim == 0
            rows = layer(rows, *others)[result]
            rows = with_scale(rows) if given_scale else rows
        return rows

    return chain, operands.arguments(form.reads)[0]


def _repeat(function, arguments):
    def queue(count: int):
        out = None
        for _ in range(count):
            out = function(*arguments)
        return out

    return queue


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def _line(row, cell) -> str:
    shape = f"{row['m']}x{row['k']}x{row['n']}"
    cells = [cell(row["forms"], names) for names in COLUMNS.values()]
    return f"{shape:16}" + "".join(f"{text:>10}" for text in cells)


def _cell_us(records, names) -> str:
    times = [records[name]["us"] for name in names if "us" in records.get(name, {})]
    if times:
        return f"{min(times):.1f}"
    known = [key for name in names for key in records.get(name, {})]
    return next((key for key in targets.NOT_TIMED if key in known), "-")


def _cell_ratio(records, names) -> str:
    record = records.get(names[-1], {})
    if "vs_xla" not in record:
        return ""
    return f"{record['vs_xla']:.2f} {100 * record['of_floor']:3.0f}%"


def _print_summary(result: dict[str, Any]) -> None:
    print("times faster than XLA's bfloat16 form, and share of the floor:")
    for row in result["rows"]:
        print(_line(row, _cell_ratio))
    chained = [
        (row, name, record)
        for row in result["rows"]
        for name, record in row["forms"].items()
        if "captured_us" in record
    ]
    if chained:
        print("wall clock a layer in a chain, launched one by one and captured:")
    for row, name, record in chained:
        print(
            f"{row['m']}x{row['k']}x{row['n']:<6} {name:20}"
            f"{record['launched_us']:8.2f}{record['captured_us']:8.2f} us"
        )
    for key in targets.NOT_TIMED:
        found: dict[str, list[str]] = {}
        for row in result["rows"]:
            for name, record in row["forms"].items():
                if key in record:
                    shape = f"{row['m']}x{row['k']}x{row['n']}"
                    found.setdefault(f"{name}: {record[key]}", []).append(shape)
        for reason, shapes in found.items():
            print(f"{key}: {reason} [{', '.join(shapes)}]")
    for verdict in result.get("targets", []):
        shape = f"{verdict['m']}x{verdict['k']}x{verdict['n']}"
        word = {True: "met", False: "MISSED", None: "-"}[verdict["is_met"]]
        figure = verdict.get("why") or f"{verdict['reached']:.2f} {verdict['form']}"
        print(f"{word:7}{verdict['target']}: {shape}: {figure}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
