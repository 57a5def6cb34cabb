"""Times of compiled functions on the device: wall clock of a queue, and its kernels."""

import collections
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Microseconds a call, over several rounds.

    Attributes:
        median_us: of the rounds.
        min_us: the best round.
        max_us: the worst round.
    """

    median_us: float
    min_us: float
    max_us: float


class Kernels(NamedTuple):
    """What the device ran for one call.

    Attributes:
        count: kernels and copies.
        busy_us: their durations added up.
        longest: (name, microseconds, count) of those that took longest together.
    """

    count: float
    busy_us: float
    longest: list[tuple[str, float, float]]


def time_chains(
    chains: dict[str, Callable[[int], Any]], *, calls: int, rounds: int = 7
) -> dict[str, Timing]:
    """Returns the time a call of each chain, rounds of all chains interleaved.

    Args:
        chains: functions that queue that many calls and return what to wait for.
        calls: calls queued in a round, enough to hide the dispatch of the first.
        rounds: rounds measured, after one to warm up.
    """
    found = collections.defaultdict(list)
    for i in range(rounds + 1):
        for name, chain in chains.items():
            start = time.perf_counter()
            jax.block_until_ready(chain(calls))
            if i:
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return {
        name: Timing(statistics.median(times), min(times), max(times))
        for name, times in found.items()
    }


def profile_kernels(chain: Callable[[int], Any], *, calls: int = 10) -> Kernels | None:
    """Returns the kernels of a call by JAX's profiler, or None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    jax.block_until_ready(chain(calls))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(chain(calls))
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    durations = collections.defaultdict(list)
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                durations[event.name].append(event.duration_ns / 1e3)
    count = sum(map(len, durations.values())) / calls
    busy = sum(map(sum, durations.values())) / calls
    longest = sorted(durations.items(), key=lambda item: -sum(item[1]))[:15]
    return Kernels(
        count,
        busy,
        [(name[:120], sum(t) / calls, len(t) / calls) for name, t in longest],
    )
