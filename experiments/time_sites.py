"""Takes the times of all candidates at the sites of a table, or at random sites.

    python experiments/time_sites.py [--table TABLE] --out NEW.json [--part 1 --parts 1]
    python experiments/time_sites.py --draw 100 --seed 0 --out NEW.json

Measures every candidate at every site, on this device and with these sources. Errors
and effects on the loss of a table are kept: they are those of the recipes. So are times
of passes that are not measured. A part takes every n-th site; NEW gets the sites of all
parts that were written to it; candidates with times there are not measured again.

Random sites show what the performance model is worth at shapes that nobody chose.

Exit codes: 0 measured; 2 not a table, or a table that cannot be added to.
"""

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import itertools
import math
import pathlib
import random
import sys
from collections.abc import Iterator, Mapping

from experiments.cli import run_cli
from experiments.options import parse_alone
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import candidates
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import shipped_path
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import fitting, measure_all
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.tuning import TuneConfig
from loka_jax.site import SiteSpec

_MOST_ELEMENTS = 1 << 27  # of an operand, so that all sets of operands fit
_NORMS = ("none", "none", "layer", "layer", "rms", "block")
_ACTIVATIONS = ("relu", "relu", "swish", "none", "gelu", "hard_swish")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        out: the file of the new table.
        table: the table whose sites are measured.
        draw: number of random sites to measure instead.
        seed: of the random sites.
        part: which part of the sites, from 1.
        parts: the number of parts.
        workers: processes that compile at a time.
        passes: to time.
        recipes: names of those to time; empty for all.
        judge: compare results with the reference; off only where the same kernels
            passed on such a device before.
    """

    out: pathlib.Path
    table: pathlib.Path = shipped_path("NVIDIA H200")
    draw: int = 0
    seed: int = 0
    part: int = 1
    parts: int = 1
    workers: int = TuneConfig().workers
    passes: tuple[str, ...] = ("training", "inference")
    recipes: tuple[str, ...] = ()
    judge: bool = True


def time_sites(options: Options) -> int:
    """Measures and writes the new table after every site; returns the exit code."""
    if not 1 <= options.part <= options.parts:
        raise ValueError(
            f"--part {options.part} of --parts {options.parts} does not exist: count "
            "parts from 1."
        )
    if options.draw:
        entries = {spec: Entry() for spec in random_sites(options.draw, options.seed)}
    else:
        # Large sites lie side by side, so a slice is a fair part.
        entries = dict(sorted(tables.read(options.table).sites.items()))
    done = tables.read(options.out).sites if options.out.exists() else {}
    part = list(entries)[options.part - 1 :: options.parts]
    jobs = list(_jobs(part, done, options))
    for job, entry in measure_all(jobs, fitting(options.workers, jobs), print):
        entry = _with_old(entry, entries[job.spec], options.passes)
        tables.add(options.out, Table(header_here(), {job.spec: entry}))
    return 0


def _jobs(
    sites: list[SiteSpec], done: Mapping[SiteSpec, Entry], options: Options
) -> Iterator[Job]:
    """Yields the candidates that are left at each site."""
    for site in sites:
        times = done.get(site, Entry()).times
        names = set(itertools.chain(*times.values()))
        for choice in candidates(site):
            is_asked = not options.recipes or choice.recipe.name in options.recipes
            if is_asked and choice.name not in names:
                yield Job(
                    site,
                    choice,
                    passes=options.passes,
                    in_chain=True,
                    is_judged=options.judge,
                )


def _with_old(entry: Entry, old: Entry, measured: tuple[str, ...]) -> Entry:
    """Returns an entry with what was not measured: errors, times of other passes."""
    kept = {
        name: times
        for name, times in old.times.items()
        if not name.startswith(measured)
    }
    return dataclasses.replace(
        entry, times=kept | entry.times, errors=old.errors, effects=old.effects
    )


def random_sites(count: int, seed: int) -> list[SiteSpec]:
    """Returns sites of sizes that are even in their logarithm.

    Rows are 256 to 131,072, features 16 to 4,096, and an operand has at most 2^27
    elements. Half of the sizes are powers of two or multiples of 64, few are odd.
    """
    rng = random.Random(seed)
    sites: list[SiteSpec] = []
    while len(sites) < count:
        m = _rounded(rng, 256, 1 << 17, (1 << 20, 64, 16, 8))
        k, n = (_rounded(rng, 16, 4096, (128, 64, 16, 1)) for _ in range(2))
        if m * max(k, n) > _MOST_ELEMENTS:
            continue
        norm = rng.choice(_NORMS)
        use_bias = rng.random() < (0.7 if norm == "none" else 0.3)
        sites.append(SiteSpec(m, k, n, norm, rng.choice(_ACTIVATIONS), use_bias))
    return sites


def _rounded(
    rng: random.Random, low: int, high: int, multiples: tuple[int, ...]
) -> int:
    """Returns a size, even in its logarithm, as a multiple of one of these.

    A multiple that is larger than `high` stands for powers of two.
    """
    size = math.exp(rng.uniform(math.log(low), math.log(high)))
    multiple = rng.choices(multiples, (40, 35, 15, 10))[0]
    if multiple > high:
        return 1 << round(math.log2(size))
    return max(multiple, round(size / multiple) * multiple)


def main(arguments: list[str]) -> int:
    """Runs the command and returns the exit code."""
    return run_cli(
        lambda: time_sites(parse_alone(Options, arguments, "time_sites.py", __doc__))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
