"""What whole runs share: four of them are trained once for all tests that read one."""

import functools

import pytest

from tests.support import recorded as runs


@pytest.fixture(scope="session")
def recorded(request, tmp_path_factory):
    """Returns a function that returns a recorded run by its name."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent  # of all workers
    return functools.cache(lambda name: runs.recorded(name, root))
