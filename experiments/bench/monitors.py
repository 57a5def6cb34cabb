"""What Probe's monitors cost: observed steps with and without them.

    python experiments/bench/monitors.py --config fp8_dlrm --out monitors.json

For Probe without an option, which learns errors alone, and for `--probe.every`:
microseconds of an observed step, and of reading all sites for a log line.

    share    (with them - without + reading) / (64 training steps)

A smaller batch and model do without a GPU: `--config fp8_dlrm_small --batch-size 1024`.
"""

import dataclasses
import time
from typing import Any
from unittest import mock

import tyro

from experiments.bench import result as results
from experiments.bench.steps import READ_STEP, batches_of, chain_of, warm_up
from experiments.configs import get_config
from loka_jax.measure.timing import time_chains
from loka_jax.nn import ProbeConfig
from loka_jax.probe import monitors
from loka_jax.probe.site import ErrorsAlone
from loka_jax.train.build import Run, build
from loka_jax.train.config import ProbeOptions
from loka_jax.train.loop_options import LOOK_EVERY
from loka_jax.train.observe import probe_step
from loka_jax.train.state import TrainState
from loka_jax.train.watch import alarm

_READS = 20
# Covariances of weights, which few observed steps update, cost more than all others.
_OBSERVERS = {
    "errors alone": (ErrorsAlone(), ProbeOptions(begin=0)),
    "statistics": (ProbeConfig(moves_weight_covariances=False), ProbeOptions(every=64)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        config: a configuration on generated data.
        batch_size: examples a training step.
        calls: steps in a round.
    """

    config: str = "fp8_dlrm"
    batch_size: int = 65536
    calls: int = 20


def main(arguments: Arguments) -> None:
    """Measures, prints the shares, writes the result."""
    result = results.head("monitors", arguments)
    for name, (observer, probe) in _OBSERVERS.items():
        record = _measured(_run_of(arguments, probe), observer, arguments.calls)
        print(f"{name}: {record['share']:.3%} of a run's time")
        result[name] = record
    results.write(arguments.out, result)


def _run_of(arguments: Arguments, probe: ProbeOptions) -> Run:
    config, size = get_config(arguments.config), arguments.batch_size
    data = dataclasses.replace(config.data, examples=size * 64, eval_examples=1024)
    loop = dataclasses.replace(config.loop, batch_size=size)
    how: Any = dict(data=data, loop=loop, probe=probe, plan="off")
    return build(dataclasses.replace(config, **how))


def _measured(
    run: Run, observer: ProbeConfig | ErrorsAlone, calls: int
) -> dict[str, float]:
    """Returns the microseconds of steps and of reading, and the monitors' share."""
    batches = batches_of(run)
    state = warm_up(run, run.init(), batches)
    step = run.train_step(scales_initialized=True)
    # Steps donate the state that they are given.
    chains = {"with": _observed(run, observer, state, batches)}
    empty = monitors.empty_monitors
    with mock.patch.object(monitors, "of_product", lambda *_: empty()):
        run.programs.clear()
        chains["without"] = _observed(run, observer, state, batches)
    times = time_chains(chains, calls=max(calls // 4, 1))
    us = {name: timing.median_us for name, timing in times.items()}
    seen = probe_step(run, observer)(state, batches[0])
    us["read"] = _read_us(run, dataclasses.replace(state, probe=seen))
    trained = chain_of(step, [dataclasses.replace(state, probe={})], batches, READ_STEP)
    us["step"] = time_chains({"step": trained}, calls=calls)["step"].median_us
    added = us["with"] - us["without"] + us["read"]
    return us | {"share": added / (LOOK_EVERY * us["step"])}


def _observed(
    run: Run, observer: ProbeConfig | ErrorsAlone, state: TrainState, batches: list
) -> Any:
    """Returns observed steps as a chain, compiled here."""
    observe = probe_step(run, observer)
    observe(state, batches[0])

    def observed(probe: Any, batch: Any) -> Any:
        return observe(dataclasses.replace(state, probe=probe), batch)

    return chain_of(observed, [state.probe], batches)


def _read_us(run: Run, state: TrainState) -> float:
    """Returns the time to read and judge the monitors of all sites."""
    alarm.seen_by(run, state)  # compiles
    start = time.perf_counter()
    for _ in range(_READS):
        seen = alarm.seen_by(run, state)
        for site in seen.values():
            site.line()
        alarm.Alarms().after(0, seen)
    return (time.perf_counter() - start) / _READS * 1e6


if __name__ == "__main__":
    main(tyro.cli(Arguments))
