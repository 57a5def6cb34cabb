"""FP8 that a run may enter, whose kernels are checked while it trains."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from loka_jax.dispatch.first_use import CheckedPlan
from loka_jax.dispatch.measuring import TOGETHER
from loka_jax.dispatch.pool import Turns, gpu_turn


class Hope:
    """The plan of a review that finds all errors within the limits.

    Attributes:
        is_ready: not set while a thread makes what this plan needs.
        is_awaited: whether a review waits for the check. If not, it is for later runs,
            and a review that comes before its end promotes nothing.
    """

    def __init__(
        self, check: Callable[[Turns], CheckedPlan], *, is_awaited: bool = True
    ):
        """Takes what checks the plan, by processes with such turns on the GPU."""
        self.is_awaited = is_awaited
        self._check = check
        self._checked: CheckedPlan | None = None
        self._turns = Turns()
        self._is_checking = False
        self._lock = threading.Lock()
        self.is_ready = threading.Event()
        self.is_ready.set()

    def begin(self) -> None:
        """Begins the check in a thread."""
        if not self.is_checked:
            self._is_checking = True
            threading.Thread(target=self.checked, daemon=True).start()

    def checked(self) -> CheckedPlan:
        """Returns the plan with no choice that was never checked.

        The first call checks it; others wait.
        """
        with self._lock:
            try:
                if self._checked is None:
                    self._is_checking = True
                    self._checked = self._check(self._turns)
                return self._checked
            finally:
                self._is_checking = False

    @property
    def is_checked(self) -> bool:
        """Whether the check has ended."""
        return self._checked is not None

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Waits while a kernel is timed; none is before the block ends.

        It is told whether kernels are being checked: then all that it has begun on the
        GPU is to end within.
        """
        if not self._is_checking:
            yield False
            return
        with gpu_turn(self._turns.folder, TOGETHER):
            yield True

    def end(self) -> None:
        """Ends a check, whose results so far are kept."""
        self._turns.are_over.set()
