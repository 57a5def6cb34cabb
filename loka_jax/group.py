"""Groups: sites that run together, as data.

A group computes values, matrices of the same rows. The first are its inputs; each layer
makes one more from one before it:

    Dense    y = drop(activation(gamma norm(x W + bias + residual) + beta)), or in
             another order of `normed`
    Cross    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, all layers of a network

The module that owns the sites announces their group; Dispatch decides for it as a
whole; `ops.group` runs it as one operation.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from loka_jax.normed import Epilogue
from loka_jax.recipe import Role
from loka_jax.site import SiteSpec


class Member(NamedTuple):
    """A site of a group.

    Attributes:
        path: its module path; distinct within the group.
        gradient: the dtype in which the gradient of its weight is written: float32, or
            bfloat16 where the model casts its weight to that.
    """

    path: str
    spec: SiteSpec
    gradient: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """A product and what follows it, or a norm alone.

    Attributes:
        reads: the number of the value x.
        member: the site of the product; None for a norm of x itself.
        norm: what follows, and in which order.
        residual: the number of a value that is added, or a factor; None without.
        dropout: the share of its activations that training drops.
        half: 0 or 1, the half of the product's columns that is normalized and
            activated; the other half is its factor. None for a whole product.
    """

    reads: int
    member: Member | None
    norm: Epilogue
    residual: int | None = None
    dropout: float = 0.0
    half: int | None = None

    @property
    def members(self) -> tuple[tuple[Member, ...], ...]:
        """The sites by product, nested as those of `Cross`."""
        return () if self.member is None else ((self.member,),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cross:
    """A cross network.

    Attributes:
        reads: the number of the value x_0.
        members: the sites of each layer: of V and U, or of W.
    """

    reads: int
    members: tuple[tuple[Member, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Sites that run together.

    Attributes:
        rows: of all values.
        inputs: the widths of the arrays whose columns, joined, are an input.
        layers: in an order in which they can run.
        outputs: the numbers of the values that are returned.
        head: the number of a value of which a head takes the product with a vector, or
            None.
    """

    rows: int
    inputs: tuple[tuple[int, ...], ...]
    layers: tuple[Dense | Cross, ...]
    outputs: tuple[int, ...]
    head: int | None = None

    @property
    def members(self) -> Iterator[Member]:
        """The sites, in the order of their layers."""
        return (x for layer in self.layers for x in _flat(layer))

    @property
    def values(self) -> range:
        """The numbers of all values."""
        return range(len(self.inputs) + len(self.layers))

    def readers(self, value: int) -> list[Member]:
        """Returns the sites whose products read a value."""
        layers = (layer for layer in self.layers if layer.reads == value)
        return [layer.members[0][0] for layer in layers if layer.members]

    def columns(self, value: int) -> int:
        """Returns the columns of a value; zeros follow the parts of an input."""
        if readers := self.readers(value):
            return readers[0].spec.k
        if value < len(self.inputs):
            return sum(self.inputs[value])
        layer = self.layers[value - len(self.inputs)]
        if isinstance(layer, Dense) and layer.member is not None:
            return layer.member.spec.n // (1 if layer.half is None else 2)
        return self.columns(layer.reads)

    def shape(self, value: int) -> tuple[int, int]:
        """Returns rows and columns of a value."""
        return self.rows, self.columns(value)

    def is_returned(self, value: int) -> bool:
        """Returns True if a value is read as it is: returned, added or normalized."""
        return value in self.outputs or any(
            isinstance(layer, Dense)
            and (layer.residual == value or (layer.reads == value and not layer.member))
            for layer in self.layers
        )

    def is_crossed(self, value: int) -> bool:
        """Returns True if a cross network reads or makes a value."""
        made = value - len(self.inputs)
        is_made = made >= 0 and isinstance(self.layers[made], Cross)
        reading = (layer for layer in self.layers if layer.reads == value)
        return is_made or any(isinstance(layer, Cross) for layer in reading)

    def layer_of(self, path: str) -> Dense | Cross:
        """Returns the layer that a site belongs to."""
        each = ((x.path, layer) for layer in self.layers for x in _flat(layer))
        return dict(each)[path]

    def follows(self, path: str) -> bool:
        """Returns True if a site alone reads what a site before it makes, unchanged."""
        layer = self.layer_of(path)
        made = layer.reads - len(self.inputs)
        if made < 0 or isinstance(layer, Cross) or len(self.readers(layer.reads)) > 1:
            return False
        before = self.layers[made]
        if isinstance(before, Cross) or before.dropout:
            return False
        if before.residual is not None or before.norm.order != "sum_norm_act":
            return False
        return before.member is not None

    def fp8_results(self, path: str) -> tuple[Role, ...]:
        """Returns the roles whose products only tails read, element by element.

        Where these run in FP8 they leave in it.
        """
        layer = self.layer_of(path)
        if isinstance(layer, Dense):
            return ("dlhs",) if self.is_crossed(layer.reads) else ()
        own = next(own for own in layer.members if path in {x.path for x in own})
        is_first, is_last = own[0].path == path, own[-1].path == path
        return ("fwd",) * is_last + ("dlhs",) * is_first


def _flat(layer: Dense | Cross) -> Iterator[Member]:
    return (x for own in layer.members for x in own)
