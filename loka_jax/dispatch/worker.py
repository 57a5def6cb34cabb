"""The process in which candidates run, so that a crash costs one candidate only.

Takes jobs from a connection to its parent, and answers which candidate begins, then the
measurements. Before it uses the GPU it asks for a turn, to compile together with others
or to run alone, and afterwards gives it back; each time it waits for an answer.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from loka_jax.dispatch.measuring import GpuUse, measure_site

# The kinds of messages: pairs of a kind and a value.
BEGIN, RESULT = "begin", "result"
ALONE, TOGETHER, APART = "alone", "together", "apart"


def serve(parent: Connection):
    """Measures jobs until the parent ends, which ends this process, too."""

    def receive() -> Any:
        try:
            return parent.recv()
        except EOFError:
            sys.exit()

    @contextlib.contextmanager
    def turn(kind: str) -> Iterator[None]:
        parent.send((kind, None))
        receive()
        try:
            yield
        finally:
            parent.send((APART, None))
            receive()

    gpu = GpuUse(*(functools.partial(turn, kind) for kind in (TOGETHER, ALONE)))
    while True:
        job = receive()
        entry = measure_site(job, lambda name: parent.send((BEGIN, name)), gpu)
        parent.send((RESULT, entry))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
