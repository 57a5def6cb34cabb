"""Whether the kernels of a family are right on this machine, asked before they run.

A family is a kernel with its backward pass and its forms, such as "norm_tail". What
checks families lies above all that runs them, so it is given here by the package.
"""

import functools
import logging
import threading
from collections.abc import Callable

# Returns what is wrong with a family on this machine, or None.
type Check = Callable[[str], str | None]

_log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
_checks: list[Check] = []


def use(check: Check) -> None:
    """Sets what checks a family."""
    _checks[:] = [check]
    _why_wrong.cache_clear()


def why_wrong(*families: str) -> str | None:
    """Returns why the kernels of some families must not run here, or None.

    The first question about a family checks it, which may take seconds, once a machine.
    """
    with _one_at_a_time:
        reasons = [_why_wrong(family) for family in families]
    return next((reason for reason in reasons if reason is not None), None)


@functools.cache
def _why_wrong(family: str) -> str | None:
    (check,) = _checks
    reason = check(family)
    if reason is None:
        return None
    reason = f"the kernels of {family} failed their check on this device: {reason}"
    _log.warning("%s. XLA runs in their place.", reason[0].upper() + reason[1:])
    return reason
