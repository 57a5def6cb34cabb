"""A training loop whose steps, files and display record what is asked of them.

A state tells the newest batch it has seen, `params["newest"]`, and the number of steps;
its rows are `APART` after a step and `SYNCED` after a sync.
"""

import contextlib
import copy
import dataclasses
import types
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.data import Batch, Position
from loka_jax.data.batch import next_position
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.ops.tables import TableSpec
from loka_jax.train import metrics
from loka_jax.train.build import Run
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.checkpoints.row_layout import RowLayout
from loka_jax.train.folder.record import RunRecord
from loka_jax.train.logs.progress import TrainingProgress
from loka_jax.train.logs.timing import Profiler
from loka_jax.train.loop import Loop
from loka_jax.train.placement import Placement
from loka_jax.train.processes.signals import StopRequest
from loka_jax.train.state import TrainState
from loka_jax.train.step import TrainStep
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support

SIZE, STEPS_PER_EPOCH, LAST_SIZE = 32, 5, 20  # the epoch's last batch is not full
APART, SYNCED = -1.0, 1.0
TABLES = TableSpec(rows=(2,), dim=2)


def number_of(position: Position) -> int:
    """Returns the number of a batch: 10 times its epoch, plus its step there."""
    return 10 * position.epoch + position.step


def loss_of(number: int) -> float:
    """Returns the log loss of each example of a batch."""
    return 0.5 + number / 1000


def _splits():
    """Returns what the loop asks of the data."""
    rows = (STEPS_PER_EPOCH - 1) * SIZE + LAST_SIZE
    schema = types.SimpleNamespace(labels=("label",), dense=("x",))
    return types.SimpleNamespace(
        train=types.SimpleNamespace(num_examples=rows, schema=schema),
        valid="the validation rows",
        test="the test rows",
        identity={"rows": rows},
        report={},
        left_out=0,
        encoding_digest="a digest",
        folder=None,
        files={},
    )


class Steps(TrainStep):
    """The training steps of a call, of which those on some batches fail or diverge."""

    def __init__(self, run: "StandInRun", how: dict[str, Any]):
        self._run, self._how = run, how
        self._has_run = False

    @property
    def has_run(self) -> bool:
        return self._has_run

    def __call__(self, state: TrainState, *batches: Batch) -> TrainState:
        numbers = [int(batch.ids[0, 0]) for batch in batches]
        if error := self._run.errors.pop(numbers[0], None):
            raise error
        self._run.events.append(f"train on {', '.join(map(str, numbers))}")
        self._run.calls.append(self._how)
        self._has_run = True
        for number in numbers:
            state = self._after(state, number)
        return state

    def _after(self, state: TrainState, number: int) -> TrainState:
        host = jax.device_get(state)
        is_skipped = number in self._run.skipped
        new = {
            "step": host.step + 1,
            "params": {"newest": np.float32(number)},
            "table": np.full_like(host.table, APART),
            "skipped": host.skipped + is_skipped,
            "skipped_in_a_row": (host.skipped_in_a_row + 1) * is_skipped,
        }
        if not is_skipped:
            loss = self._run.losses.get(number, loss_of(number))
            seen, sums = host.metrics, np.float32([SIZE * loss, 0.0])
            new["metrics"] = seen._replace(
                count=seen.count + np.int32(SIZE),
                clicks=seen.clicks + np.int32(SIZE // 2),
                loss=seen.loss + sums,
                capped_loss=seen.capped_loss + sums,
                prediction=seen.prediction + sums,
            )
        return dataclasses.replace(state, **jax.tree.map(jnp.asarray, new))


class StandInPlacement(Placement):
    """A placement that lists what is asked of it."""

    def __init__(self, events: list[str]):
        super().__init__(TABLES)
        vars(self)["events"] = events

    @property
    def layout(self) -> RowLayout:
        return RowLayout(TABLES, 256)

    def look_ahead(self, batches):
        self.events.append("ahead")
        return batches

    def sync(self, state):
        self.events.append("sync")
        table = np.full(state.table.shape, SYNCED, np.float32)
        return dataclasses.replace(state, table=jnp.asarray(table))


class StandInRun(Run):
    """A run over four and a half batches an epoch.

    It lists what was done (`events`), how each step was asked for (`calls`) and what
    was `read_from`. By number of a batch, steps have other `losses`, are `skipped`, or
    raise one of the `errors` once.
    """

    def __init__(self, config, events: list[str], total_steps: int):
        vars(self).update(config=config, splits=_splits(), plan=DispatchPlan())
        vars(self).update(list_sites=lambda *_, **__: ())
        vars(self).update(reviewer=None, hope=None)
        vars(self).update(steps_per_epoch=STEPS_PER_EPOCH, total_steps=total_steps)
        vars(self).update(schedule=lambda step: step / 100)
        vars(self).update(placement=StandInPlacement(events))
        self.events, self.calls, self.read_from = events, [], []
        self.losses, self.skipped, self.errors, self.steps = {}, set(), {}, {}

    init = lambda self: start_state()  # noqa: E731
    template = lambda self: jax.eval_shape(lambda: vars(start_state()))  # noqa: E731

    def replanned(self, plan):
        run = copy.copy(self)
        vars(run).update(plan=plan, steps={})
        return run

    @contextlib.contextmanager
    def prefetched(self, start, num_batches=None):
        self.read_from.append((start, num_batches))
        yield self._batches(start, num_batches)

    def _batches(self, position, count):
        ones = np.ones(SIZE, np.float32)
        for _ in range(count):
            ids = np.full((SIZE, 1), number_of(position), np.int32)
            yield position, Batch(ones[:, None], ids, ones, ones)
            position = next_position(position, STEPS_PER_EPOCH)

    def train_step(self, *, scales_initialized, steps=1):
        how = dict(scales_initialized=scales_initialized, steps=steps)
        return self.steps.setdefault(tuple(how.values()), Steps(self, how))


class _Record(RunRecord):
    def __init__(self, events):
        self.events, self.lines = events, []
        self.write = mock.Mock()

    def log(self, line, name="metrics.jsonl"):
        kind = line.get("kind", name)
        self.events.append(f"log {kind} {line['step']}")
        self.lines.append(line)

    def truncate(self, step):
        self.events.append(f"drop lines after {step}")


class StandInCheckpoints(Checkpoints):
    """Checkpoints in a dictionary of state and meta by step."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events, self.saved = name, events, {}

    def save(self, step, state, meta):
        self.events.append(f"save {self.name} {step}")
        self.saved[step] = state, meta

    def wait(self):
        self.events.append(f"wait for {self.name}")

    def newest(self):
        step = self.latest_step()
        return None if step is None else Saved(step, self.saved[step][1], {})

    def latest_step(self):
        return max(self.saved, default=None)

    def drop_after(self, step):
        self.events.append(f"drop {self.name} after {step}")
        self.saved = {s: x for s, x in self.saved.items() if s <= step}


class Stop(StopRequest):
    """A request to stop once it was asked for a number of times."""

    def __init__(self, after: int = 10**9):
        super().__init__()
        self._left = after

    def reached(self):
        self._left -= 1
        self._signal = 15 if self._left <= 0 else None
        return self.is_set


def start_state() -> TrainState:
    """Returns a state before its first step; its scales are none."""
    zero, count = jnp.asarray(np.float32(0)), jnp.asarray(np.int32(0))
    counts = ("step", "skipped", "skipped_in_a_row", "bad_ids")
    nothing = dict(fp8={}, batch_stats={}, probe={}, opt_state=(), row_state=())
    return TrainState(
        params={"newest": zero},
        table=jnp.asarray(np.zeros((2, 2), np.float32)),
        lr_scale=zero + np.float32(1),
        grad_norm=zero,
        metrics=metrics.init(),
        **dict.fromkeys(counts, count),
        **nothing,
    )


class Recorded(NamedTuple):
    """A loop, and what its stand-ins recorded."""

    loop: Loop
    run: StandInRun
    events: list[str]
    record: _Record
    newest: StandInCheckpoints
    best: StandInCheckpoints
    display: mock.Mock
    profiler: mock.Mock

    def train(self, stop: StopRequest | None = None) -> "Recorded":
        """Trains to the end, or as far as `stop` lets it."""
        self.loop.train(stop or Stop())
        return self

    def steps(self, what: str) -> list[int]:
        """Returns the steps at which something was done."""
        return [int(e.split()[-1]) for e in self.events if e.startswith(what)]

    def trained_on(self) -> list[str]:
        """Returns the batches of each call."""
        return [e[9:] for e in self.events if e.startswith("train on")]

    def guarded(self) -> list[bool]:
        """Returns of each call whether its scales may not be initialized."""
        return [not call["scales_initialized"] for call in self.run.calls]

    def said(self) -> list[str]:
        """Returns the sentences that were printed."""
        return [call.args[0] for call in self.display.say.call_args_list]


def make_loop(config=None, *, steps: int = 10, progress=None, **loop) -> Recorded:
    """Returns a loop before its first step, of a run with the options `loop`."""
    config = config or support.config(**(dict(eval_every=None, log_every=2) | loop))
    events: list[str] = []
    run = StandInRun(config, events, steps)
    display = mock.create_autospec(TrainingProgress, instance=True)
    display.doing.side_effect = lambda _: contextlib.nullcontext()
    parts = {
        "record": _Record(events),
        "checkpoints": StandInCheckpoints("newest", events),
        "best": StandInCheckpoints("best", events),
        "display": display,
        "profiler": mock.create_autospec(Profiler, instance=True),
    }
    start = progress or Progress(position=Position(0, 0, 0))
    return Recorded(
        Loop(run, start_state(), start, **parts), run, events, *parts.values()
    )
