"""Times Wukong's FM and LCB: XLA's forms of the same algebra, and our kernels.

    python experiments/bench/fm_lcb.py --out fm_lcb.json

For every size and batch: kernel time of each form (`fm_lcb_forms.py`) by JAX's
profiler, median over input sets that together exceed twice the L2; the floor by bytes
(X read once, FM and LCB written once) and by FLOPs, at the copy bandwidth and the GEMM
rate measured first; and the speed over XLA's best form of the same layout. Ours are
checked against float32 first and not timed if they are wrong. The same for the backward
pass (X, and the gradients of FM and LCB read once, that of X written once), and for
training, the forward and the backward pass.

Without a GPU times are wall clock and only XLA's forms run, to try the script:
`--batches 4 --sizes S`.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax
import tyro

from experiments.bench import fm_lcb_forms as forms
from experiments.bench import result as results
from experiments.bench.fm_lcb_forms import Form, Size
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.measure.roofline import Roofline, measure_roofline
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.terminal import one_line

ROTATED_BYTES = 120e6  # twice the L2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every size; printed only if None.
        batches: examples.
        sizes: of `fm_lcb_forms.SIZES`.
        most_configs: tuning configs of the kernel that are tried.
        training: also time the backward pass, alone and with the forward pass.
        budget_s: begin no size after that many seconds.
    """

    out: pathlib.Path | None = None
    batches: tuple[int, ...] = (4096, 16384)
    sizes: tuple[str, ...] = tuple(forms.SIZES)
    most_configs: int = 12
    training: bool = True
    budget_s: float | None = None


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    roofline = measure_roofline()
    device = jax.devices()[0].device_kind
    print(f"{device}: {roofline}")
    result = results.head("fm_lcb", arguments) | {
        "device": device,
        "inputs": "N(0, 1); weights N(0, 1 / n)",
        "roofline": dataclasses.asdict(roofline),
        "rows": [],
    }
    for batch in arguments.batches:
        for name in arguments.sizes:
            seconds = time.perf_counter() - start
            if arguments.budget_s is not None and seconds > arguments.budget_s:
                result["stopped_before"] = f"{name} at {batch}"
                print(f"stopped before {result['stopped_before']}")
                return result
            row = measure(forms.SIZES[name], batch, arguments, roofline)
            result["rows"].append({"size": name, "batch": batch} | row)
            result["seconds"] = time.perf_counter() - start
            _print(result["rows"][-1])
            results.write(arguments.out, result)
    return result


def measure(
    size: Size, batch: int, arguments: Arguments, roofline: Roofline
) -> dict[str, Any]:
    """Returns the floors, and a record of every form by name.

    A record has `us` and `vs_xla`, or a reason: `wrong` or `failed`.
    """
    floor = {
        "bytes_us": size.num_bytes(batch) / roofline.bytes_per_us,
        "flops_us": size.flops(batch) / roofline.bf16_flops_per_us,
        "backward_bytes_us": size.num_bytes(batch, "backward") / roofline.bytes_per_us,
    }
    forward = forms.forward_forms(size, batch, arguments.most_configs)
    records = _time(size, batch, forward)
    if arguments.training:
        gradients = forms.gradient_forms(size, batch, forward)
        for passes in ("backward", "training"):
            chosen = [form for form in gradients if form.passes == passes]
            records |= _time(size, batch, chosen)
    return {"floor": floor, "forms": records}


def _compare(timed: list[Form], records: dict[str, dict[str, Any]]) -> None:
    """Adds `vs_xla`, the speed over the best of XLA's other forms of this layout."""
    for name, record in records.items():
        rivals = [
            records[form.name]["us"]
            for form in timed
            if not (form.is_ours or form.transposed or form.name == name)
            and "us" in records[form.name]
        ]
        if "us" in record and rivals:
            record["vs_xla"] = min(rivals) / record["us"]


def _time(size: Size, batch: int, timed: list[Form]) -> dict[str, dict[str, Any]]:
    """Returns a record of every form: its time, or why it has none."""
    num_sets = round(ROTATED_BYTES / size.num_bytes(batch) + 0.5)
    key = jax.random.key(batch, impl="rbg")  # the generator that is quick on a GPU
    make = jax.jit(lambda key: forms.make_operands(size, batch, key))
    sets = [make(key) for key in jax.random.split(key, max(2, num_sets))]
    arguments = {form.name: [_arguments(form, one) for one in sets] for form in timed}
    programs = {form.name: (form.run, arguments[form.name][0]) for form in timed}
    records = {form.name: dict(form.facts) for form in timed}
    cases = {}
    for form, function in zip(timed, compile_all(programs).values(), strict=True):
        record, operands = records[form.name], arguments[form.name]
        if isinstance(function, Exception):
            record["failed"] = one_line(function)
            continue
        if form.is_ours:
            out = function(*leaves(operands[0]))
            record["sqnr_db"] = float(forms.sqnr_db(size.k, form.passes, sets[0], out))
            if not record["sqnr_db"] >= forms.LEAST_DB:
                record["wrong"] = f"{record['sqnr_db']:.1f} dB"
                continue
        cases[form.name] = Case(function, [leaves(one) for one in operands])
    for name, timing in time_kernels(cases).items():
        records[name] |= {
            "us": timing.median_us,
            "min_us": timing.min_us,
            "max_us": timing.max_us,
            "kernels": timing.kernels,
        }
    _compare(timed, records)
    return records


def _arguments(form: Form, operands: tuple) -> tuple:
    """Returns what a form takes: x and the weight, cotangents if it trains."""
    x, weight, dfm, dlcb = operands
    if form.transposed:
        x, dlcb = x.swapaxes(1, 2), dlcb.swapaxes(1, 2)
    return (x, weight) if form.passes == "forward" else (x, weight, (dfm, dlcb))


def _print(row: dict[str, Any]) -> None:
    floor = ", ".join(f"{name} {us:.1f}" for name, us in row["floor"].items())
    print(f"{row['size']} at {row['batch']}: floor {floor}")
    for name, record in row["forms"].items():
        if "us" not in record:
            print(f"  {name:32} {record.get('failed') or record.get('wrong')}")
            continue
        ratio = f"{record['vs_xla']:6.2f}x" if "vs_xla" in record else ""
        print(f"  {name:32} {record['us']:9.1f} us {ratio}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
