"""Times the tuning of a model of twenty sites that no table knows.

    python experiments/bench/tuning_time.py --out tuning_time.json

A tower of twenty layers, each of another width, at a number of rows that is no power of
two. The user's cache is left alone: measurements go to an empty folder. Prints the
seconds, with processes started, kernels compiled, checked and timed, and how many of
the sites were tuned in the budget.
"""

import dataclasses
import os
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.models import Tower
from loka_jax import nn
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.at_start import tune_at_start
from loka_jax.dispatch.local import cache_path
from loka_jax.site import BF16

_WIDTHS = tuple(336 + 48 * i for i in range(20))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        sites: of the twenty.
        rows: of a batch.
        seconds: the budget.
    """

    out: pathlib.Path | None = None
    sites: int = 20
    rows: int = 12_048
    seconds: float = 90.0


def main(arguments: Arguments):
    """Tunes, prints and writes the result."""
    tower = Tower(_WIDTHS[: arguments.sites], recipe="fp8_rowwise")
    x = jax.ShapeDtypeStruct((arguments.rows, 640), jnp.float32)
    sites = nn.list_sites(tower, x)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        lines: list[str] = []
        start = time.monotonic()
        tune_at_start(sites, arguments.seconds, name="tower", say=lines.append)
        seconds = time.monotonic() - start
        entries = tables.read(cache_path()).sites if cache_path().exists() else {}
    times = [entry.times.get("training", {}) for entry in entries.values()]
    failures = {
        f"{spec} {name}": why
        for spec, entry in entries.items()
        for name, why in entry.failures.items()
    }
    print(*lines, *failures.items(), f"{seconds:.1f} seconds in all.", sep="\n")
    results.write(
        arguments.out,
        results.head("tuning_time", arguments)
        | {
            "seconds": round(seconds, 1),
            "sites": sum(BF16.name in known and len(known) > 1 for known in times),
            "candidates": sum(map(len, times)),
            "failures": failures,
            "lines": lines,
        },
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
