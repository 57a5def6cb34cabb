"""A worker that doubles numbers, slowly: `python worker.py SOCKET READY`."""

import asyncio
import socket
import sys
import time

from loka_jax.server.app import Limits, Worker


class Doubler:
    columns = ("x",)
    health = {"model": "doubler"}

    def encode(self, columns):
        if not all(isinstance(x, int) for x in columns["x"]):
            raise ValueError("row 1 column 'x' is no integer: correct it.")
        return columns["x"]

    def run(self, batch):
        time.sleep(0.01)
        if any(-1 in values for values in batch):
            raise ZeroDivisionError
        return [[2 * x for x in values] for values in batch]


if __name__ == "__main__":
    listening, ready = map(int, sys.argv[1:])
    limits = Limits(max_rows=8, wait_ms=2, max_waiting=16, grace_s=0.3)
    worker = Worker(Doubler(), limits)
    asyncio.run(worker.serve(socket.socket(fileno=listening), ready))
