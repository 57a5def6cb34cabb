"""The check of a candidate finds what is wrong in its results, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.measure.check_reference import Expected
from loka_jax.measure.check_scores import scores, worst_finding
from loka_jax.measure.checking import NO_MEMORY, lower_check
from loka_jax.measure.compiling import compile_lowered
from loka_jax.site import Choice, SiteSpec
from tests import support
from tests.support import stand_ins

# A last partial tile, sizes that differ, and vectors.
SPEC = SiteSpec(80, 32, 48, "layer", "swish", True)


@pytest.fixture(scope="module")
def checked():
    """Returns the check of a candidate and its programs, compiled once."""
    check = lower_check(SPEC, Choice.parse("xla bf16"), stand_ins.HOPPER)
    return check, compile_lowered(check.programs)


def _with(name, change):
    """Returns a change of a result of the training pass."""

    def changed(trained):
        results = {**trained.results, name: change(np.array(trained.results[name]))}
        return trained._replace(results=results)

    return changed


def _scaled(rows, factor):
    def change(x):
        x[rows] = x[rows] * factor
        return jnp.asarray(x)

    return change


@pytest.mark.parametrize(
    "program, change, why",
    [
        ("training", _with("y", _scaled(slice(64, 80), 0.0)), "y["),
        ("training", _with("dlhs", _scaled(7, 1.5)), "dlhs[7]"),
        ("training", _with("drhs", _scaled(slice(None), 1.1)), "drhs["),
        ("training", _with("dgamma", lambda x: jnp.roll(x, 1)), "dgamma"),
        ("training", _with("dbeta", _scaled(slice(None), -1.0)), "dbeta"),
        ("training", _with("dbias", _scaled(3, 2.0)), "dbias"),
        ("inference", lambda y: y.at[3].multiply(1.5), "inference y[3]"),
        ("inference", lambda y: y[:8], "inference y has shape (8, 48), not (80, 48)"),
    ],
)
def test_each_wrong_result_is_found_and_named(checked, program, change, why):
    check, compiled = checked
    assert check.why_wrong(compiled) is None
    changed = {program: lambda *arguments: change(compiled[program](*arguments))}
    reason = check.why_wrong({**compiled, **changed})
    assert reason is not None and reason.startswith(why) and "operands" in reason


def test_a_check_without_memory_is_no_fault(checked):
    def exhausted(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    check, compiled = checked
    for name in ("draw", "begin", "training", "judge"):
        assert check.why_wrong({**compiled, name: exhausted}) == NO_MEMORY


def _found(change):
    """Returns the worst finding of a result that is `change` of the reference."""
    y = support.normal(130, 96)
    y = y.at[5].set(0.0)  # a row of which nothing is expected
    noise = 2.0**-9 * support.normal(130, 96, seed=1)
    nothing = jnp.zeros((130, 1))

    def expected(y):
        return Expected({"y": y}, {}, {}, nothing, nothing, jnp.zeros(3))

    @jax.jit
    def score(y, found, perturbed):
        return scores({"y": found}, expected(y), [{"y": perturbed}])

    by_result = jax.device_get(score(y, change(y), y * (1 + noise)))
    return worst_finding(by_result, {"y": y.shape})


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda y: y * 1.004, "too large"),
        (lambda y: y + 0.01, "[5] is off by inf"),
        (lambda y: y.at[100:].multiply(1.01), "[128:130] is too large"),
        (lambda y: y.at[129].set(0.0), "[128:130] is too large"),
        (lambda y: y.at[64:128, :64].multiply(-1.0), "[64:128] is too large"),
        (lambda y: y.at[3, 3].set(jnp.nan), "is off by nan"),
        (lambda y: y.astype(jnp.bfloat16).astype(jnp.float32), None),  # it is rounded
    ],
)
def test_a_finding_says_what_and_where(change, why):
    found = _found(change)
    assert (found.excess > 1) == (why is not None)
    assert not why or why in str(found) or found.excess == float("inf")
