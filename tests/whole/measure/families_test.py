"""Each family of kernels is checked, and what is planted in a stand-in is found."""

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loka_jax
from loka_jax.measure import check_families, families
from loka_jax.measure.check_families import why_any_wrong, why_off
from loka_jax.measure.checking import NO_MEMORY
from loka_jax.measure.families import BY_SITE, FAMILIES

PACKAGE = pathlib.Path(loka_jax.__file__).parent
LAUNCHES = re.compile(
    r"(.+\.)?(_?launch|launch_tree|triton_call)|plgpu\.kernel|_Run\.of"
)
# They are given a kernel.
PLUMBING = {
    "pallas.jagged_attention_launch.launch",
    "triton.launch.launch",
    "triton.trees.launch_tree",
}


def _entries(path):
    """Returns the public functions of a module that reach a launch."""
    functions = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            calls = (x for x in ast.walk(node) if isinstance(x, ast.Call))
            functions[node.name] = {ast.unparse(call.func) for call in calls}
    launching = set()
    for _ in functions:  # one calls another
        launching |= {
            name
            for name, called in functions.items()
            if called & launching or any(map(LAUNCHES.fullmatch, called))
        }
    public = (name for name in launching if not name.startswith("_"))
    return {f"{path.parent.name}.{path.stem}.{name}" for name in public}


def test_every_kernel_is_of_a_family_or_checked_at_each_site():
    paths = [x for p in ("triton", "pallas") for x in (PACKAGE / p).glob("*.py")]
    of_families = [entry for family in FAMILIES.values() for entry in family.entries]
    assert set().union(*map(_entries, paths)) - PLUMBING == {*of_families, *BY_SITE}


def test_each_family_is_asked_for_and_no_other_exists():
    text = "".join(path.read_text() for path in (PACKAGE / "ops").glob("*.py"))
    assert all(f'"{family}"' in text for family in FAMILIES)
    with pytest.raises(ValueError, match="'norm' is no family of kernels: name one of"):
        families.why_wrong("norm")


@functools.cache
def _case(family, index=0):
    return FAMILIES[family].cases()[index]


def _changed(tree, name, change):
    """Returns a tree in which leaves whose path ends in a name are changed."""
    found = []

    def replaced(path, x):
        if not jax.tree_util.keystr(path).endswith(name):
            return x
        found.append(path)
        return jnp.asarray(change(np.array(x)))

    tree = jax.tree_util.tree_map_with_path(replaced, tree)
    assert found, name
    return tree


def reads(name, change):
    return lambda run, *operands: run(*_changed(operands, name, change))


def writes(name, change):
    return lambda run, *operands: _changed(run(*operands), name, change)


def put(at, value):
    def change(x):
        x[at] = value
        return x

    return change


def times(factor):
    return lambda x: (x.astype(np.float32) * factor).astype(x.dtype)


off_by_one = lambda x: np.roll(x, 1, axis=0)  # noqa: E731
exponents = lambda x: np.append(x[:, :-24], x[:, -24:] + np.uint8(1), axis=1)  # noqa: E731
TILE = slice(64, 128), slice(64)
FAULTS = [
    ("last row skipped", "norm_tail", 0, writes(".bf16", put(198, 0))),
    ("tile of zeros", "norm_tail", 0, writes(".fp8_t", put(TILE, 0))),
    ("bias forgotten", "norm_tail", 0, reads(".bias", times(0))),
    ("scale off by 2", "norm_tail", 4, reads("[3].vector", times(2))),
    ("maximum too small", "norm_tail", 0, writes(".amaxes", times(0.5))),
    ("padding not zero", "norm_tail", 0, writes(".bf16", put((199, 0), 1))),
    ("sums off by a column", "norm_tail", 5, writes(".gamma", off_by_one)),
    ("summand forgotten", "cross_tail", 0, reads("[0][1].data", times(0))),
    ("maximum without a row", "joined_cast", 0, reads("[0]", put(198, 0))),
    ("residual forgotten", "joined_norm", 0, reads("[1]", times(0))),
    ("vectors of another column", "gated_norm", 0, reads(".gamma", off_by_one)),
    ("other elements dropped", "gated_norm", 1, reads("words", np.flip)),
    ("last example skipped", "dot_features", 0, writes("[0]", put(16, 0))),
    ("wrong row updated", "row_update", 2, writes("[0]", off_by_one)),
    ("other random bits", "row_update", 3, reads("words", lambda x: x + np.uint32(1))),
    ("entry lost", "route", 1, writes(".asked", put((2, 5), 0))),
    ("equal ones in another order", "merge", 0, writes("[1]", lambda x: x[::-1])),
    ("exponents off by one", "row_wire", 4, writes("", exponents)),
    ("last part forgotten", "packed", 0, writes("[0]", put(3, 0))),
    ("factors off by 2", "packed", 4, writes("[1]", times(2))),
    ("last example of FM", "fm_lcb", 0, writes("[0]", put(268, 0))),
    ("key forgotten", "jagged_softmax", 0, writes("[2]", put(3000, 0))),
    ("gradients of other queries", "jagged_softmax", 0, writes("[1]", off_by_one)),
    ("part not added", "fm_lcb_backward", 0, reads("[4][1]", times(0))),
]


@pytest.mark.parametrize(
    "family, index, plant", [pytest.param(*fault, id=what) for what, *fault in FAULTS]
)
def test_a_planted_fault_is_found(family, index, plant):
    case = _case(family, index)
    right = case._replace(kernel=jax.jit(case.reference))  # a stand-in
    wrong = right._replace(kernel=functools.partial(plant, right.kernel))
    how = dict(compiled=lambda kernel: kernel, workers=1)
    assert why_any_wrong([right], **how) is None
    reason = why_any_wrong([wrong], **how)
    assert reason is not None and reason.startswith(f"{case.name}: result"), reason


def test_what_does_not_run_is_a_reason_and_too_little_memory_another():
    def failing(message):
        def kernel(*_):
            raise RuntimeError(message)

        case = _case("merge")
        return why_any_wrong([case._replace(kernel=kernel)])

    assert failing("no such instruction") == (
        "ascending lists does not run: RuntimeError: no such instruction"
    )
    assert failing("RESOURCE_EXHAUSTED: Out of memory") == NO_MEMORY


def test_a_compiler_that_fails_to_start_is_started_again(monkeypatch):
    monkeypatch.setattr(check_families, "_PAUSE_S", 0.0)
    case, errors = _case("merge"), [RuntimeError("Failed to launch ptxas")]

    def compiled(kernel):
        if errors:
            raise errors.pop()
        return case.reference

    assert why_any_wrong([case], compiled=compiled, workers=1) is None and not errors


@pytest.mark.parametrize(
    ("dtype", "step", "is_right"),
    [
        ("bfloat16", 1, True),
        ("bfloat16", 3, False),
        ("float8_e4m3fn", 1, True),
        ("float8_e4m3fn", 2, False),
        ("int8", 1, True),
        ("int8", 2, False),
        ("uint8", 1, False),
    ],
)
def test_a_value_may_be_the_next_one_and_no_further(dtype, step, is_right):
    dtype = jnp.dtype(dtype)
    bits = np.full((8, 64), {1: 0x3C, 2: 0x3C3C}[dtype.itemsize], f"u{dtype.itemsize}")
    moved = bits.copy()
    moved[7, 63] += step
    assert (why_off(moved.view(dtype), bits.view(dtype)) is None) == is_right


def test_codes_that_all_move_are_no_rounding():
    codes = np.ones((8, 64), np.int8)
    moved = "result: 100.0% of its codes are the next ones"
    assert why_off(codes + np.int8(1), codes) == moved


def test_a_check_is_no_part_of_the_program_that_is_being_traced():
    case, reasons = _case("merge"), []
    case = case._replace(kernel=case.reference)
    traced = jax.make_jaxpr(lambda x: reasons.append(why_any_wrong([case])) or x)(1.0)
    assert reasons == [None] and not traced.eqns
