"""Runs the parts of a benchmark in processes of their own, several at a time.

For parts whose results do not depend on what runs beside them: compiling, which takes
most of their time, uses one core each.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any


def measured[Call: Sequence](
    function: Callable[..., Any], calls: Sequence[Call], jobs: int
) -> Iterator[tuple[Call, Any]]:
    """Yields each call and its result, in the order in which they finish.

    Args:
        function: of a module.
        calls: positional arguments of each call.
        jobs: processes at a time.

    Raises:
        ExceptionGroup: after all calls, with what failed of them.
    """
    # None may take most of a GPU's memory before the others start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    failures = []
    with futures.ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1
    ) as pool:
        running = {pool.submit(function, *call): call for call in calls}
        for done in futures.as_completed(running):
            call, failure = running[done], done.exception()
            if failure is None:
                yield call, done.result()
                continue
            failure.add_note(f"in {function.__name__}{tuple(call)}")
            failures.append(failure)
    if failures:
        raise BaseExceptionGroup("parts of the benchmark failed", failures)
