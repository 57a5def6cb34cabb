"""Times training on 1, 2, 4, 8 GPUs of a host, against one GPU and against the planner.

    python experiments/bench/scaling.py --config fp8_dlrm --loop.batch-size 65536 \
        --scaling.gpus 1 2 4 --scaling.out scaling.json

Every GPU gets the batch of the configuration (weak scaling), or its part of that batch
(strong). In the mode `one` a process drives all GPUs, in `each` every GPU has a process
of its own, through `loka_jax.launch`. This process starts the jobs (`scaling_job`, with
what they measure) and uses no GPU itself.

    of_linear    t(1 GPU) / t, over the number of GPUs if scaling is strong
    predicted    the planner's model (docs/distributed.md). The time of its dense part
                 is set so that it has the measured time on one GPU, and scales with the
                 examples as the planner's own estimate does
    error        predicted over measured, less 1

Without a GPU, to try it: `--config fp8_dlrm --loop.batch-size 64
--scaling.on-cpu --scaling.steps 7`, and XLA_FLAGS=--xla_backend_optimization_level=0.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax

from experiments.bench import result as results
from experiments.bench.origin import origin
from experiments.bench.scaling_job import Point
from experiments.cli import parse_with, run_cli
from experiments.plan import schema_of
from loka_jax import jsonfile
from loka_jax.train.config import Config
from loka_jax.train.planner.mesh_plan import Estimate, Mesh, Rates, estimate
from loka_jax.train.planner.workload import workload_of

JOB = pathlib.Path(__file__).with_name("scaling_job.py")
Kind = Literal["weak", "strong"]
Mode = Literal["one", "each"]  # process for all GPUs; GPU has a process


@dataclasses.dataclass(frozen=True)
class Options:
    """What is timed.

    Attributes:
        gpus: numbers of GPUs; 1 is what the others are compared with.
        kinds: weak, strong.
        modes: one process for all GPUs, each GPU its process.
        steps: timed steps, of which the median of seven rounds is taken.
        parts: also profile steps by part, in the mode `one`.
        budget_s: begin no point after that many seconds, and end all jobs a minute
            later.
        on_cpu: on as many CPU devices.
        rates: of the planner.
        out: where to write the JSON, after every job; "" for nowhere.
    """

    gpus: tuple[int, ...] = (1, 2)
    kinds: tuple[Kind, ...] = ("weak",)
    modes: tuple[Mode, ...] = ("one", "each")
    steps: int = 1400
    parts: bool = True
    budget_s: float = 600.0
    on_cpu: bool = False
    rates: Rates = Rates()
    out: str = ""


_GRACE_S = 60.0


def measure(config: Config, options: Options) -> int:
    """Runs all jobs, prints and writes the result, and returns the exit code."""
    jax.config.update("jax_platforms", "cpu")  # the GPUs are for the jobs
    begun = time.perf_counter()
    out = pathlib.Path(options.out) if options.out else None
    result: dict[str, Any] = {
        "benchmark": "scaling",
        "command": results.command(),
        **origin(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),  # the jobs have them too
        "config": config.identity(),
        "time": "wall clock of queued steps, median of seven rounds",
        "jobs": [],
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for mode, gpus in _jobs(options):
            used = time.perf_counter() - begun
            result["jobs"].append(
                {"mode": mode}
                | _run(config, options, (mode, gpus), pathlib.Path(folder), used)
            )
            result["rows"] = compared(config, options, result["jobs"])
            result["seconds"] = time.perf_counter() - begun
            results.write(out, result)
    print(_table(result["rows"]))
    for note in _plan_notes(result["jobs"]):
        print(note)
    failed = list(_failures(result["jobs"]))
    for reason in failed:
        print(reason)
    return 1 if failed else 0


def _failures(jobs: list[dict[str, Any]]) -> Iterator[str]:
    """Yields why jobs and points failed."""
    for job in jobs:
        if "failed" in job:
            yield job["failed"]
        for record in job.get("points", ()):
            if "failed" in record:
                yield f"{job['mode']}, {record['gpus']} GPUs: {record['failed']}"


def _plan_notes(jobs: list[dict[str, Any]]) -> Iterable[str]:
    """Returns the notes on the plans of all points, each once."""
    points = [record for job in jobs for record in job.get("points", ())]
    return dict.fromkeys(n for record in points for n in record.get("plan_notes", ()))


def points_of(options: Options, batch: int, gpus: int) -> dict[Kind, Point]:
    """Returns the point of each kind on so many GPUs.

    Raises:
        ValueError: if the batch cannot be split.
    """
    if batch % gpus:
        raise ValueError(f"--loop.batch-size {batch} must be a multiple of {gpus}.")
    points: dict[Kind, Point] = {
        "weak": Point(gpus, batch),
        "strong": Point(gpus, batch // gpus),
    }
    return {kind: points[kind] for kind in options.kinds}


def _jobs(options: Options) -> Iterator[tuple[Mode, tuple[int, ...]]]:
    """Yields mode and numbers of GPUs of each job: a launch has one number."""
    if in_one := tuple(n for n in options.gpus if "one" in _modes(options, n)):
        yield "one", in_one
    for gpus in options.gpus:
        if "each" in _modes(options, gpus):
            yield "each", (gpus,)


def _modes(options: Options, gpus: int) -> tuple[Mode, ...]:
    """Returns the modes that are timed on so many GPUs: for one GPU they are alike."""
    return options.modes if gpus > 1 else ("one",)


def _run(
    config: Config,
    options: Options,
    job: tuple[Mode, tuple[int, ...]],
    folder: pathlib.Path,
    used: float,
) -> dict[str, Any]:
    """Returns what a job has written, and `failed` with the reason if it failed."""
    mode, gpus = job
    left = options.budget_s - used
    name = f"{mode}-{max(gpus)}"
    if left <= 0:
        return {"failed": f"{name}: not begun, {used:.0f} s are over the budget"}
    points = {
        str(point): None
        for count in gpus
        for point in points_of(options, config.loop.batch_size, count).values()
    }
    out = folder / f"{name}.json"
    jsonfile.write(folder / "config.json", config.identity())
    command = [
        *_processes(options, mode, gpus, folder / name),
        *(str(JOB), "--config", str(folder / "config.json")),
        *("--job.points", *points, "--job.steps", str(options.steps)),
        *("--job.parts" if options.parts else "--job.no-parts",),
        *("--job.plans", str(folder), "--job.out", str(out)),
        *("--job.budget-s", str(left)),
    ]
    print(f"{name}: {' '.join(points)}", flush=True)
    begun = time.perf_counter()
    try:
        environment = os.environ | _on_cpu(options, max(gpus))
        code = subprocess.run(command, env=environment, timeout=left + _GRACE_S)
        reason = f"exit code {code.returncode}" if code.returncode else ""
    except subprocess.TimeoutExpired:  # the launcher's processes end with it
        reason = "ended, as it was over the budget"
    written = jsonfile.as_dict(jsonfile.read(out)) if out.exists() else {}
    written |= {"wall_s": time.perf_counter() - begun}
    return written | ({"failed": f"{name}: {reason}"} if reason else {})


def _processes(
    options: Options, mode: Mode, gpus: tuple[int, ...], logs: pathlib.Path
) -> list[str]:
    """Returns what starts a script in the processes of a mode."""
    if mode == "one":
        return [sys.executable]
    launch = [sys.executable, "-m", "loka_jax.launch", "--processes", str(max(gpus))]
    launch += ["--logs", str(logs)]
    return [*launch, "--cpu-devices", "1"] if options.on_cpu else launch


def _on_cpu(options: Options, devices: int) -> dict[str, str]:
    """Returns variables for so many CPU devices, if asked for."""
    if not options.on_cpu:
        return {}
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def compared(
    config: Config, options: Options, jobs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row for each kind, number of GPUs and mode that was timed."""
    records = {
        (job["mode"], Point(record["gpus"], record["batch"])): record
        for job in jobs
        for record in job.get("points", ())
        if "step" in record
    }
    alone = records.get(("one", Point(1, config.loop.batch_size)))
    alone_us = None if alone is None else alone["step"]["median_us"]
    rows = []
    for kind in options.kinds:
        for gpus in options.gpus:
            point = points_of(options, config.loop.batch_size, gpus)[kind]
            for mode in _modes(options, gpus):
                record = records.get((mode, point))
                if record is None:
                    continue
                us = record["step"]["median_us"]
                speedup = None if alone_us is None else alone_us / us
                ideal = gpus if kind == "strong" else 1
                predicted = predict(config, point, alone_us, options.rates)
                rows.append(
                    {"kind": kind, "gpus": gpus, "mode": mode, "step_us": us}
                    | {"with_input_us": record["with_input"]["median_us"]}
                    | {"of_linear": speedup and speedup / ideal}
                    | {"predicted_us": predicted.step_us, "predicted": predicted.us}
                    | {"error": predicted.step_us / us - 1}
                )
    return rows


def predict(
    config: Config, point: Point, alone_us: float | None, rates: Rates
) -> Estimate:
    """Returns the planner's estimate of a point.

    Args:
        config: of the run.
        point: GPUs, and examples of each.
        alone_us: the measured step of one GPU with the configuration's batch, by which
            the time of the dense part is scaled; None for the planner's own.
        rates: of the host.
    """
    schema = schema_of(config)
    workload = workload_of(config, schema, point.batch)
    if alone_us is not None:
        one = workload_of(config, schema, config.loop.batch_size)
        others = estimate(one, Mesh(1, 1), rates).step_us - one.dense_us
        scale = max(alone_us - others, 0.0) / one.dense_us
        workload = dataclasses.replace(workload, dense_us=scale * workload.dense_us)
    replicas = config.mesh.replicas or 1
    return estimate(workload, Mesh(replicas, point.gpus // replicas), rates)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["", "kind    GPUs  processes  us a step  with input  of linear  predicted"]
    for row in rows:
        processes = row["gpus"] if row["mode"] == "each" else 1
        share = "" if row["of_linear"] is None else f"{row['of_linear']:.1%}"
        lines.append(
            f"{row['kind']:8}{row['gpus']:4}{processes:11}{row['step_us']:11.0f}"
            f"{row['with_input_us']:12.0f}{share:>11}{row['predicted_us']:11.0f} "
            f"({row['error']:+.0%})"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv

    def command() -> int:
        config, options = parse_with(arguments, "bench/scaling.py", scaling=Options())
        return measure(config, options["scaling"])

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main())
