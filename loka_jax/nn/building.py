"""Builds steps that hold programs again: scan, cond, while and remat.

Variables of sites, delayed scales and what Probe sees, lie beside the parameters by the
paths of the sites. They go where the weight goes: a scan that cuts a weight into steps
cuts them, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from loka_jax import compat
from loka_jax.nn.host import Key
from loka_jax.nn.products import site_path
from loka_jax.nn.program import Program, Step

type Given = dict[Key, Any]
# Runs a program of a step with the variables of sites.
type Run = Callable[[Program, Sequence[Any], Given], list[Any]]


def build_again(step: Step, values: list[Any], given: Given, run: Run) -> Sequence[Any]:
    """Returns the results of a step, whose programs run otherwise.

    Args:
        values: of its operands.
        given: the variables of sites.
    """

    def runs(program: Program) -> Callable[..., list[Any]]:
        return lambda *arguments: run(program, arguments, given)

    params = step.params
    match step.name:
        case "scan":
            return _scan(step, values, given, run)
        case "cond":
            return jax.lax.switch(values[0], [*map(runs, step.inner)], *values[1:])
        case "while":
            condition, body = map(runs, step.inner)
            n, m = params["cond_nconsts"], params["body_nconsts"]
            return jax.lax.while_loop(
                lambda carry: condition(*values[:n], *carry)[0],
                lambda carry: body(*values[n : n + m], *carry),
                values[n + m :],
            )
    options = {name: params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(runs(step.inner[0]), **options)(*values)


def _scan(step: Step, values: list[Any], given: Given, run: Run) -> Sequence[Any]:
    (program,), params = step.inner, step.params
    consts, carry, xs = compat.scan_operands(params, values)
    of_xs = program.inputs[len(program.inputs) - len(xs) :]
    origins = [x.origin for x in of_xs]
    cut = {site_path(o.path) for o in origins if o is not None and o.path}
    side = {key: x for key, x in given.items() if key[1] in cut}

    # Lists, as keys of dictionaries are sorted.
    def body(carry, own):
        own, of_sites = own
        inner = given | dict(zip(side, of_sites, strict=True))
        out = run(program, (*consts, *carry, *own), inner)
        return out[: len(carry)], out[len(carry) :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, ys = jax.lax.scan(body, carry, (xs, [*side.values()]), **options)
    return [*last, *ys]
