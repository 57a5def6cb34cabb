import numpy as np

from loka_jax.train.logs.memory import memory_bytes


def test_memory_of_the_host_grows_with_what_is_written():
    before = memory_bytes()["host_bytes"] or 0
    held = np.ones(1 << 24)  # 128 MiB
    after = memory_bytes()["host_bytes"] or 0
    assert after - before > 0.9 * held.nbytes


def test_a_device_that_does_not_tell_its_memory_has_none():
    assert memory_bytes()["device_peak_bytes"] is None  # a CPU
