"""Runs a traced program with its products as sites, by themselves or in groups."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from loka_jax import compat
from loka_jax.chosen import Chosen
from loka_jax.group import Group, Member
from loka_jax.nn.batched import announce_batched
from loka_jax.nn.building import build_again
from loka_jax.nn.context import as_recipe, current
from loka_jax.nn.dense import as_matrix, run_planned, with_state
from loka_jax.nn.dense import product as dot
from loka_jax.nn.found_groups import Together, groups_of, why_in_no_group
from loka_jax.nn.found_layers import CASTS, Layer, Network
from loka_jax.nn.group import GroupPlan, plans_in_group, without_fp8_dlhs
from loka_jax.nn.host import Host, Key, Made
from loka_jax.nn.products import Product
from loka_jax.nn.program import Program, Step, Value
from loka_jax.nn.run_whole import run_whole, runs_by, why_as_written
from loka_jax.nn.sites import announce
from loka_jax.ops.device import local_device
from loka_jax.ops.group import run_group, why_not
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.run_site import SiteArrays
from loka_jax.recipe import Recipe
from loka_jax.site import BF16, SiteSpec


@runtime_checkable
class Rules(Protocol):
    """What a conversion does."""

    def recipe(self, path: str) -> str | Recipe:
        """Returns the recipe of a site."""
        ...

    @property
    def chosen(self) -> Mapping[str, Chosen]:
        """What runs at sites for which nobody chose, by path."""
        ...


def run_program(
    program: Program,
    arguments: Sequence[Any],
    rules: Rules,
    given: dict[Key, Any],
    made: Made | None = None,
) -> list[Any]:
    """Returns what a program returns, its products as sites.

    Args:
        program: in which `found_groups.find` was.
        arguments: of the program, its constants first.
        given: the variables of sites.
        made: takes the variables that are not given, where they are made.
    """
    run = _Run(program, rules, given, made)
    arrays = map(_as_array, arguments)
    run.values |= dict(zip(program.inputs, arrays, strict=True))
    run.run_in_order(program.steps)
    return [run.value(x) for x in program.outputs]


class _Run:
    """One run of a program, each step when its inputs are there."""

    def __init__(self, program: Program, rules: Rules, given: dict, made: Made | None):
        self.rules, self.given, self.made = rules, given, made
        self.values: dict[Value, Any] = {}
        self.plans: dict[Together, tuple[KernelPlan, ...]] = {}
        self.groups: dict[str, Group] = {}
        self.left: dict[Step, list[Product]] = {}
        self.of_step: dict[Step, Product | Together] = {}
        self.apart: dict[str, str] = {}
        products, groups = program.found
        self.products = products
        if made is not None:
            made.paths |= {x.name: None for x in products if x.inside is None}
        for each in products:
            if each.whole is not None and self._why_as_written(each) is None:
                self.of_step |= dict.fromkeys(each.whole.steps, each)
            elif each.left is not None or self._is_as_written(each.name):
                self.left.setdefault(each.place, []).append(each)
            else:
                steps = {each.step}.union(*(x.steps for x in each.fused))
                self.of_step |= dict.fromkeys(steps, each)
        for each in self._running(program, groups):
            self.of_step |= dict.fromkeys(each.steps, each)

    def _is_as_written(self, path: str) -> bool:
        """Returns True for a site that is fastest as written; Probe observes all."""
        chosen = self.rules.chosen.get(path)
        is_observed = current().observer is not None
        return chosen is not None and chosen.choice is None and not is_observed

    def _running(self, program: Program, groups: list[Together]) -> list[Together]:
        """Returns the groups that run as one operation; the others are announced."""
        running: list[Together] = []
        for possible in groups:
            members = [*possible.group.members]
            self.groups |= {x.path: possible.group for x in members}
            parts = [possible]
            plans = self._plans(possible)
            reasons = {
                member.path: own.why_apart
                for member, own in zip(members, plans, strict=True)
                if own.why_apart is not None
            }
            if reasons:
                some = [
                    y.product for x in possible.layers for y in x.sites if y.product
                ]
                parts = groups_of(program, [x for x in some if x.name not in reasons])
            for part in parts:
                own = tuple(x.plan for x in self._plans(part))
                reason = why_not(part.group, own)
                if reason is None:
                    self.plans[part] = own
                    running.append(part)
                else:
                    reasons |= {x.path: reason for x in part.group.members}
            joined = {x.path for part in running for x in part.group.members}
            alone = "the others of its group run apart"
            for path in (x.path for x in members if x.path not in joined):
                self.apart[path] = reasons.get(path, alone)
        return running

    def _plans(self, together: Together) -> list[GroupPlan]:
        members = [*together.group.members]
        recipes = [self.rules.recipe(x.path) for x in members]
        each = plans_in_group(together.group, members, recipes, None)
        layers = [layer for layer in together.layers for _ in layer.sites]
        return [
            self._as_chosen(layer, member, own)
            for own, layer, member in zip(each, layers, members, strict=True)
        ]

    def _as_chosen(self, layer: Layer, member: Member, own: GroupPlan) -> GroupPlan:
        chosen = self.rules.chosen.get(member.path)
        if self._is_as_written(member.path):
            return own._replace(why_apart="it runs as written")
        if own.why_apart is not None:
            return own._replace(why_apart=chosen.reason) if chosen is not None else own
        is_below_head = layer.is_below_head
        return own._replace(plan=without_fp8_dlhs(own.plan)) if is_below_head else own

    def value(self, x: Value) -> Any:
        """Returns a value, whose step runs first if it did not."""
        if x.constant is not None:
            return _as_array(x.constant)
        if x not in self.values:
            assert x.maker is not None
            self.run(x.maker)
            if x not in self.values:
                # Inside of a site or group: computed only for this reader.
                self._run_alone(x.maker)
        return self.values[x]

    def run_in_order(self, steps: Sequence[Step]) -> None:
        """Runs all steps; a group at its last one, or where others read it."""
        for step in steps:
            unit = self.of_step.get(step)
            if not isinstance(unit, Together):
                self.run(step)
            elif step.number == max(x.number for x in unit.steps):
                self.run(step)

    def run(self, step: Step) -> None:
        """Runs a step, or what it is part of."""
        if step.outputs and step.outputs[0] in self.values:
            return
        for product in self.left.get(step, ()):
            self._announce_left(product)
        unit = self.of_step.get(step)
        if isinstance(unit, Together):
            if not any(value in self.values for value, _ in unit.outputs):
                self._run_group(unit)
        elif unit is not None:
            if _end(unit) not in self.values:
                out = self._run_site(unit)
                self.values |= {x: _as(x, out) for x in self._forms(unit)}
        else:
            self._run_alone(step)

    def _forms(self, unit: Product) -> Iterator[Value]:
        """Yields what a site makes, and of what that is a cast within the site."""
        value = _end(unit)
        yield value
        while (s := value.maker) and s.name in CASTS and self.of_step.get(s) is unit:
            (value,) = s.inputs
            yield value

    def _run_alone(self, step: Step) -> None:
        values = [self.value(x) for x in step.inputs]
        run = self._run_inner if step.inner else _run_as_written
        self.values |= dict(zip(step.outputs, run(step, values), strict=True))

    def _host(self, product: Product) -> Host:
        recipe = self.rules.recipe(product.name)
        return Host(product.path, recipe, product.stack, self.given, self.made)

    def _announce_left(self, product: Product) -> None:
        plan = resolve(self._spec(product), BF16, local_device())
        batch = product.batch if product.batch > 1 else None
        told = self._told(product)
        told["left"] = product.left or told["default"]
        if product.whole is not None:
            told["left"] += f": {self._why_as_written(product)}"
        announce(self._host(product), plan, batch=batch, **told)

    def _spec(self, product: Product) -> SiteSpec:
        if product.left is not None:
            return product.spec
        return Layer(product.data, product, product.fused).spec

    def _run_site(self, product: Product) -> Array:
        """Returns what a site makes that runs by itself."""
        if product.whole is not None:
            return self._run_whole(product)
        step = product.step
        x, w = self.value(product.data), self.value(step.inputs[1])
        if product.fused:
            return self._run_fused(product, x, w)
        if product.is_stacked:
            return self._run_stacked(product, x, w)
        host, told = self._host(product), self._told(product)
        return dot(host, x, w, product.dims, *_options(step), **told)

    def _why_as_written(self, product: Product) -> str | None:
        """Returns why an operation that was found whole runs as written, or None."""
        assert product.whole is not None
        dtype = as_recipe(self.rules.recipe(product.name)).compute_dtype
        return why_as_written(product.whole, dtype)

    def _run_whole(self, product: Product) -> Array:
        """Returns the result of an operation that was found whole."""
        whole, recipe = product.whole, self.rules.recipe(product.name)
        assert whole is not None
        for part in self.products:
            if part.step in whole.steps:
                host = self._host(part)
                announce_batched(host, part.batch, part.spec, runs_by=runs_by(whole))
        return run_whole(whole, self.value, as_recipe(recipe).compute_dtype)

    def _told(self, product: Product) -> dict[str, Any]:
        """Returns what is announced of a site besides its plan."""
        path = product.name
        chosen = self.rules.chosen.get(path)
        group, reason = self.groups.get(path), self.apart.get(path)
        if group is None and product.left is None:
            reason = why_in_no_group(product)
        return dict(
            apart=product.apart,
            group=group,
            not_joined=reason,
            default=None if chosen is None else chosen.reason,
        )

    def _run_fused(self, product: Product, x: Array, w: Array) -> Array:
        """Returns a product after its own norm and activation."""
        host, layer = self._host(product), Layer(product.data, product, product.fused)
        (of_x, of_w), _ = product.dims
        rows, _ = as_matrix(x, of_x, contract_last=True)
        kernel, _ = as_matrix(w, of_w, contract_last=False)
        arrays = SiteArrays(rows, kernel, *self._vectors(layer))
        plan = current().plan(product.name, layer.spec, host.recipe, None)
        announce(host, plan, **self._told(product))
        out = run_planned(host, plan, arrays, epsilon=layer.epilogue.epsilon)
        assert isinstance(out, jax.Array)
        return out

    def _run_stacked(self, product: Product, x: Array, w: Array) -> Array:
        """Returns the products of layers that vmap stacked, each with its scales."""
        (of_x, of_w), ((batch_x,), (batch_w,)) = product.dims
        dims = (_without(of_x, batch_x), _without(of_w, batch_w)), ((), ())
        side = {key: v for key, v in self.given.items() if key[1] == product.path}
        host = self._host(product)
        stack = (*host.stack, product.batch)
        told = self._told(product) | {"count": product.batch}

        def one(x, w, own):
            given = dict(zip(side, own, strict=True))
            inner = dataclasses.replace(host, given=given, stack=stack)
            return dot(inner, x, w, dims, *_options(product.step), **told)

        axes = batch_x, batch_w, 0
        return jax.vmap(one, in_axes=axes)(x, w, [*side.values()])

    def _vectors(self, layer: Layer) -> list[Array | None]:
        """Returns the bias, gamma and beta of a layer, None for absent ones."""
        bias, norm = layer.part("bias"), layer.part("norm")
        own = (*(bias.vectors if bias else (None,)), *(norm.vectors if norm else ()))
        vectors = [None if v is None else self.value(v).reshape(-1) for v in own]
        return [*vectors, None, None][:3]

    def _run_group(self, together: Together) -> None:
        """Runs a group as one operation."""
        group, plans = together.group, self.plans[together]
        layers, states, rest = [], [], iter(plans)
        for layer in together.layers:
            parts = layer.parts if isinstance(layer, Network) else [layer.sites]
            arrays = []
            for own in parts:
                kernels: list[Array] = []
                for site in own:
                    assert site.product is not None
                    plan, host = next(rest), self._host(site.product)
                    kernels.append(self._kernel(site.product))
                    told = self._told(site.product) | {"group": group}
                    announce(host, plan, **told)
                    states.append(with_state(host, plan, kernels[-1])[1])
                vectors = self._vectors(own[-1] if own else layer)
                vectors = [v if v is None else v.astype(jnp.float32) for v in vectors]
                arrays.append(LayerArrays(tuple(kernels), *vectors))
            layers.append(tuple(arrays))
        inputs = tuple(
            (self.value(x).reshape(group.rows, -1),) for x in together.inputs
        )
        words = self._words(together)
        outs = run_group(group, plans, inputs, tuple(layers), states, words=words)
        of_number = dict(zip(group.outputs, outs, strict=True))
        for value, number in together.outputs:
            self.values[value] = _as(value, of_number[number])

    def _kernel(self, product: Product) -> Array:
        """Returns the float32 weight of a site as a matrix."""
        (_, of_rhs), _ = product.dims
        weight = self.value(product.kernel).astype(jnp.float32)
        return as_matrix(weight, of_rhs, contract_last=False)[0]

    def _words(self, together: Together) -> Array | None:
        """Returns the random bits of each layer, of the keys of the model's dropout."""
        drops = [layer.part("dropout") for layer in together.layers]
        if not any(drops):
            return None
        bits = [
            jnp.zeros(2, jnp.uint32)
            if drop is None or drop.vectors[0] is None
            else jax.random.bits(self.value(drop.vectors[0]), (2,), jnp.uint32)
            for drop in drops
        ]
        return jnp.stack(bits)

    def _run_inner(self, step: Step, values: list[Any]) -> Sequence[Any]:
        """Builds a step again, with the sites in the programs that it holds."""

        def run(program: Program, arguments: Sequence[Any], given: dict[Key, Any]):
            arguments = (*program.consts, *arguments)
            return run_program(program, arguments, self.rules, given, self.made)

        return build_again(step, values, self.given, run)


def _as(value: Value, out: Array) -> Array:
    """Returns an array in the shape and dtype of a value."""
    return out.reshape(value.shape).astype(value.aval.dtype)


def _as_array(x: Any) -> Any:
    """Returns JAX's array in place of NumPy's, which callers that do not trace give."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) and x.ndim else x


def _run_as_written(step: Step, values: list[Any]) -> Sequence[Any]:
    return compat.evaluate(step.eqn, values)


def _options(step: Step) -> tuple[Any, Any]:
    return step.params["precision"], step.params["preferred_element_type"]


def _without(dims: Sequence[int], batch: int) -> list[int]:
    """Returns dims of an array as those of its parts along another dim."""
    return [dim - (dim > batch) for dim in dims]


def _end(product: Product) -> Value:
    """Returns the value that a site makes where it runs by itself."""
    if product.whole is not None:
        return product.whole.end
    return product.fused[-1].end if product.fused else product.step.outputs[0]
