"""What tests of modules share."""

import jaxtyping
import pytest


@pytest.fixture
def without_type_checks(monkeypatch):
    """Lets modules take what the type checker of the tests would refuse first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
