import pytest

from tests.support.data import read_in_small_parts


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """What is right in one block only would be right in every small file."""
    read_in_small_parts(monkeypatch)
