"""Test settings: eight CPU devices, no silent promotion, what runs where, CPU time.

Most of the time goes into compiling small programs, so XLA does without LLVM's
optimizations where there is no GPU, and programs are kept for other workers and later
runs. `.ci/run` sets XLA_FLAGS itself: it tests numbers as users' programs compute them.
"""

import gc
import os
import pathlib
import resource
import signal
import tempfile

import jax
import pytest

FLAGS = "--xla_force_host_platform_device_count=8"
# The level is that of GPUs, too. JAX looks for one where CUDA's plugin is installed.
GPU = map(pathlib.Path, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))
if not any(path.exists() for path in GPU):
    FLAGS += " --xla_backend_optimization_level=0"
os.environ.setdefault("XLA_FLAGS", FLAGS)  # read when a device is first asked for
# A collective holds a thread of each device until all have come. XLA has a thread for
# each: if anything else holds one, the last device waits for ever.
os.environ.setdefault("PJRT_NPROC", "16")
# Tracing makes millions of objects, most of them for good: looking through all of them
# for garbage takes 15 % of the tests' time by Python's thresholds.
gc.set_threshold(100_000, 50, 100)
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


# What plain pytest may take in CI, so that it stays small: five minutes, and a fifth
# more where the CPU is slow or busy.
MOST_CPU_SECONDS, MOST_CPU_SECONDS_OF_A_TEST = 6 * 60, 30
LONG_SECONDS = 600  # of a run or an interpreted kernel, on a busy machine too
REST = """\
Runs, processes, meshes, interpreted kernels: pytest tests/whole. Thousands of damaged
files: pytest -m drill. On a GPU: pytest -m gpu."""
CPU_SECONDS = pytest.StashKey[dict[str, float]]()  # of each test
BY_DEFAULT = pytest.Config.ArgsSource.TESTPATHS


def pytest_addoption(parser):
    help = "fail where the tests take more CPU time than plain `pytest` may"
    parser.addoption("--cpu-budget", action="store_true", help=help)


def pytest_configure(config):
    """Runs no drill unasked; looks for tests of a mark in all folders.

    What runs keep for later ones goes to a folder of this call of pytest, not of the
    user.
    """
    config.stash[CPU_SECONDS] = {}
    if not hasattr(config, "workerinput"):  # whose environment workers inherit
        cache = tempfile.TemporaryDirectory(prefix="loka_jax-tests-")
        config.add_cleanup(cache.cleanup)
        os.environ["XDG_CACHE_HOME"] = cache.name
    if not config.option.markexpr:
        config.option.markexpr = "not drill"
    elif config.args_source is BY_DEFAULT:
        config.args = ["tests"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "unit" not in item.path.parts:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
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


@pytest.fixture(autouse=True, scope="session")
def _quick_best_ne():
    """Takes the best NE of generated data from fewer examples than a million."""
    from loka_jax.data import generated  # not before types are checked on import

    plain = generated.best_possible_ne

    def quick(config, world, num_examples=2**14):
        return plain(config, world, num_examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated, "best_possible_ne", quick)
        yield


@pytest.fixture
def as_users_do():
    """Promotes dtypes and ranks, as Flax's and optax's own code asks for in places."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _cpu_seconds():
    """Returns the CPU time of this process and of those that it started and ended."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    usages = [resource.getrusage(x) for x in whose]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    before = _cpu_seconds()
    result = yield
    item.config.stash[CPU_SECONDS][item.nodeid] = _cpu_seconds() - before
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Hands on CPU times, or judges their sum where there are no workers above."""
    tests = session.config.stash[CPU_SECONDS]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = tests
    elif session.config.option.cpu_budget and _over_budget(tests):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Keeps the CPU times of the tests of one worker."""
    seconds = getattr(node, "workeroutput", {}).get("cpu_seconds", {})
    node.config.stash[CPU_SECONDS].update(seconds)


def _over_budget(tests):
    """Returns a line for each of the two limits that the tests were above."""
    lines = []
    if (total := _cpu_seconds()) > MOST_CPU_SECONDS:
        lines.append(f"ABOVE THE LIMIT: {total:.0f} s; at most {MOST_CPU_SECONDS} s")
    for name, seconds in tests.items():
        if seconds > MOST_CPU_SECONDS_OF_A_TEST:
            limit = MOST_CPU_SECONDS_OF_A_TEST
            lines.append(f"ABOVE THE LIMIT: {seconds:.0f} s; at most {limit} s: {name}")
    return lines


def pytest_terminal_summary(terminalreporter, config):
    tests = config.stash[CPU_SECONDS]
    if not tests:
        return
    most, total = max(tests, key=tests.__getitem__), _cpu_seconds() / 60
    lines = [f"CPU time: {total:.1f} minutes; most: {tests[most]:.1f} s by {most}"]
    lines += _over_budget(tests) if config.option.cpu_budget else []
    lines += [REST] if config.args == config.getini("testpaths") else []
    terminalreporter.write_line("\n".join(lines))
