"""Times LoKA's Mods on a wide model: none, each alone, and all.

    python experiments/bench/mods.py --model wukong_m --out mods.json

As in figure 13 of the LoKA paper: the forward pass at 1,024 rows; and a training step
at 16,384. Every model runs by XLA in bfloat16, and with kernels in FP8; without Mods it
has biases, LayerNorm and swish. The programs, their times and their memory are those of
`wide_models.py`; those of one Mod are compiled at once, so that few are lost where a
run is cut off.

Without a GPU times are wall clock: `--model wukong --rows 64 --training-rows 64`.

References:
    LoKA, arXiv 2605.10886, figure 13.
"""

import dataclasses
import math
import pathlib
import time
from typing import Any

import tyro

from experiments.bench import models, wide_models
from experiments.bench import result as results

NONE, ALL = "plain", "all"
ARMS = ("xla bf16", "ours fp8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every program; printed only if None.
        model: of `models.wide`.
        mods: to time, besides the model without any.
        arms: of `wide_models.py`.
        recipe: of FP8.
        rows: of the forward pass; 0 leaves it out.
        training_rows: of the training step; 0 leaves it out.
        calls: of a program in each of three profiles.
    """

    out: pathlib.Path | None = None
    model: str = "wukong_m"
    mods: tuple[str, ...] = (*models.MODS, ALL)
    arms: tuple[str, ...] = ARMS
    recipe: str = "fp8_tensorwise_delayed"
    rows: int = 1024
    training_rows: int = 16384
    calls: int = 5


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    batches = {"inference": arguments.rows, "training": arguments.training_rows}
    batches = {kind: rows for kind, rows in batches.items() if rows}
    result = results.head("mods", arguments) | {"inputs": "N(0, 1)", "programs": {}}
    for mod in (NONE, *arguments.mods):
        programs = wide_models.make_programs(
            f"{arguments.model} {mod}", batches, arguments.arms, arguments.recipe
        )
        timed = wide_models.compiled_and_timed(programs, arguments.calls)
        for key, record in timed:
            result["programs"][f"{mod} {key}"] = record
            result["seconds"] = time.perf_counter() - start
            results.write(arguments.out, result)
    _print(result["programs"])
    return result


def _print(programs: dict[str, dict[str, Any]]) -> None:
    """Prints the times, as multiples of XLA's without Mods."""
    for key, record in sorted(programs.items(), key=lambda item: item[0].split()[1:]):
        _, _, form = key.partition(" ")
        kind = form.partition(" ")[0]
        base = programs.get(f"{NONE} {kind} xla bf16", {}).get("us", math.nan)
        if "failed" in record:
            print(f"{key:36} failed: {record['failed'][:200]}")
            continue
        gigabytes = record["memory_bytes"] / 1e9
        speed = base / record["us"]
        print(f"{key:36} {record['us']:9.0f} us {speed:5.2f}x {gigabytes:6.2f} GB")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
