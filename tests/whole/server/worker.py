"""A worker that doubles numbers, slowly: `python worker.py GATE SOCKET READY`.

A batch with a number HELD says so by a file `held` in the folder GATE, and runs until
there is a file `open`.
"""

import asyncio
import pathlib
import socket
import sys
import time

from loka_jax.server.app import Limits, Worker

HELD = -2


class Doubler:
    columns = ("x",)
    health = {"model": "doubler"}

    def __init__(self, gate):
        self.gate = gate

    def encode(self, columns):
        return columns["x"]

    def run(self, batch):
        time.sleep(0.01)
        if any(HELD in values for values in batch):
            (self.gate / "held").touch()
            while not (self.gate / "open").exists():
                time.sleep(0.01)
        return [[2 * x for x in values] for values in batch]


if __name__ == "__main__":
    listening, ready = map(int, sys.argv[2:])
    # A client that waits for its turn on a busy machine comes back within the grace.
    limits = Limits(max_rows=8, wait_ms=2, max_waiting=16, grace_s=2.0)
    worker = Worker(Doubler(pathlib.Path(sys.argv[1])), limits)
    asyncio.run(worker.serve(socket.socket(fileno=listening), ready))
