"""Steps that each read the state the last one returned, as chains to be timed.

Kernel time is assigned to parts of a step by the scopes in the names that a program's
instructions carry: a kernel that does work of several parts counts for that of its
result.
"""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from loka_jax.data import Batch, Position
from loka_jax.data.batch import event_rows
from loka_jax.measure.timing import profile_ops
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState

Chain = Callable[[int], Any]
READ_STEP = operator.attrgetter("step")  # to wait for a training step
NUM_BATCHES = 8
# By the scopes in an instruction's name; the first that fits.
_PARTS = {
    "route": re.compile(r"/route/"),
    "lookup": re.compile(r"/lookup/"),
    "rows update": re.compile(r"/update_rows/"),
    "dense update": re.compile(r"/optimizer/"),
    "merge of devices": re.compile(r"/merge/"),
    "metrics": re.compile(r"/metrics/"),
    "interaction, backward": re.compile(r"transpose\(.*interaction"),
    "interaction, forward": re.compile(r"interaction"),
    "dense, backward": re.compile(r"transpose\("),
    "dense, forward": re.compile(r"jvp\("),
}
_OTHER = "other"


def chain_of(
    step: Callable[[Any, Any], Any],
    held: list,
    inputs: Sequence[Any],
    read: Callable[[Any], Any] = lambda state: state,
) -> Chain:
    """Returns a function that queues that many steps.

    Args:
        step: from state and input to the next state; may donate the state.
        held: the state, replaced by each step; chains may share it.
        inputs: rotated.
        read: selects what to wait for from the last state.
    """

    def queue(count: int):
        for i in range(count):
            held[0] = step(held[0], inputs[i % len(inputs)])
        return read(held[0])

    return queue


def batches_of(run: Run) -> list[Batch]:
    """Returns batches to time: of histories, whose sizes differ, the most frequent."""
    train, size = run.splits.train, run.config.loop.batch_size
    batches = [
        jax.block_until_ready(train.batch(Position(0, i, 0), size, shuffle=True))
        for i in range(NUM_BATCHES)
    ]
    rows = [*map(event_rows, batches)]
    most = max(rows, key=rows.count)
    return [batch for batch, own in zip(batches, rows, strict=True) if own == most]


def warm_up(run: Run, state: TrainState, batches: Sequence[Batch]) -> TrainState:
    """Returns the state after steps that set delayed scales."""
    for batch in batches[:3]:
        state = run.train_step()(state, batch)
    return state


def memory_bytes(compiled: Any) -> int:
    """Returns the bytes that a compiled program needs at its call.

    Arguments, results that do not lie in the place of an argument, and temporaries.
    """
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def kernels_by_part(text: str, chain: Chain) -> dict[str, float]:
    """Returns the microseconds of a step's kernels, by part.

    Args:
        text: of the compiled step, which must have no command buffers.
        chain: queues steps of that program, and nothing else.
    """
    scopes = _scopes(text)
    parts = dict.fromkeys((*_PARTS, _OTHER), 0.0)
    for op, time_us in profile_ops(chain).items():
        parts[_part(scopes.get(op, ""))] += time_us
    return parts


def _scopes(text: str) -> dict[str, str]:
    """Returns the `op_name` of each instruction of a compiled program."""
    pattern = r"^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name=\"([^\"]*)\""
    return dict(re.findall(pattern, text, flags=re.MULTILINE))


def _part(name: str) -> str:
    return next((part for part, scope in _PARTS.items() if scope.search(name)), _OTHER)
