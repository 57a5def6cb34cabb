"""Clients that ask a served model without a pause: errors, latency, and equal bits.

    loka predict --workdir RUN --data.path rows.parquet --out scores.parquet
    loka export --workdir RUN --out model/ --batch-sizes N    # of the run
    python experiments/bench/clients.py --model model/ --rows rows.parquet \\
        --scores scores.parquet --out clients.json

Starts `loka serve`. Each client sends one to eight of the rows, waits for the answer,
and sends others. An answer is wrong if its bits are not those of the file of scores.
"""

import asyncio
import dataclasses
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import tyro
from pyarrow import parquet

from experiments.bench import result as results
from experiments.bench.load import server
from loka_jax.export import loader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        model: a folder that experiments/export.py wrote.
        rows: Parquet with the columns of the model.
        scores: Parquet with the column `score` of the same rows, by predict.py.
        out: where to write the JSON; printed only if None.
        clients: that ask at the same time.
        seconds: for which they do.
        max_rows: of a batch of the server.
        wait_ms: how long its first request waits for others.
    """

    model: pathlib.Path
    rows: pathlib.Path
    scores: pathlib.Path
    out: pathlib.Path | None = None
    clients: int = 200
    seconds: float = 60.0
    max_rows: int = 1024
    wait_ms: float = 1.0


class Answer(NamedTuple):
    """An answer: its time and status, 0 if there is none, and whether it is right."""

    ms: float
    status: int
    is_right: bool


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    columns = loader.load(arguments.model).encoding.columns
    rows = parquet.read_table(arguments.rows, columns=list(columns)).to_pylist()
    scores = parquet.read_table(arguments.scores)["score"].to_numpy()
    texts = [json.dumps(row) for row in rows]
    load_before = os.getloadavg()[0]
    with server(arguments) as (_, address):
        answers = asyncio.run(_ask(arguments, f"{address}/score", texts, scores))
    ms = [answer.ms for answer in answers if answer.status == 200]
    result = results.head("clients", arguments) | {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load_before,  # of the machine, by others
        "answers": len(answers),
        "answered_per_s": len(ms) / arguments.seconds,
        "errors": len(answers) - len(ms),
        "wrong": sum(not answer.is_right for answer in answers),
        "latency_ms": {f"p{p}": float(np.percentile(ms, p)) for p in (50, 90, 99, 100)},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "versions"}, indent=1))
    results.write(arguments.out, result)
    return result


async def _ask(
    arguments: Arguments, url: str, texts: list[str], scores: np.ndarray
) -> list[Answer]:
    """Returns the answers to all clients."""
    answers: list[Answer] = []
    end = time.perf_counter() + arguments.seconds

    async def client(session: aiohttp.ClientSession, rng: np.random.Generator) -> None:
        while (start := time.perf_counter()) < end:
            chosen = rng.integers(0, len(texts), rng.integers(1, 9))
            body = f'{{"rows": [{", ".join(texts[i] for i in chosen)}]}}'
            status, found = 0, {}
            try:
                async with session.post(url, data=body) as response:
                    status, found = response.status, await response.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                print(f"lost: {type(error).__name__}: {error}", flush=True)
            is_right = np.array_equal(found.get("scores", ()), scores[chosen])
            ms = 1e3 * (time.perf_counter() - start)
            answers.append(Answer(ms, status, is_right))

    connector = aiohttp.TCPConnector(limit=arguments.clients)
    async with aiohttp.ClientSession(connector=connector) as session:
        rngs = np.random.default_rng(0).spawn(arguments.clients)
        await asyncio.gather(*(client(session, rng) for rng in rngs))
    return answers


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
