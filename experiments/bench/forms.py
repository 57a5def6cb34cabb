"""Times several ways to compute the same, each checked before it is timed."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import quality
from loka_jax.measure.compiling import compile_all, leaves
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.terminal import one_line

ROTATED_BYTES = 120e6  # of all input sets together: twice the L2
_MAX_SETS = 256


class Form(NamedTuple):
    """One way to compute something.

    Attributes:
        run: from the operands to the results; fit for `jax.jit`.
        sets: operands, as many sets as are rotated.
        exact: from the operands to the results in float32; None to check nothing.
        least_db: SQNR that all results must have.
    """

    run: Callable[..., Any]
    sets: list[tuple]
    exact: Callable[..., Any] | None = None
    least_db: float = 0.0


def num_sets(num_bytes: float) -> int:
    """Returns how many input sets of so many bytes together exceed twice the L2."""
    return min(max(2, round(ROTATED_BYTES / num_bytes + 0.5)), _MAX_SETS)


def time_forms(forms: Mapping[str, Form]) -> dict[str, dict[str, Any]]:
    """Returns a record of every form by name.

    A record has `us`, `min_us`, `max_us`, `kernels` and `num_bytes`, those of operands
    and results; or a reason: `failed` (it does not compile) or `wrong`. With `exact` it
    has `sqnr_db`, the least one of a result.
    """
    programs = {name: (form.run, form.sets[0]) for name, form in forms.items()}
    records: dict[str, dict[str, Any]] = {name: {} for name in forms}
    cases = {}
    for name, program in compile_all(programs).items():
        form, record = forms[name], records[name]
        if isinstance(program, Exception):
            record["failed"] = one_line(program)
            continue
        sets = [leaves(operands) for operands in form.sets]
        outputs = program(*sets[0])
        arrays = jax.tree.leaves((form.sets[0], outputs))
        record["num_bytes"] = sum(array.nbytes for array in arrays)
        if form.exact is not None:
            record["sqnr_db"] = least_sqnr(form.exact, form.sets[0], outputs)
            if not record["sqnr_db"] >= form.least_db:
                record["wrong"] = f"{record['sqnr_db']:.1f} dB"
                continue
        cases[name] = Case(program, sets)
    for name, timing in time_kernels(cases).items():
        records[name] |= {
            "us": timing.median_us,
            "min_us": timing.min_us,
            "max_us": timing.max_us,
            "kernels": timing.kernels,
        }
    return records


def least_sqnr(exact: Callable[..., Any], operands: tuple, outputs: Any) -> float:
    """Returns the least SQNR in dB of the results; -inf if one is not finite."""

    @jax.jit
    def least(operands, outputs):
        with jax.default_matmul_precision("highest"):
            expected = exact(*operands)
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(outputs), strict=True)
        pairs = [(x, y.astype(jnp.float32)) for x, y in pairs]
        db = jnp.stack([quality.sqnr(x.astype(jnp.float32), y) for x, y in pairs])
        finite = jnp.stack([jnp.all(jnp.isfinite(y)) for _, y in pairs])
        return jnp.where(jnp.all(finite), jnp.min(db), -jnp.inf)

    return float(least(operands, outputs))


def print_records(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a line for each form."""
    for name, record in records.items():
        if "us" not in record:
            reasons = (f"{k}: {x}" for k, x in record.items() if isinstance(x, str))
            print(f"  {name:32} {', '.join(reasons)}")
            continue
        ratio = f"{record['vs_xla']:6.2f}x" if "vs_xla" in record else " " * 7
        print(f"  {name:32} {record['us']:9.1f} us {ratio}", flush=True)
