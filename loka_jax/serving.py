"""Inference with weights that are prepared once: cast, transposed, folded into norms.

Everything that a model computes from its weights alone is the same for every batch, so
its program is split in two:

    ready  = once(weights)                FP8 weights, their scales, and so on
    output = function(ready, *inputs)     all that depends on the inputs

Both run the operations of the model in the same order. (XLA omits roundings to bfloat16
between the operations of a kernel, and so may round at other places than in the whole
program.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import compat
from loka_jax.nn import Model, check_scales

# The parameter that holds the inner program of primitives that do nothing but run it.
_INNER = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


class Folded(NamedTuple):
    """A function with its computations on the weights alone already done.

    Attributes:
        ready: the results of these computations.
        function: computes the output from `ready` and the inputs.
        shapes: of the inputs' leaves.
    """

    ready: list[Array]
    function: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]


class Served:
    """A model for inference on inputs of given shapes."""

    def __init__(self, folded: Iterable[Folded]):
        """Takes the model with its weights prepared, for each shape of its inputs."""
        self.ready: list[Array] = []
        self._by_shapes = {}
        for one in folded:
            ready = [self.ready[keep(self.ready, x)] for x in one.ready]
            self._by_shapes[one.shapes] = ready, jax.jit(one.function)

    @property
    def num_bytes(self) -> int:
        """Bytes of the prepared weights."""
        return sum(x.nbytes for x in self.ready)

    def __call__(self, *inputs: Any) -> Any:
        """Returns the model's output.

        Raises:
            ValueError: if the inputs' shapes or dtypes are none of those given to
                `serve`; they may need another plan. If they are another structure,
                such as a dict of other keys.
        """
        shapes = tuple(map(_shape, jax.tree.leaves(inputs)))
        if shapes not in self._by_shapes:
            known = " or ".join(str([*known]) for known in self._by_shapes)
            raise ValueError(
                f"inputs are {[*shapes]}, but the weights were prepared for {known}: "
                "prepare them for these shapes."
            )
        ready, function = self._by_shapes[shapes]
        return function(ready, *inputs)


def keep(kept: list[Array], weight: Array) -> int:
    """Returns the place of a weight among those kept: an equal one's, or a new one."""
    for place, other in enumerate(kept):
        alike = (other.shape, other.dtype) == (weight.shape, weight.dtype)
        if alike and bool(jnp.array_equal(other, weight)):
            return place
    kept.append(weight)
    return len(kept) - 1


def serve(
    model: Model,
    variables: Mapping[str, Any],
    *inputs: Any,
    batch_sizes: Sequence[int] = (),
) -> Served:
    """Returns a model for inference, with the weights in the form that its sites read.

    An FP8 weight is quantized once and takes a quarter of its bytes; one under
    `nn.remat` or `nn.scan` of Flax stays as it is and is quantized in each call. A plan
    for inference comes from `dispatch.plan.make_plan(..., roles=("fwd",))`:

        planned = nn.Planned(model, plan.choices)
        served = serve(planned, variables, dense, embeddings, batch_sizes=(1, 128))
        logits = served(dense, embeddings)

    Args:
        inputs: arrays or `jax.ShapeDtypeStruct` of the shapes to be served.
        batch_sizes: leading dims of all inputs in place of their own; weights that
            several sizes read in one form are kept once. Scalars stay as they are.

    Raises:
        ValueError: if a delayed scale is no power of two, as after an average of
            variables; if the model has no `apply`, as those of NNX; if an input is no
            array.
    """
    if not hasattr(model, "apply"):
        raise ValueError(
            f"{type(model).__name__} is no Linen model: give one, or for NNX use "
            "`fold` as docs/serving.md shows."
        )
    check_scales(variables)
    inputs = jax.tree.map(_shape, inputs)

    def with_rows(rows: int) -> Any:
        return jax.tree.map(
            lambda x: x.update(shape=(rows, *x.shape[1:])) if x.shape else x, inputs
        )

    sizes = [with_rows(rows) for rows in batch_sizes] or [inputs]
    return Served(fold(model.apply, variables, *shapes) for shapes in sizes)


def fold(function: Callable[..., Any], weights: Any, *inputs: Any) -> Folded:
    """Returns a function of (weights, *inputs) with its computations on weights done.

    A result larger than its operands, such as a bias repeated for every row, is
    recomputed at each call.

    Args:
        function: a function that `jax.jit` accepts, without side effects.
        weights: the arguments that are known now.
        inputs: arrays or `jax.ShapeDtypeStruct`. The function returned refuses inputs
            of another structure, such as a dict of other keys, by a ValueError.
    """
    program, out_tree = _trace(function, weights, inputs)
    structure = jax.tree.structure(inputs)
    leaves, shapes = jax.tree.leaves(weights), map(_shape, jax.tree.leaves(inputs))
    of_weights = program.jaxpr.invars[: len(leaves)]
    of_inputs = program.jaxpr.invars[len(leaves) :]
    eqns_once, eqns_later, kept = _split(program.jaxpr, of_weights, of_inputs)

    def once(*leaves):
        env = dict(zip(of_weights, leaves, strict=True))
        _run(program, eqns_once, env)
        return [env[var] for var in kept]

    def later(ready, *inputs):
        inputs, given = jax.tree.flatten(inputs)
        if given != structure:
            raise ValueError(
                f"inputs are {given}, but the weights were prepared for {structure}: "
                "give them in this structure."
            )
        env = dict(zip((*kept, *of_inputs), (*ready, *inputs), strict=True))
        _run(program, eqns_later, env)
        outs = [_read(env, var) for var in program.jaxpr.outvars]
        return jax.tree.unflatten(out_tree, outs)

    return Folded(jax.jit(once)(*leaves), later, tuple(shapes))


def _trace(function, weights, inputs):
    """Returns a function's program, inner ones inlined, and its output's tree."""
    leaves, structure = jax.tree.flatten((weights, inputs))
    out_tree: Any = None

    def flat(*leaves):
        nonlocal out_tree
        weights, inputs = jax.tree.unflatten(structure, leaves)
        outputs, out_tree = jax.tree.flatten(function(weights, *inputs))
        return outputs

    shapes = [*map(_shape, leaves)]
    traced = jax.make_jaxpr(flat)(*shapes)
    # Traced again, because a weight's cast is often deep in an inner program.
    program = jax.make_jaxpr(lambda *x: _run_inlined(traced, *x))(*shapes)
    return program, out_tree


def _split(
    jaxpr: jex.Jaxpr, weights: Sequence[jex.Var], inputs: Sequence[jex.Var]
) -> tuple[list[jex.JaxprEqn], list[jex.JaxprEqn], list[jex.Var]]:
    """Returns the equations to run once, those to run later, and what passes between.

    Both lists are in order. Equations that depend on no input are in both.
    """
    of_weights, of_inputs = set(weights), set(inputs)
    once, later = [], set()
    for i, eqn in enumerate(jaxpr.eqns):
        read = _variables(eqn.invars)
        if eqn.effects or read & of_inputs:
            of_inputs |= set(eqn.outvars)
            later.add(i)
            continue
        once.append((i, eqn))
        if read & of_weights:
            of_weights |= set(eqn.outvars)
        else:
            later.add(i)
    read_later = [*(jaxpr.eqns[i].invars for i in later), jaxpr.outvars]
    needed = {v for atoms in read_later for v in _variables(atoms)} & of_weights
    for i, eqn in reversed(once):
        outs, read = set(eqn.outvars), _variables(eqn.invars)
        if needed & outs and _num_bytes(outs) > _num_bytes(read):
            later.add(i)
            needed = (needed - outs) | (read & of_weights)
    made = (var for _, eqn in once for var in eqn.outvars)
    return (
        [eqn for _, eqn in once],
        [jaxpr.eqns[i] for i in sorted(later)],
        [var for var in (*weights, *made) if var in needed],
    )


def _variables(atoms: Sequence[Any]) -> set[jex.Var]:
    return {atom for atom in atoms if isinstance(atom, jex.Var)}


def _num_bytes(variables: Iterable[jex.Var]) -> int:
    avals: list[Any] = [var.aval for var in variables]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def _run_inlined(program: jex.ClosedJaxpr, *arguments):
    """Returns a program's outputs, with the programs that it calls inlined."""
    env = dict(zip(program.jaxpr.invars, arguments, strict=True))
    _run(program, program.jaxpr.eqns, env, inline=True)
    return [_read(env, var) for var in program.jaxpr.outvars]


def _run(program: jex.ClosedJaxpr, eqns, env: dict, *, inline: bool = False):
    """Evaluates equations of a program, adding their results to `env`."""
    env |= dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    for eqn in eqns:
        values = [_read(env, atom) for atom in eqn.invars]
        name = _INNER.get(eqn.primitive.name) if inline else None
        if name is not None:
            outs = _run_inlined(eqn.params[name], *values)
        else:
            outs = compat.evaluate(eqn, values)
        env |= dict(zip(eqn.outvars, outs, strict=True))


def _read(env: Mapping[jex.Var, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise ValueError(
            f"{x!r} is no array: give arrays only, and bind other arguments in a "
            "function for `fold` as docs/serving.md shows."
        )
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
