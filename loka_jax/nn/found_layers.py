"""The layers of groups that are found in a program."""

import dataclasses
import math
from typing import Any

from loka_jax.fp8 import SIZE_MULTIPLE
from loka_jax.nn.follow import Following
from loka_jax.nn.products import Product, order_of, uncast
from loka_jax.nn.program import Step, Value
from loka_jax.normed import Epilogue
from loka_jax.site import SiteSpec

CASTS = ("convert_element_type",)


@dataclasses.dataclass(eq=False)
class Layer:
    """A layer of a group in a program: a product and what follows, or a norm alone."""

    reads: Value
    product: Product | None
    follows: list[Following]

    @property
    def result(self) -> Value:
        """The value that it makes."""
        if self.follows:
            return self.follows[-1].end
        assert self.product is not None
        return self.product.step.outputs[0]

    @property
    def sites(self) -> "list[Layer]":
        """The layer of each product."""
        return [] if self.product is None else [self]

    @property
    def inner(self) -> list[Value]:
        """What it makes and reads itself."""
        return []

    @property
    def steps(self) -> set[Step]:
        """The equations that it stands for."""
        own = set() if self.product is None else {self.product.step}
        return own.union(*(x.steps for x in self.follows))

    def part(self, kind: str) -> Following | None:
        """Returns what of a kind follows, or None."""
        return next((x for x in self.follows if x.kind == kind), None)

    @property
    def residual(self) -> Value | None:
        """The value that is added, or a factor; None without."""
        found = self.part("residual") or self.part("factor")
        return None if found is None else found.vectors[0]

    @property
    def dropout(self) -> float:
        """The share of its result that is dropped."""
        found = self.part("dropout")
        return 0.0 if found is None else found.rate

    @property
    def half(self) -> int | None:
        """The half of its product that is activated, the other one its factor."""
        found = self.part("gate")
        return None if found is None else found.half

    @property
    def epilogue(self) -> Epilogue:
        """Its norm and activation, and their order."""
        norm, act = self.part("norm"), self.part("activation") or self.part("gate")
        norm_name: Any = "none" if norm is None else norm.name
        activation: Any = "none" if act is None else act.name
        epsilon = 1e-6 if norm is None else norm.epsilon
        order = order_of([x.kind for x in self.follows])
        assert order is not None
        return Epilogue(norm_name, activation, epsilon, order)

    @property
    def spec(self) -> SiteSpec:
        """The site of its product, with its norm and activation."""
        assert self.product is not None
        return dataclasses.replace(
            self.product.spec,
            norm=self.epilogue.norm,
            activation=self.epilogue.activation,
            use_bias=self.part("bias") is not None,
        )

    @property
    def is_below_head(self) -> bool:
        """True if a product too narrow for FP8 reads the result, with no norm."""
        if self.part("norm") is not None:
            return False
        result = uncast(self.result)
        readers = [*result.readers]
        for step in result.readers:
            if step.name in CASTS:
                readers += step.outputs[0].readers
        return any(
            step.name == "dot_general" and step.outputs[0].shape[-1:] < (SIZE_MULTIPLE,)
            for step in readers
        )

    @property
    def rows(self) -> int:
        """The rows of its result."""
        for layer in self.sites:
            assert layer.product is not None
            return layer.product.spec.m
        return math.prod(self.reads.shape[:-1])


@dataclasses.dataclass(eq=False)
class Network(Layer):
    """A cross network: layers `x_{l+1} = x_0 * (W_l x_l + b_l) + x_l`.

    Attributes:
        parts: the products of each layer, of V and U or of W.
        sums: the last step of each.
    """

    parts: list[list[Layer]] = dataclasses.field(default_factory=list)
    sums: list[Following] = dataclasses.field(default_factory=list)

    @property
    def result(self) -> Value:
        """The features after the last layer."""
        return self.sums[-1].end

    @property
    def sites(self) -> list[Layer]:
        """The layer of each product."""
        return [x for own in self.parts for x in own]

    @property
    def inner(self) -> list[Value]:
        """What it makes and reads itself."""
        between = [x.result for own in self.parts for x in own[:-1]]
        return [*between, *(x.end for x in self.sums[:-1])]

    @property
    def steps(self) -> set[Step]:
        """The equations that it stands for."""
        return set().union(*(x.steps for x in (*self.sites, *self.sums)))
