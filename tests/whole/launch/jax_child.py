"""A stand-in for training in several processes: steps with a sum over all devices."""

import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from loka_jax.data import Batch, Part
from loka_jax.data.placement import placed
from loka_jax.train.processes.group import Processes, start, tell_workdir
from loka_jax.train.processes.signals import stop_on_signals
from loka_jax.train.processes.watchdog import Watchdog, resting

SIZE = 8


def rows(processes: Processes) -> Batch:
    """Returns this process's rows of a batch, whose labels are 0, 1, 2 ..."""
    part = Part(processes.index, processes.count)
    labels = np.asarray(part.rows(SIZE), np.float32)
    ones, ids = np.ones_like(labels), np.zeros((len(labels), 0), np.int32)
    return Batch(ones[:, None], ids, labels, ones)


def main(workdir: str, watchdog: str, num_steps: str) -> int:
    processes = start()
    with stop_on_signals(processes.count) as stop:
        tell_workdir(Path(processes.same(f"{workdir}/of-{processes.index}")))
        sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("d",)), P("d"))
        part = Part(processes.index, processes.count)
        batch = placed(rows(processes), sharding, part)
        step = jax.jit(lambda total, batch: total + batch.labels.sum())
        total = jax.numpy.zeros(())
        with stop.deferred(), Watchdog(float(watchdog)) as watch:
            for number in range(1, int(num_steps) + 1):
                with resting(number == 1):  # it is compiled
                    total = jax.block_until_ready(step(total, batch))
                watch.alive()
                print(f"step {number}: {float(total):g}", flush=True)
                if stop.reached():
                    break
                time.sleep(0.01)
        print(f"saved step {number}", flush=True)
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
