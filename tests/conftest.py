"""Test settings: eight CPU devices, no silent promotion, what runs where.

Most of the time goes into compiling small programs, so XLA does without LLVM's
optimizations here, and programs are kept for other workers and later runs. `.ci/run`
sets XLA_FLAGS itself, and tests numbers as users' programs compute them.
"""

import os
import pathlib
import signal
from importlib.util import find_spec

import jax
import pytest

FLAGS = "--xla_force_host_platform_device_count=8"
if not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    FLAGS += " --xla_backend_optimization_level=0"  # it is the level of GPUs, too
os.environ.setdefault("XLA_FLAGS", FLAGS)  # read when a device is first asked for
# A collective holds a thread of each device until all have come. XLA has a thread for
# each: if anything else holds one, the last device waits for ever.
os.environ.setdefault("PJRT_NPROC", "16")
# Workers share a GPU, of which each would take three quarters of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A shell starts jobs in the background with Ctrl-C ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
ALWAYS_CACHED = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# Parts of memory that Linux maps for a process at most. A program of a CPU takes some
# seven, those of thousands of tests all; XLA then crashes while it compiles or writes.
MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 65_530
# As in pyproject.toml: a program that another process was still writing.
INCOMPLETE = "ignore:Error reading persistent compilation cache entry"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if jax.default_backend() == "gpu":
        return
    folder = str(config.cache.mkdir("xla"))
    for name, value in {"jax_compilation_cache_dir": folder, **ALWAYS_CACHED}.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # of processes that tests start
    os.environ["PYTHONWARNINGS"] = INCOMPLETE
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True, scope="module")
def _few_programs():
    """Drops compiled programs between modules once their memory is half of all."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > MOST_MAPS / 2:
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr == "not slow and not drill":
        terminalreporter.write_line("Slow tests and drills were left out: pytest -m ''")
