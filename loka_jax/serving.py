"""Inference with the weights made ready once: cast, transposed, norms' constants.

What a model computes from its weights alone is the same for every batch. So its program
is cut in two:

    ready  = once(weights)                FP8 weights and their scales, and the like
    output = function(ready, *inputs)     all that depends on the inputs

Both do the operations of the model, in the same order. (XLA leaves out roundings to
bfloat16 between operations of one kernel, and so may round elsewhere than in a program
of the whole.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jaxtyping import Array

from loka_jax.nn import Model

# What an inner program is called by those primitives that only run it.
_INNER = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


class Folded(NamedTuple):
    """A function whose work on the weights alone is done.

    Attributes:
        ready: what it made of them.
        function: from `ready` and the inputs to the output.
    """

    ready: list[Array]
    function: Callable[..., Any]


class Served:
    """A model to be called with inputs of the shapes that it was made for."""

    def __init__(self, folded: Folded):
        """Takes the model with its weights made ready."""
        self.ready = folded.ready
        self._function = jax.jit(folded.function)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return sum(x.nbytes for x in self.ready)

    def __call__(self, *inputs: Any) -> Any:
        """Returns what the model does.

        Raises:
            ValueError: if the inputs have other shapes or dtypes than those given to
                `serve`, for which another plan may hold.
        """
        return self._function(self.ready, *inputs)


def serve(model: Model, variables: Mapping[str, Any], *inputs: Any) -> Served:
    """Returns a model for inference, its weights in the form that its sites read.

    In FP8, a weight is quantized once, and takes a quarter of its bytes. A plan for
    inference comes from `dispatch.plan.make_plan(..., roles=("fwd",))`:

        planned = nn.Planned(model, plan.choices)
        served = serve(planned, variables, dense, embeddings)
        logits = served(dense, embeddings)

    Args:
        model: a model, or a planned one.
        variables: of the model.
        inputs: of the shapes that will come; arrays or `jax.ShapeDtypeStruct`.
    """
    return Served(fold(model.apply, variables, *inputs))


def fold(function: Callable[..., Any], weights: Any, *inputs: Any) -> Folded:
    """Returns a function of (weights, *inputs) with its work on the weights done.

    What is larger than what it is made from, such as a bias repeated for every row, is
    made again at each call.

    Args:
        function: as `jax.jit` takes it; without side effects.
        weights: of which work is done now.
        inputs: arrays or `jax.ShapeDtypeStruct`.
    """
    program, out_tree = _trace(function, weights, inputs)
    leaves, wanted = jax.tree.leaves(weights), _shapes(jax.tree.leaves(inputs))
    parts = _cut(program.jaxpr, len(leaves))

    def once(*leaves):
        env = dict(zip(parts.weights, leaves, strict=True))
        _run(program, parts.once, env)
        return [env[var] for var in parts.ready]

    def later(ready, *given):
        given = jax.tree.leaves(given)
        if _shapes(given) != wanted:
            raise ValueError(
                f"inputs are {_shapes(given)}, and the weights were made ready for "
                f"{wanted}: make them ready for these shapes."
            )
        env = dict(zip(parts.ready, ready, strict=True))
        env |= dict(zip(parts.inputs, given, strict=True))
        _run(program, parts.later, env)
        outs = [_read(env, var) for var in program.jaxpr.outvars]
        return jax.tree.unflatten(out_tree, outs)

    return Folded(jax.jit(once)(*leaves), later)


def _trace(function, weights, inputs):
    """Returns the program of a function without inner ones, and its output's tree."""
    leaves, structure = jax.tree.flatten((weights, inputs))
    out_tree: Any = None

    def flat(*leaves):
        nonlocal out_tree
        own, rest = jax.tree.unflatten(structure, leaves)
        found, out_tree = jax.tree.flatten(function(own, *rest))
        return found

    shapes = _shapes(leaves)
    traced = jax.make_jaxpr(flat)(*shapes)
    # Traced again, for a weight's cast is often deep in an inner program.
    program = jax.make_jaxpr(lambda *x: _run_inlined(traced, *x))(*shapes)
    return program, out_tree


class _Parts(NamedTuple):
    """A program cut in two.

    Attributes:
        weights, inputs: its variables.
        once, later: equations in order; what depends on nothing is in both.
        ready: what goes from one to the other.
    """

    weights: Sequence[jex.Var]
    inputs: Sequence[jex.Var]
    once: list[jex.JaxprEqn]
    later: list[jex.JaxprEqn]
    ready: list[jex.Var]


def _cut(jaxpr: jex.Jaxpr, num_weights: int) -> _Parts:
    """Returns the parts of a program whose first variables are weights."""
    weights, inputs = jaxpr.invars[:num_weights], jaxpr.invars[num_weights:]
    of_weights, of_inputs = set(weights), set(inputs)
    once, later = [], set()
    for i, eqn in enumerate(jaxpr.eqns):
        read = set(_variables(eqn.invars))
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
        outs, read = set(eqn.outvars), set(_variables(eqn.invars))
        if needed & outs and _num_bytes(outs) > _num_bytes(read):
            later.add(i)
            needed = (needed - outs) | (read & of_weights)
    made = (var for _, eqn in once for var in eqn.outvars)
    return _Parts(
        weights,
        inputs,
        once=[eqn for _, eqn in once],
        later=[jaxpr.eqns[i] for i in sorted(later)],
        ready=[var for var in (*weights, *made) if var in needed],
    )


def _variables(atoms: Sequence[Any]) -> Iterator[jex.Var]:
    return (atom for atom in atoms if isinstance(atom, jex.Var))


def _num_bytes(variables: Iterable[jex.Var]) -> int:
    avals: list[Any] = [var.aval for var in variables]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def _run_inlined(program: jex.ClosedJaxpr, *arguments):
    """Returns what a program does, those that it calls run as parts of it."""
    env = dict(zip(program.jaxpr.invars, arguments, strict=True))
    _run(program, program.jaxpr.eqns, env, inline=True)
    return [_read(env, var) for var in program.jaxpr.outvars]


def _run(program: jex.ClosedJaxpr, eqns, env: dict, *, inline: bool = False):
    """Evaluates equations of a program into `env`."""
    env |= dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    for eqn in eqns:
        values = [_read(env, atom) for atom in eqn.invars]
        name = _INNER.get(eqn.primitive.name) if inline else None
        if name is not None:
            outs = _run_inlined(eqn.params[name], *values)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            outs = eqn.primitive.bind(*values, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env |= dict(zip(eqn.outvars, outs, strict=True))


def _read(env: Mapping[jex.Var, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]


def _shapes(values: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
