"""Trains a small run as the command line of a test asks, in one or several processes.

    python tests/whole/train/processes/trainee.py WORKDIR [max_steps=8] ...

With `table=PATH` sites enter FP8 by live errors, whose times are those of the table.
With `slow=SECONDS` steps after the first wait for a signal, and then take longer. With
`stall=STEP` the second process waits for ever before that step, so that it can be
killed or stopped within one, and with `stall_save=STEP` while that step is saved.
"""

import dataclasses
import functools
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
from jax._src import compiler

from loka_jax.data import generated
from loka_jax.dispatch.policy import Limits
from loka_jax.train import loop_options
from loka_jax.train.checkpoints import orbax_files
from loka_jax.train.config import DispatchOptions, ProbeOptions, RunOptions
from loka_jax.train.loop import Loop
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.processes.group import leave
from loka_jax.train.processes.signals import StopRequest
from loka_jax.train.session import train
from tests.support import train as support

WATCHDOG = 60.0
SMALL = dict(batch_size=128, epochs=4, max_steps=8, save_every=3, eval_every=4)


def main() -> int:
    workdir = Path(sys.argv[1])
    options = dict(argument.split("=") for argument in sys.argv[2:])
    jax.config.update("jax_compilation_cache_dir", os.environ["XLA_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX keeps programs of the first process only: here each is as the first.
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    table = options.pop("table", None)
    gc.set_threshold(100_000, 50, 100)  # as tests/conftest.py
    numbers = {name: int(value) for name, value in options.items()}
    sum_in_order()
    generated.best_possible_ne = lambda *_: (0.5, 0.0)  # of a million examples
    stall, stall_save = numbers.pop("stall", None), numbers.pop("stall_save", None)
    watchdog = numbers.pop("watchdog", WATCHDOG)
    if (slow := numbers.pop("slow", 0)) > 0:
        slow_down(slow)
    if int(os.environ.get("RANK", 0)) == 1:
        hang_in(Loop, "step", lambda loop, _: loop.progress.step == stall)
        hang_in(orbax_files, "begin", lambda path, *_: path.name == str(stall_save))
    resume, shards = bool(numbers.pop("resume", 0)), numbers.pop("shards", 8)
    config = support.config(workdir, **SMALL | numbers)
    config = dataclasses.replace(
        config,
        # Which draws how rows are rounded by the step.
        embedding=dataclasses.replace(config.embedding, dtype="bf16"),
        mesh=MeshConfig(shards=shards, replicas=1),
        run=RunOptions(workdir=workdir, resume=resume, watchdog=watchdog),
    )
    if table is not None:
        loop_options.LOOK_EVERY = 1
        probe = ProbeOptions(begin=0, recipes=("fp8_rowwise",))
        # Of few examples, whose errors differ widely from step to step.
        dispatch = DispatchOptions(limits=Limits(healthy=3.0, worst_row=30.0))
        config = dataclasses.replace(config, plan=table, probe=probe, dispatch=dispatch)
    return train(config, sys.argv).exit_code


def sum_in_order() -> None:
    """Lets `psum` add in the order of the devices.

    In one process XLA adds in another order than gloo does between two, so that the
    last bits differ; all else is to be equal.
    """

    def psum(x, axis_name):
        def add(leaf):
            if axis_name == ():
                return leaf
            first, *others = jax.lax.all_gather(leaf, axis_name)
            return functools.reduce(jax.numpy.add, others, first)

        return jax.tree.map(add, x)

    jax.lax.psum = psum


def hang_in(owner, name: str, is_there: Callable[..., bool]) -> None:
    """Lets a function wait for ever where it is told to."""
    plain = getattr(owner, name)

    def function(*given):
        if is_there(*given):
            print(f"waiting in {name}", flush=True)
            time.sleep(10_000)
        return plain(*given)

    setattr(owner, name, function)


def slow_down(seconds: int) -> None:
    """Lets steps after the first wait for a signal to this process, and take longer."""
    got, handle, plain = threading.Event(), StopRequest.__call__, Loop.step

    def __call__(self, number, frame):
        got.set()
        handle(self, number, frame)

    def step(self, taken):
        print(f"taking step {self.progress.step}", flush=True)
        while self.progress.step and not got.is_set():
            time.sleep(0.05)
        time.sleep(seconds)
        plain(self, taken)

    StopRequest.__call__, Loop.step = __call__, step


if __name__ == "__main__":
    leave(main)
