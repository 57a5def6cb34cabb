"""Times HSTU's attention over jagged rows: our kernels, XLA, and cuDNN's softmax.

    python experiments/bench/jagged_attention.py --out jagged_attention.json

For every case: kernel time by JAX's profiler, and the wall clock of queued calls, of
the forward pass (inference) and of forward and backward (training); TFLOP/s by the
pairs of rows that see each other (half of the square), backward 2.5 times forward.
XLA runs it on jagged rows, as the library does without kernels, and as dense products
of padded rows; cuDNN's causal softmax attention of padded rows is credited with the
same work. Ours are checked against XLA in float32. `--tune` times our passes one by one
with all configs worth trying.

In FP8 the forward pass is timed as a whole, casts included, and as a kernel alone, on
operands that are in FP8: these are checked against float32 of the same operands, which
leaves the rounding of silu of the scores.

A case runs in a process of its own, for `case_s` at most: a kernel that fails or hangs
takes the rest of its case along, not that of others. Forms are timed one after another,
anchors first, and written at once. The default cases are HSTU M's.

    ... --softmax --cases t256 m h64_log_normal

times causal softmax attention in its place: our kernels, XLA on jagged rows, and cuDNN.

Without a Hopper GPU only XLA runs, to try the script: `--cases tiny`.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro

from experiments.bench import padded_attention, softmax_forms
from experiments.bench import result as results
from experiments.bench.attention_cases import (
    CASES,
    Case,
    Form,
    exactly,
    operands_of,
    padded_operands,
    timed,
)
from loka_jax import fp8, jagged
from loka_jax.heads import Heads
from loka_jax.jagged import BY_KEY, BY_QUERY, FORWARD, Pass, Rule
from loka_jax.measure.compiling import compile_all
from loka_jax.ops import jagged_attention as ops
from loka_jax.ops.device import local_device
from loka_jax.xla import jagged_attention as xla

# In FP8, of silu of the scores alone, and of q, k and v as well.
_LEAST_FP8_DB, _LEAST_CAST_DB = 28.0, 21.0
_DEFAULT_CASES = "m", "m_log_normal"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        cases: names of cases, in order.
        softmax: times softmax attention.
        tune: also time every config of our passes.
        anchors: also time XLA and cuDNN.
        case_s: most seconds of a case.
        here: run the cases in this process.
    """

    cases: tuple[str, ...] = _DEFAULT_CASES
    softmax: bool = False
    tune: bool = False
    anchors: bool = True
    case_s: float = 80.0
    here: bool = False


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    # Cases need the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about = {"inputs": "N(0, 1), scale d**-0.5", "rows": []}
    result = results.head("jagged_attention", arguments) | about
    for name in results.in_time(arguments.cases, result, arguments):
        row = {"case": name, **dataclasses.asdict(CASES[name]), "forms": {}}
        result["rows"].append(row)
        print(name, flush=True)
        if not arguments.here:
            row |= _by_process(name, arguments)
            continue
        for form, record in measure(CASES[name], arguments):
            row["forms"][form] = record
            print(f"  {form:44} {_in_short(record)}", flush=True)
            row["speedups"] = speedups(row["forms"])
            results.write(arguments.out, result)
        for form, ratio in row.get("speedups", {}).items():
            print(f"  ours over {form:34} {ratio:9.2f}")


def _by_process(name: str, arguments: Arguments) -> dict[str, Any]:
    """Returns the row of a case that another process measures, as far as it came."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "case.json")
        command = [sys.executable, __file__, "--here", "--out", str(out)]
        command += ["--cases", name]
        command += ["--softmax"] * arguments.softmax
        command += ["--tune" if arguments.tune else "--no-tune"]
        command += ["--anchors" if arguments.anchors else "--no-anchors"]
        failed = None
        try:
            status = subprocess.run(command, timeout=arguments.case_s).returncode
            if status:
                failed = f"exit status {status}"
        except subprocess.TimeoutExpired:
            failed = f"more than {arguments.case_s} s"
        row = json.loads(out.read_text())["rows"][0] if out.exists() else {}
    if failed is not None:
        print(f"  stopped: {failed}")
        row["stopped"] = failed
    return row


def _in_short(record: dict[str, Any]) -> str:
    if "us" not in record:
        return str(record)
    db = f" {record['sqnr_db']:5.1f} dB" if "sqnr_db" in record else ""
    wall = f" {record['wall_us']:9.1f} us wall" if "wall_us" in record else ""
    return f"{record['us']:9.1f} us {record['tflops']:6.1f} TFLOP/s{db}{wall}"


def measure(case: Case, arguments: Arguments) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the record of every form of a case, anchors first."""
    offsets = jnp.asarray(case.offsets())
    operands = operands_of(case, int(offsets[-1]))
    is_served, tune = local_device().why_not_pallas is None, arguments.tune
    if arguments.softmax:
        how = dict(is_served=is_served, tune=tune)
        forms = softmax_forms.forms(case, offsets, operands, **how)
    else:
        forms = _anchors(case, offsets, operands, is_served)
        forms |= _ours(case, offsets, operands, tune) if is_served else {}
    is_left_out = lambda x: not (arguments.anchors or x.startswith("pallas"))  # noqa: E731
    forms = {name: x for name, x in forms.items() if not is_left_out(name)}
    runs = {name: (form.run, form.operands) for name, form in forms.items()}
    for name, program in compile_all(runs).items():
        yield name, timed(case, forms[name], program)


def _ours(case: Case, offsets, operands, tune: bool) -> dict[str, Form]:
    """Returns our kernels, whole and pass by pass."""
    exact = exactly(functools.partial(_passes, case, offsets, xla.attend))
    references, forms = exact(*operands), {}
    by_kernels = ops.AttentionPlan(None)
    for work, run in _whole(case, offsets, by_kernels).items():
        wanted = references[:1] if work == "forward" else references
        forms[f"pallas {work}"] = Form(run, operands, work, tuple(wanted))
    in_fp8 = _whole(case, offsets, by_kernels._replace(why_not_fp8=None))["forward"]
    form = Form(in_fp8, operands, "forward", (references[0],))
    forms["pallas fp8 forward"] = form._replace(least_db=_LEAST_CAST_DB)
    forms |= _fp8_pass(case, offsets, operands, tune)
    return forms | _each_pass(case, offsets, operands, references, tune)


def _anchors(case: Case, offsets, operands, has_cudnn: bool) -> dict[str, Form]:
    """Returns XLA's forms, of jagged and of padded rows, and cuDNN's."""
    padded = padded_operands(case)
    dense = padded_attention.dense(case.size, case.max_length)
    anchors = {"xla dense": (dense, padded)}
    if has_cudnn:
        lengths = None if case.lengths == "full" else np.diff(case.offsets())
        anchors["cudnn softmax"] = padded_attention.softmax(lengths), padded
    anchors["xla jagged"] = _whole(case, offsets, ops.BY_XLA), operands
    return {
        f"{name} {work}": Form(run, own, work)
        for name, (runs, own) in anchors.items()
        for work, run in runs.items()
    }


def speedups(forms: dict[str, Any]) -> dict[str, float]:
    """Returns how many times as fast as each anchor our kernels are, by form.

    Of our kernel in bfloat16, how many times as fast that in FP8 is.
    """
    by_anchor = {
        name: record["us"] / forms[ours]["us"]
        for name, record in forms.items()
        if not name.startswith("pallas")
        and "us" in record
        and "us" in forms.get(ours := f"pallas {name.split()[-1]}", {})
    }
    ours, other = (forms.get(f"pallas {x}", {}) for x in ("forward", "fp8 forward"))
    if "us" in ours and "us" in other:
        by_anchor["pallas forward by fp8"] = ours["us"] / other["us"]
    return by_anchor


def _each_pass(
    case: Case, offsets, operands, references, tune: bool
) -> dict[str, Form]:
    """Returns our passes, with the default config or with each."""
    from loka_jax.pallas import jagged_attention as kernel

    out, dq, dk, dv = references
    kinds: dict[str, Any] = {"forward": (FORWARD, (out,)), "dq": (BY_QUERY, (dq,))}
    if case.size > 128:  # dk and dv are of two launches
        kinds["dk"] = BY_KEY._replace(has_values=False), (dk,)
        kinds["dv"] = BY_KEY._replace(has_slopes=False), (dv,)
    else:
        kinds["dk, dv"] = BY_KEY, (dk, dv)
    forms = {}
    for name, (kind, wanted) in kinds.items():
        configs = kernel.search_space(kind, case.size)
        for config in configs if tune else configs[:1]:
            attend = functools.partial(kernel.attend, config=config)
            run = functools.partial(_pass, case, offsets, attend, kind)
            values = ",".join(map(str, dataclasses.astuple(config)))
            form = Form(run, operands, name, wanted, wall=False)
            forms[f"pallas {name} {values}"] = form
    return forms


def _fp8_pass(case: Case, offsets, operands, tune: bool) -> dict[str, Form]:
    """Returns our forward pass of operands in FP8."""
    from loka_jax.pallas import jagged_attention as kernel

    own = tuple(fp8.saturate(x, fp8.E4M3) for x in operands[:3])
    exact = exactly(functools.partial(_pass, case, offsets, xla.attend, FORWARD))
    wanted = exact(*own, operands[3])

    def run(config, q, k, v):
        attend = functools.partial(kernel.attend, config=config)
        return _pass(case, offsets, attend, FORWARD, q, k, v, None)

    form = Form(run, own, "forward", tuple(wanted), least_db=_LEAST_FP8_DB)
    configs = kernel.search_space(FORWARD, case.size, fp8.E4M3)
    return {
        f"pallas fp8 kernel {','.join(map(str, dataclasses.astuple(config)))}": (
            form._replace(run=functools.partial(run, config))
        )
        for config in (configs if tune else configs[:1])
    }


def _whole(case: Case, offsets, plan) -> dict[str, Callable]:
    """Returns the attention forward, and with its gradients."""
    how = dict(scale=case.size**-0.5, max_length=case.max_length, plan=plan)
    run = functools.partial(ops.jagged_attention, offsets=offsets, **how)
    return padded_attention.both(run)


def _pass(case: Case, offsets, attend: Callable, kind: Pass, q, k, v, gradient):
    """Returns the results of one pass."""
    visible = jagged.visibility(offsets, len(q), Rule())
    q, k, v = map(Heads.of, (q, k, v))
    by_query = (q,) if gradient is None else (q, Heads.of(gradient))
    fixed, streamed = ((k, v), by_query) if kind.by_key else (by_query, (k, v))
    fixed = fixed if kind.has_slopes else fixed[:1]
    how = dict(scale=case.size**-0.5, max_length=case.max_length)
    return list(attend(kind, fixed, streamed, visible, **how))


def _passes(case: Case, offsets, attend: Callable, *operands):
    run = functools.partial(_pass, case, offsets, attend)
    return [x for kind in (FORWARD, BY_QUERY, BY_KEY) for x in run(kind, *operands)]


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
