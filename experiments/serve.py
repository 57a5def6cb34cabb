"""Serves an exported model over HTTP, with dynamic batching.

    pip install 'loka-jax[serve]'
    python experiments/export.py --workdir runs/RUN --out model/
    python experiments/serve.py model/ --port 8000
    curl localhost:8000/score -d '{"rows": [{"price": 1.5, "user": "u1", "item": 3}]}'

`kill -HUP` restarts it, with another model in the folder too, and loses no request.
"""

import argparse
import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from loka_jax.commands import as_commands, command
from loka_jax.options import Parser
from loka_jax.server import supervise


class Scorer:
    """An exported model as a worker takes it."""

    def __init__(self, folder: str):
        """Loads the model, and compiles all of its programs."""
        sys.path.insert(0, folder)
        loader = importlib.import_module("loader")  # the folder's own
        self.model = loader.load(folder)
        self.columns = self.model.encoding.columns
        self.health: Mapping[str, Any] = {
            x: self.model.description[x] for x in ("name", "step")
        }
        self.model.warm()

    def encode(self, columns: Mapping[str, list[Any]]) -> Any:
        """Returns the inputs of rows."""
        return self.model.encoding.inputs(columns)

    def run(self, batch: Sequence[Any]) -> list[list[Any]]:
        """Returns the scores of each request of a batch."""
        return [scores.tolist() for scores in self.model.together(batch)]


def main(arguments: list[str]) -> int:
    """Runs workers, or one of them; returns the exit code."""
    parser = Parser(
        prog=command("serve.py"),
        description=as_commands(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="written by experiments/export.py")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-rows", type=int, default=1024)
    parser.add_argument("--wait-ms", type=float, default=1.0)
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    try:
        options = parser.parse_args(arguments)
        if not os.path.exists(os.path.join(options.folder, "loader.py")):
            raise ValueError(f"{options.folder} holds no exported model: name one.")
        from loka_jax.server.app import Limits  # needs an extra

        limits = Limits(max_rows=options.max_rows, wait_ms=options.wait_ms)
        if options.worker is not None:
            return _work(options, limits)
        # While one worker replaces another, both have the model on the GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        worker = [sys.executable, __file__, *arguments, "--worker"]
        return supervise(worker, options.host, options.port, say=_say)
    except (ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _say(line: str) -> None:
    print(line, flush=True)


def _work(options: argparse.Namespace, limits: Any) -> int:
    from loka_jax.server.app import Worker

    worker = Worker(Scorer(options.folder), limits)
    listening, ready = options.worker
    asyncio.run(worker.serve(socket.socket(fileno=listening), ready))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
