"""A traced program as steps and values: who reads a value, and what it comes from.

A value that depends on variables alone, through casts, transposes, reshapes or slices,
is a weight; its `origin` is the path of the variable. All others are data.

Calls of `jit` that contain products, or cut a value as GLU does, are inlined. Steps of
`scan`, `cond`, `while` and `remat` with products hold programs of their own.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import Tracer

from loka_jax import compat

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_CALLS = ("jit", "pjit", "closed_call", "core_call")
_PARTS = ("slice", "dynamic_slice", "gather", "squeeze", "reshape", "transpose")
_BUILT_AGAIN = ("scan", "cond", "while", "remat2", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a value comes from that depends on no data.

    Attributes:
        path: of a variable; None for constants of the program.
        stack: lengths of the scans that cut the variable into steps, outermost first.
    """

    path: tuple[str, ...] | None = None
    stack: tuple[int, ...] = ()


CONSTANT = Origin()


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program.

    Attributes:
        aval: shape and dtype.
        origin: None for data.
        constant: of a literal.
        maker: the step that makes it; None for an input or literal.
        readers: the steps that read it, each once.
        is_output: of its program.
        is_extra: an output that may be computed again, as written, by itself: nothing
            of the whole program reads it, and its caller may not, either.
        following: what `follow` found behind it, by its number of leading dims.
    """

    aval: Any
    origin: Origin | None = None
    constant: Any = None
    maker: "Step | None" = None
    readers: list["Step"] = dataclasses.field(default_factory=list)
    is_output: bool = False
    is_extra: bool = False
    following: dict[int, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def stays(self) -> bool:
        """True for an output that no site or group can have inside."""
        return self.is_output and not self.is_extra

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.aval.shape


@dataclasses.dataclass(eq=False)
class Step:
    """An equation.

    Attributes:
        number: its place in the program.
        inner: the programs in it, where they contain products.
        scope: names of the modules around it.
        before: the steps that it depends on, as bits by number, itself included.
    """

    eqn: Any
    number: int
    inputs: list[Value]
    outputs: list[Value]
    inner: "tuple[Program, ...]" = ()
    scope: str = ""
    before: int = 0

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of its primitive."""
        return self.eqn.params


@dataclasses.dataclass(eq=False)
class Program:
    """A program, its steps in an order in which they can run.

    Attributes:
        inputs: the values of its constants and arguments.
        consts: the constants.
        found: its products and groups, once `found_groups.find` was there.
    """

    inputs: list[Value]
    steps: list[Step]
    outputs: list[Value]
    consts: Sequence[Any] = ()
    found: Any = None


def has_products(jaxpr: Any) -> bool:
    """Returns True if there is a product anywhere in a jaxpr."""
    return any(
        eqn.primitive.name in PRODUCTS
        or any(has_products(inner) for inner in jex.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def read_program(
    jaxpr: Any, origins: Sequence[Origin | None], consts: Sequence[Any] = ()
) -> Program:
    """Returns the program of a jaxpr.

    Args:
        origins: of its constants and arguments.
        consts: its constants.
    """
    program = _read_program(jaxpr, origins, "", consts)
    _mark_extra(program, [True for _ in program.outputs])
    return program


def _read_program(
    jaxpr: Any, origins: Sequence[Origin | None], scope: str, consts: Sequence[Any]
) -> Program:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    inputs = [Value(v.aval, o) for v, o in zip(variables, origins, strict=True)]
    for value, x in zip(inputs, consts, strict=False):
        value.constant = None if isinstance(x, Tracer) else x
    steps: list[Step] = []
    env = dict(zip(variables, inputs, strict=True))
    outputs = _read(jaxpr, env, steps, scope)
    for value in outputs:
        value.is_output = True
    return Program(inputs, _alive(steps), outputs, consts)


def _alive(steps: list[Step]) -> list[Step]:
    """Returns the steps whose results are used; the others read nothing any more."""
    alive: list[Step] = []
    for step in reversed(steps):
        is_read = any(x.readers or x.is_output for x in step.outputs)
        if is_read or step.eqn.effects or not step.outputs:
            alive.append(step)
            continue
        for x in step.inputs:
            if step in x.readers:
                x.readers.remove(step)
    return alive[::-1]


def _mark_extra(program: Program, are_extra: Sequence[bool]) -> None:
    for value, is_extra in zip(program.outputs, are_extra, strict=True):
        value.is_extra = is_extra
    for value, is_extra in zip(program.outputs, are_extra, strict=True):
        value.is_extra &= is_extra  # of one that is returned twice
    for step in program.steps:
        unread = [_is_unread(x) for x in step.outputs]
        if step.name == "scan" and step.inner:
            _, carry, _ = compat.scan_operands(step.params, step.inputs)
            unread[: len(carry)] = [False for _ in carry]
        elif step.name in ("cond", "while"):
            unread = [False for _ in unread]
        for inner in step.inner:
            _mark_extra(inner, unread[: len(inner.outputs)])


def _read(jaxpr: Any, env: dict, steps: list[Step], scope: str) -> list[Value]:
    def value(atom) -> Value:
        if isinstance(atom, jex.Literal):
            return Value(atom.aval, CONSTANT, constant=atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        own = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        inputs = [value(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        inner = [*jex.jaxprs_in_params(eqn.params)]
        if name in _CALLS and len(inner) == 1 and _is_inlined(inner[0]):
            (call,), consts = inner, _consts(eqn)
            local = dict(zip(call.constvars, consts, strict=True))
            local |= dict(zip(call.invars, inputs, strict=True))
            outputs = _read(call, local, steps, own)
        elif name == "dot_general" and _is_turned(inputs):
            turned = _data_first(eqn)
            local = dict(zip(turned.invars, inputs, strict=True))
            outputs = _read(turned, local, steps, own)
        elif name == "transpose":
            outputs = [_transposed(eqn, inputs[0], steps, own)]
        else:
            outputs = _new_step(eqn, inputs, steps, own)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _is_inlined(jaxpr: Any) -> bool:
    cuts = any(eqn.primitive.name == "split" for eqn in jaxpr.eqns)
    return cuts or has_products(jaxpr)


def _new_step(eqn: Any, inputs: list[Value], steps: list[Step], scope: str):
    step = _step(eqn, inputs, len(steps), scope)
    steps.append(step)
    return step.outputs


def _is_turned(inputs: Sequence[Value]) -> bool:
    """Returns True for a product of a weight and data, as einsum may write it."""
    is_weight = [x.origin is not None and x.origin.path is not None for x in inputs]
    return is_weight == [True, False]


def _data_first(eqn: Any) -> Any:
    """Returns the jaxpr of a product with data first, its result as it was."""
    params = dict(eqn.params)
    dims, batch = params.pop("dimension_numbers")
    first = len(batch[0])
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]

    def turned(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.lax.dot_general(x, w, (dims[::-1], batch[::-1]), **params)
        free = y.ndim - first - (w.ndim - first - len(dims[0]))
        last = range(first + free, y.ndim)
        return jax.lax.transpose(y, (*range(first), *last, *range(first, first + free)))

    jaxpr = jax.make_jaxpr(turned)(*(x.aval for x in eqn.invars)).jaxpr
    info = eqn.source_info.replace(name_stack=type(eqn.source_info.name_stack)())
    return jaxpr.replace(eqns=[x.replace(source_info=info) for x in jaxpr.eqns])


def _transposed(eqn: Any, x: Value, steps: list[Step], scope: str) -> Value:
    """Returns a value transposed; twice is once, or not at all."""
    order = eqn.params["permutation"]
    if x.maker is not None and x.maker.name == "transpose":
        order = tuple(x.maker.params["permutation"][i] for i in order)
        (x,) = x.maker.inputs
        eqn = eqn.replace(params={"permutation": order})
    if order == tuple(range(len(order))):
        return x
    return _new_step(eqn, [x], steps, scope)[0]


def _consts(eqn: Any) -> list[Value]:
    closed = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    consts = getattr(closed, "consts", ())
    return [Value(jax.typeof(x), None, constant=x) for x in consts]


def _step(eqn: Any, inputs: list[Value], number: int, scope: str) -> Step:
    origin = _joint_origin([x.origin for x in inputs])
    outputs = [Value(v.aval, origin) for v in eqn.outvars]
    step = Step(eqn, number, inputs, outputs, scope=scope, before=1 << number)
    for x in inputs:
        if step not in x.readers:
            x.readers.append(step)
        if x.maker is not None:
            step.before |= x.maker.before
    for y in outputs:
        y.maker = step
    if eqn.primitive.name in _BUILT_AGAIN:
        step.inner = _inner_programs(eqn, [x.origin for x in inputs], scope)
    return step


def _is_unread(value: Value) -> bool:
    """Returns True for what the whole program returns, or parts of, and never reads."""
    return not value.stays and all(
        step.name in _PARTS and all(map(_is_unread, step.outputs))
        for step in value.readers
    )


def _joint_origin(origins: Sequence[Origin | None]) -> Origin | None:
    """Returns the origin of what a step makes: of a kernel, if it reads one."""
    known = [x for x in origins if x is not None]
    if len(known) < len(origins):
        return None
    named = [x for x in known if x.path is not None]
    kernels = [x for x in named if x.path and x.path[-1] == "kernel"]
    return next(iter([*kernels, *named]), CONSTANT)


def _inner_programs(eqn: Any, origins: list, scope: str) -> tuple[Program, ...]:
    """Returns the programs in a step that is built again, if they contain products."""
    jaxprs = [*jex.jaxprs_in_params(eqn.params)]
    if not any(map(has_products, jaxprs)):
        return ()
    match eqn.primitive.name:
        case "scan":
            consts, carry, xs = compat.scan_operands(eqn.params, origins)
            length = eqn.params["length"]
            of_step = [_cut(x, length) for x in xs]
            given = [[*consts, *(None for _ in carry), *of_step]]
        case "cond":
            given = [origins[1:]] * len(jaxprs)
        case "while":
            n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            carry = [None] * (len(origins) - n - m)
            given = [[*origins[:n], *carry], [*origins[n : n + m], *carry]]
        case _:
            given = [origins]
    closed = compat.closed_jaxprs(eqn.params)
    return tuple(
        _read_program(
            *(x.jaxpr, [*(None for _ in x.jaxpr.constvars), *own], scope, x.consts)
        )
        for x, own in zip(closed, given, strict=True)
    )


def _cut(origin: Origin | None, length: int) -> Origin | None:
    if origin is None or origin.path is None:
        return origin
    return dataclasses.replace(origin, stack=(*origin.stack, length))


def flops(step: Step) -> int:
    """Returns the FLOPs of a product, two a multiplication."""
    lhs, rhs, out = step.inputs[0].shape, step.inputs[1].shape, step.outputs[0].shape
    if step.name != "dot_general":
        # Of a convolution: each output reads all of the kernel but its features.
        spec = getattr(step.params.get("dimension_numbers"), "rhs_spec", (-1,))
        features = rhs[spec[0]]
        return 2 * math.prod(out) * math.prod(rhs) // max(1, features)
    (contracted, _), _ = step.params["dimension_numbers"]
    return 2 * math.prod(out) * math.prod(lhs[i] for i in contracted)


def hidden_products(step: Step) -> Iterator[tuple[Any, int]]:
    """Yields products in a step that is not built again, and how often they run."""
    if step.inner:
        return
    yield from _hidden(step.eqn, 1, is_inside=False)


def _hidden(eqn: Any, times: int, *, is_inside: bool) -> Iterator[tuple[Any, int]]:
    if eqn.primitive.name in PRODUCTS and is_inside:
        yield eqn, times
    times *= eqn.params["length"] if eqn.primitive.name == "scan" else 1
    for jaxpr in jex.jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from _hidden(inner, times, is_inside=True)


def trace(
    function: Callable, variables: Any
) -> tuple[Any, list[tuple[Any, ...]], Callable[[Sequence[Any]], Any]]:
    """Returns the jaxpr of a function of variables, their paths, and how to rebuild.

    What the function returns besides arrays is kept as it is.
    """
    kept: list[Any] = []

    def arrays(variables):
        leaves, tree = jax.tree.flatten(function(variables))
        is_array = [isinstance(x, jax.Array) or hasattr(x, "dtype") for x in leaves]
        static = [None if a else x for a, x in zip(is_array, leaves, strict=True)]
        kept.append((tree, is_array, static))
        return [x for a, x in zip(is_array, leaves, strict=True) if a]

    closed = jax.make_jaxpr(arrays)(variables)
    paths = [
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        for path, _ in jax.tree_util.tree_leaves_with_path(variables)
    ]

    def rebuild(outputs: Sequence[Any]) -> Any:
        tree, is_array, static = kept[-1]
        rest = iter(outputs)
        leaves = [next(rest) if a else x for a, x in zip(is_array, static, strict=True)]
        return jax.tree.unflatten(tree, leaves)

    return closed, paths, rebuild
