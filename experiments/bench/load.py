"""Throughput against latency of a served model, at several offered loads.

    python experiments/bench/load.py --model model/ --minutes 10 --out load.json

Starts `loka serve`. Requests come at random times at each rate, whether earlier
ones are answered or not (an open loop), and latency counts from the time at which a
request was due. Some are malformed; at half of each load the server is restarted. A
request is lost if it has no answer, and wrong if its scores are not those that one of
the model's programs gave for its rows before the load: batches of other sizes run other
programs, and in other precisions, too.

At the rate 0 each of `--connections` clients sends a request once its last is answered
(a closed loop). With `--scored` the rows are those of a file of predict.py, which has
the model's columns by `--data.keys`, and a score is wrong if its bits are not its own.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import tyro
from pyarrow import parquet

from experiments.bench import result as results
from loka_jax.export import loader

_SERVE = pathlib.Path(__file__).parents[1] / "serve.py"
_POOL = 256  # different rows
_MALFORMED = (
    b"",
    b'{"rows": [',
    b'{"rows": []}',
    b'{"rows": [{}]}',
    b'{"rows": 1}',
    b"\xff",
)
_PERCENTILES = (50, 90, 99, 99.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        model: a folder that experiments/export.py wrote.
        out: where to write the JSON; printed only if None.
        rates: offered loads, requests a second; 0 for a closed loop.
        scored: Parquet with rows and their scores; random rows if None.
        minutes: of all loads together.
        rows: of a request, 1 to this many.
        malformed: share of the requests.
        restarts: restarts during each load.
        tolerance: of scores against those before the load, on a scale from 0 to 1:
            a row's last bits depend on its place in a batch, and can flip codes of FP8.
        timeout_s: after which a request counts as lost.
        connections: of the client.
        max_rows: of a batch of the server; one of the model's batch sizes.
        wait_ms: how long its first request waits for others.
    """

    model: pathlib.Path
    out: pathlib.Path | None = None
    rates: tuple[float, ...] = (100, 300, 1000, 2000)
    scored: pathlib.Path | None = None
    minutes: float = 1.0
    rows: int = 8
    malformed: float = 0.02
    restarts: int = 1
    tolerance: float = 0.005
    timeout_s: float = 30.0
    connections: int = 256
    max_rows: int = 1024
    wait_ms: float = 1.0


class Seen(NamedTuple):
    """A request and its answer.

    Attributes:
        due_s: when it was due.
        seconds: from then to its answer.
        status: of the answer; 0 without one.
        malformed: whether it was.
        is_right: whether its scores are right.
    """

    due_s: float
    seconds: float
    status: int
    malformed: bool
    is_right: bool


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    machine = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()}
    result = results.head("load", arguments) | machine | {"loads": []}
    with _server(arguments) as (process, address):
        session = _Session(arguments, process, address)
        for load in asyncio.run(session.loads()):
            result["loads"].append(load)
    results.write(arguments.out, result)
    return result


def draw_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns random rows that a model accepts."""
    inputs = json.loads((folder / loader.MODEL).read_bytes())["inputs"]
    arrays = loader.read_arrays(folder / "vocabulary.safetensors")
    rng, rows = np.random.default_rng(0), [{} for _ in range(_POOL)]
    for row in rows:
        for name in inputs["dense"]["columns"]:
            row[name] = float(rng.lognormal())
        for field in inputs["fields"]:
            values = [_value(field, arrays, rng) for _ in range(1 + ("slots" in field))]
            row[field["column"]] = values if "slots" in field else values[0]
            if field.get("weights") is not None:
                row[field["weights"]] = rng.random(len(values)).tolist()
    return rows


def _value(field: dict[str, Any], arrays, rng: np.random.Generator) -> Any:
    if field["kind"] != "vocabulary":
        return int(rng.integers(0, field["rows"]))
    ends = arrays[f"{field['of']}/ends"]
    at = int(rng.integers(0, len(ends)))
    start = ends[at - 1] if at else 0
    return arrays[f"{field['of']}/bytes"][start : ends[at]].tobytes().decode()


@contextlib.contextmanager
def _server(arguments: Arguments) -> Iterator[tuple[subprocess.Popen, str]]:
    """Yields the process of the server and its address, once it is ready."""
    options = ["--max-rows", arguments.max_rows, "--wait-ms", arguments.wait_ms]
    command = [sys.executable, "-u", _SERVE, arguments.model, "--port", 0, *options]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        match = re.match(r"listening at (\S+),", process.stdout.readline())
        if match is None:
            raise ValueError(f"{_SERVE} ended before it was ready: see above.")
        yield process, match[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


class _Session:
    """A client of the server."""

    def __init__(self, arguments: Arguments, process: subprocess.Popen, address: str):
        self._arguments, self._process = arguments, process
        self._address, scored = address, arguments.scored
        self._rows = draw_rows(arguments.model)
        if scored is not None:
            self._rows = parquet.read_table(scored).to_pylist()
        self._tolerance = arguments.tolerance if scored is None else 0.0
        self._expected = np.zeros(())  # [programs, rows], and [tasks] if several
        self._rng = np.random.default_rng(1)

    async def loads(self) -> list[dict[str, Any]]:
        """Returns what each offered load gave."""
        options = self._arguments
        timeout = aiohttp.ClientTimeout(total=options.timeout_s)
        connector = aiohttp.TCPConnector(limit=options.connections)
        summaries = []
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector
        ) as session:
            exact = [row.pop("score", None) for row in self._rows]
            by_program = [
                await self._scores(session, size)
                for size in loader.load(options.model).batch_sizes
                if size <= options.max_rows
            ]
            self._expected = np.array([exact] if options.scored else by_program)
            for rate in options.rates:
                summaries.append(await self._load(session, rate))
                print(_line(summaries[-1]), flush=True)
        return summaries

    async def _scores(self, session, size: int) -> list[Any]:
        """Returns the scores of all rows by the program of a batch size."""
        count, scores = len(self._rows), []
        for start in range(0, count, size):
            rows = [self._rows[i % count] for i in range(start, start + size)]
            status, answer = await self._post(session, json.dumps({"rows": rows}))
            if status != 200:
                raise ValueError(f"{size} rows were answered by {status}: {answer}")
            scores += answer["scores"]
        return scores[:count]

    async def _load(self, session, rate: float) -> dict[str, Any]:
        """Returns what one offered load gave."""
        seconds = 60 * self._arguments.minutes / len(self._arguments.rates)
        start, workers = time.perf_counter(), [await self._worker(session)]
        restart = asyncio.create_task(self._restart(session, seconds, workers))
        ask = self._open_loop if rate else self._closed_loop
        seen = await ask(session, start, seconds, rate)
        duration = time.perf_counter() - start
        await restart
        return _summary(rate, seconds, duration, seen, workers)

    async def _open_loop(self, session, start, seconds: float, rate) -> list[Seen]:
        gaps = self._rng.exponential(1 / rate, int(1.2 * rate * seconds) + 20)
        due, tasks = np.cumsum(gaps), []
        for at in due[due < seconds]:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.append(asyncio.create_task(self._ask(session, start, float(at))))
        return await asyncio.gather(*tasks)

    async def _closed_loop(self, session, start, seconds: float, _) -> list[Seen]:
        seen = []

        async def client() -> None:
            while (at := time.perf_counter() - start) < seconds:
                seen.append(await self._ask(session, start, at))

        await asyncio.gather(*(client() for _ in range(self._arguments.connections)))
        return seen

    async def _restart(self, session, seconds: float, workers: list[int]) -> None:
        """Restarts the server, and adds its new worker's process to `workers`."""
        for _ in range(self._arguments.restarts):
            await asyncio.sleep(seconds / (1 + self._arguments.restarts))
            self._process.send_signal(signal.SIGHUP)
            while (worker := await self._worker(session)) == workers[-1]:
                await asyncio.sleep(0.1)
            workers.append(worker)

    async def _worker(self, session) -> int:
        async with session.get(f"{self._address}/health") as response:
            return (await response.json())["worker"]

    async def _ask(self, session, start: float, due_s: float) -> Seen:
        """Sends a request, and returns what came of it."""
        is_malformed = bool(self._rng.random() < self._arguments.malformed)
        count = int(self._rng.integers(1, self._arguments.rows + 1))
        chosen = self._rng.integers(0, len(self._rows), count)
        body: Any = json.dumps({"rows": [self._rows[i] for i in chosen]})
        if is_malformed:
            body = _MALFORMED[int(chosen[0]) % len(_MALFORMED)]
        try:
            status, answer = await self._post(session, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"lost: {type(error).__name__}: {error}", flush=True)
            status, answer = 0, {}
        is_right = status != 200 or self._agrees(answer["scores"], chosen)
        seconds = time.perf_counter() - start - due_s
        return Seen(due_s, seconds, status, is_malformed, is_right)

    def _agrees(self, scores: list[Any], chosen: np.ndarray) -> bool:
        """Returns whether each row has the scores of one of the programs."""
        expected, values = self._expected[:, chosen], np.array(scores)
        if values.shape != expected.shape[1:]:
            return False
        errors = np.abs(expected - values).reshape(*expected.shape[:2], -1)
        return bool(np.all(errors.max(axis=-1).min(axis=0) <= self._tolerance))

    async def _post(self, session, body: Any) -> tuple[int, Any]:
        async with session.post(f"{self._address}/score", data=body) as response:
            return response.status, await response.json()


def _summary(
    rate: float, seconds: float, duration: float, seen: list[Seen], workers: list[int]
) -> dict[str, Any]:
    """Returns a load's numbers as JSON values."""
    good = [x for x in seen if x.status == 200]
    times_ms = 1e3 * np.array([x.seconds for x in good])
    return {
        "offered_per_s": rate,
        "seconds": seconds,
        "requests": len(seen),
        "answered_per_s": len(good) / duration,
        "latency_ms": {
            f"p{p:g}": float(np.percentile(times_ms, p)) if good else None
            for p in _PERCENTILES
        }
        | {"max": float(times_ms.max()) if good else None},
        "statuses": {str(k): n for k, n in Counter(x.status for x in seen).items()},
        "malformed": sum(x.malformed for x in seen),
        "malformed_not_400": sum(x.malformed and x.status != 400 for x in seen),
        "refused_though_right": sum(not x.malformed and x.status == 400 for x in seen),
        "lost": sum(x.status == 0 for x in seen),
        "wrong": sum(not x.is_right for x in seen),
        "restarts": len(workers) - 1,
    }


def _line(load: dict[str, Any]) -> str:
    times = load["latency_ms"]
    shown = "no answer"
    if times["p50"] is not None:
        shown = f"p50 {times['p50']:.1f} p99 {times['p99']:.1f} ms"
    return (
        f"{load['offered_per_s']:8,.0f} offered, {load['answered_per_s']:8,.0f} "
        f"answered a second; {shown}; "
        f"{load['statuses']}; lost {load['lost']}, wrong {load['wrong']}, "
        f"restarts {load['restarts']}"
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
