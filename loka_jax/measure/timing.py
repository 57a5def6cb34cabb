"""Times of compiled functions on the device: wall clock of a queue, and its kernels."""

import collections
import gc
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Microseconds per call: of the median, best and worst of some calls or rounds.

    Attributes:
        kernels: kernels and copies of a call on the device, whose time this is; None
            if it is wall clock.
    """

    median_us: float
    min_us: float
    max_us: float
    kernels: float | None = None

    @classmethod
    def of(cls, times: Sequence[float], kernels: float | None = None) -> "Timing":
        """Returns the times of calls or rounds in short."""
        return cls(statistics.median(times), min(times), max(times), kernels)


class Kernels(NamedTuple):
    """The kernels and copies of a call: their number, and the sum of their durations.

    The longest, by their total time, are (name, microseconds, count).
    """

    count: float
    busy_us: float
    longest: list[tuple[str, float, float]]


class Event(NamedTuple):
    """A kernel or copy on the device's clock."""

    start_ns: float
    duration_ns: float


class Case(NamedTuple):
    """A compiled function and the arguments to call it with, one tuple after another.

    Several sets of arguments, together larger than the L2, keep a call from finding
    its operands there.
    """

    function: Callable[..., Any]
    arguments: list[tuple]


def time_chains(
    chains: dict[str, Callable[[int], Any]], *, calls: int, rounds: int = 7
) -> dict[str, Timing]:
    """Returns the time per call of each chain, rounds of all chains interleaved.

    Args:
        chains: functions that queue a number of calls and return outputs to wait for.
        calls: in a round, enough to hide the dispatch of the first.
        rounds: measured, after one to warm up.
    """
    times_by_name = collections.defaultdict(list)
    for i in range(rounds + 1):
        for name, chain in chains.items():
            start = time.perf_counter()
            jax.block_until_ready(chain(calls))
            if i:
                us = (time.perf_counter() - start) / calls * 1e6
                times_by_name[name].append(us)
    return {name: Timing.of(times) for name, times in times_by_name.items()}


def profile_kernels(chain: Callable[[int], Any], *, calls: int = 10) -> Kernels | None:
    """Returns the kernels of a call by JAX's profiler, or None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    durations = collections.defaultdict(list)
    for event in _profiled(chain, calls):
        durations[event.name].append(event.duration_ns / 1e3)
    count = sum(map(len, durations.values())) / calls
    busy = sum(map(sum, durations.values())) / calls
    longest = sorted(durations.items(), key=lambda item: -sum(item[1]))[:15]
    totals = [(name[:120], sum(t) / calls, len(t) / calls) for name, t in longest]
    return Kernels(count, busy, totals)


def profile_ops(chain: Callable[[int], Any], *, calls: int = 10) -> dict[str, float]:
    """Returns the microseconds per call of each instruction's kernels.

    By the names of the compiled program, which must have no command buffers; empty
    without a GPU.
    """
    if jax.default_backend() != "gpu":
        return {}
    us_by_op: dict[str, float] = collections.defaultdict(float)
    for event in _profiled(chain, calls):
        op = str(dict(event.stats).get("hlo_op", event.name))
        us_by_op[op] += event.duration_ns / 1e3 / calls
    return dict(us_by_op)


def _profiled(chain: Callable[[int], Any], calls: int) -> list:
    """Returns the device's events during some calls, after as many to warm up."""
    jax.block_until_ready(chain(calls))
    return _device_events(lambda: jax.block_until_ready(chain(calls)))


# A pause before each case separates the cases in a profile: the name of a kernel does
# not tell its function, and a profile of each case would take half a second.
_PAUSE_S = 0.03
_LEAST_GAP_NS = 15e6


def time_kernels[Name](
    cases: Mapping[Name, Case], *, min_calls: int = 24
) -> dict[Name, Timing]:
    """Returns the kernel time per call of each case, by one profile of them all.

    Without a GPU it is wall clock, good only to try a benchmark.

    Args:
        cases: functions compiled without command buffers, whose kernels the profiler
            does not see one by one.
        min_calls: calls of a case at least; each set of arguments is used equally
            often.

    Raises:
        RuntimeError: if the profile does not split into one part per case, three times
            in a row.
    """
    for function, arguments in cases.values():
        jax.block_until_ready(function(*arguments[0]))
    if jax.default_backend() != "gpu":
        return {name: _wall_clock(case) for name, case in cases.items()}
    parts = []
    for _ in range(3):
        parts = split_at_gaps(_profile(cases, min_calls), _LEAST_GAP_NS)
        if len(parts) == len(cases):
            return {
                name: kernel_time(part, _rounds(case, min_calls) * len(case.arguments))
                for (name, case), part in zip(cases.items(), parts, strict=True)
            }
    raise RuntimeError(f"a profile of {len(cases)} cases fell into {len(parts)} parts.")


def split_at_gaps(events: Sequence[Event], least_gap_ns: float) -> list[list[Event]]:
    """Returns the events in order of time, cut where the device idled that long."""
    parts: list[list[Event]] = []
    end_ns = 0.0
    for event in sorted(events):
        if not parts or event.start_ns - end_ns > least_gap_ns:
            parts.append([])
        parts[-1].append(event)
        end_ns = max(end_ns, event.start_ns + event.duration_ns)
    return parts


def kernel_time(events: Sequence[Event], calls: int) -> Timing:
    """Returns the time per call; only its mean if calls differ in their kernels."""
    durations = [event.duration_ns / 1e3 for event in events]
    count = len(durations) / calls
    if len(durations) % calls:
        return Timing.of([sum(durations) / calls], count)
    size = len(durations) // calls
    times = [sum(durations[i : i + size]) for i in range(0, len(durations), size)]
    return Timing.of(times, count)


def _rounds(case: Case, min_calls: int) -> int:
    return -(-min_calls // len(case.arguments))


def _profile(cases: Mapping[Any, Case], min_calls: int) -> list[Event]:
    """Returns the device's events while each case is called at least so often."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    options.enable_hlo_proto = False

    def call_all():
        for case in cases.values():
            time.sleep(_PAUSE_S)
            for _ in range(_rounds(case, min_calls)):
                # Results are held for a round, so that they rotate too.
                held = [case.function(*a) for a in case.arguments]
                jax.block_until_ready(held)

    is_enabled = gc.isenabled()
    gc.disable()  # a collection would look like the pause between two cases
    try:
        events = _device_events(call_all, options)
    finally:
        if is_enabled:
            gc.enable()
    return [Event(e.start_ns, e.duration_ns) for e in events]


def _device_events(run: Callable[[], Any], options: Any = None) -> list:
    """Returns the events of the GPU's streams while `run` runs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    return [
        event
        for plane in data.planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]


def _wall_clock(case: Case) -> Timing:
    times = []
    for arguments in (case.arguments * 3)[:3]:
        start = time.perf_counter()
        jax.block_until_ready(case.function(*arguments))
        times.append((time.perf_counter() - start) * 1e6)
    return Timing.of(times)
