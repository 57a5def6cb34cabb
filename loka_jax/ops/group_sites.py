"""Products of a group's sites, whose scales the tails that follow apply.

An operand is written once, by the tail before it, in the forms that the products of
both passes read: in bfloat16, in FP8, and transposed in FP8. Its scale is known
beforehand, from earlier steps; its amax is a by-product of the pass.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8, triton, xla
from loka_jax.group import Group
from loka_jax.normed import Epilogue
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Products, read_state
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, Cast, Operand, Role
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Scale, Scaled, Tails, Written
from loka_jax.triton import tails
from loka_jax.xla.tails import decode, in_bf16

# The dims that the operands of a role's product contract.
_CONTRACTED: dict[Role, tuple[int, int]] = {
    "fwd": (1, 0),
    "dlhs": (1, 1),
    "drhs": (0, 0),
}
# The roles that read an operand, the first in the pass that writes it.
_READERS: dict[Operand, tuple[Role, ...]] = {
    "lhs": ("fwd", "drhs"),
    "rhs": ("fwd", "dlhs"),
    "g": ("dlhs", "drhs"),
}
# Of a product in FP8: what 1 stands for is 2^_UNIT_EXPONENT sqrt(k). Delayed scales put
# the amaxes of operands between 2^6.8 and 2^7.8, and so the root mean squares of lhs
# and rhs at 2^3 to 2^6: those of fwd are 2^-1 to 2^5 in this unit. Rows that are 30
# times smaller are still rounded with full precision. Those of g are at 2^0 to 2^6, as
# few examples have large gradients, and those of dlhs at 2^-2 to 2^7.
_UNIT_EXPONENT: dict[Role, int] = {"fwd": 7, "dlhs": 5}
# Sums of 32 products lose 2^-13 of the largest at each addition in the tensor cores'
# accumulators: over so many less than 2^-6, a quarter of the rounding to E4M3.
_MAX_FAST = 4096
# XLA writes all slices of an array below 1 KiB in one kernel, else each in its own.
_MOST_BYTES = 1023


def unit_of_fp8(role: Role, k: int) -> float:
    """Returns what 1 stands for in a product in FP8, see `_UNIT_EXPONENT`.

    Args:
        role: fwd or dlhs.
        k: the size that the product contracts, padded or not.
    """
    return 2.0 ** (_UNIT_EXPONENT[role] + int(math.log2(fp8.padded_size(k))) // 2)


def tails_of(implementation: triton.Implementation) -> Tails:
    """Returns the tails of a provider."""
    return xla.tails if implementation == "xla" else tails


class LayerArrays(NamedTuple):
    """The parameters of a layer of a group; None for absent ones.

    Attributes:
        kernels: float32 `(W,)`, or `(V, U)` of shapes (n, rank) and (rank, n) of a
            cross layer; () of a norm alone.
        bias: float32 `[n]`, added before the norm.
        gamma, beta: float32 `[n]`, of a "layer" or "rms" norm.
    """

    kernels: tuple[Float[Array, "k n"], ...] = ()
    bias: Float[Array, "n"] | None = None
    gamma: Float[Array, "n"] | None = None
    beta: Float[Array, "n"] | None = None


class GroupSite(NamedTuple):
    """The products of a site with the scales of its operands.

    Attributes:
        products: of the site.
        scales: of lhs, rhs and g from earlier steps; () without a state.
        gradient: the dtype in which drhs is written, see `Member`.
    """

    products: Products
    scales: tuple[Scale, ...]
    gradient: str

    def shape(self, operand: Operand) -> tuple[int, int]:
        """Returns rows and columns of an operand without padding."""
        spec = self.products.plan.spec
        m, k, n = spec.m, spec.k, spec.n
        return {"lhs": (m, k), "rhs": (k, n), "g": (m, n)}[operand]

    def forms(self, operand: Operand, *, keep: bool) -> Forms:
        """Returns the forms in which products read an operand.

        Args:
            operand: of the site.
            keep: for the backward pass, too, and measure the amax of what is cast.
        """
        readers = _READERS[operand] if keep else _READERS[operand][:1]
        casts: dict[Role, Cast | None] = {
            role: self.products.cast(role, operand) for role in readers
        }
        in_fp8: dict[Role, Cast] = {
            role: cast for role, cast in casts.items() if cast is not None
        }
        return Forms(
            bf16=len(in_fp8) < len(casts),
            fp8=next((cast.dtype for cast in in_fp8.values()), None),
            scale_inv=self.scales[OPERANDS.index(operand)] if in_fp8 else None,
            transposed=any(_contracted(role, operand) == 0 for role in in_fp8),
            amax=keep and bool(in_fp8),
            shape=self.shape(operand),
            padded=True,
        )

    def multiply(self, role: Role, first: Written, second: Written) -> Scaled:
        """Returns the product of a role: bfloat16, of drhs as `gradient` says."""
        dtype = jnp.dtype(self.gradient) if role == "drhs" else jnp.bfloat16
        gemm = self.products.recipe.gemm(role)
        if gemm is None:
            lhs, rhs = (
                _bf16_view(x, dim)
                for x, dim in zip((first, second), _CONTRACTED[role], strict=True)
            )
            options = dict(compute_dtype=jnp.bfloat16, out_dtype=dtype)
            return Scaled(xla.high_precision_matmul(lhs, rhs, **options))
        lhs, rhs = _fp8_views(role, first, second)
        is_fast = gemm.fast_accumulation
        out = xla.fp8_product(
            *(lhs.data, rhs.data), out_dtype=dtype, fast_accumulation=is_fast
        )
        return Scaled(out, (*lhs.scales, *rhs.scales))

    def weight_gradient(self, lhs: Written, g: Written) -> Array:
        """Returns drhs, in float32."""
        return xla.cut(decode(self.multiply("drhs", lhs, g)), self.shape("rhs"))

    def multiply_to_fp8(self, role: Role, first: Written, second: Written) -> Scaled:
        """Returns the product of a role in the FP8 format of its first operand.

        For what is only read element by element: one byte in place of two. Its scale
        needs no amax, see `_UNIT_EXPONENT`; values far beyond that saturate, which
        looks at operands measure (`dispatch.drift`).

        In high precision the product is bfloat16.
        """
        gemm = self.products.recipe.gemm(role)
        if gemm is None:
            return self.multiply(role, first, second)
        lhs, rhs = _fp8_views(role, first, second)
        k = lhs.data.shape[1]
        unit = unit_of_fp8(role, k)
        out = xla.fp8_product_to_fp8(
            *(lhs.data, rhs.data, 1 / unit),
            out_dtype=gemm.first.dtype,
            fast_accumulation=gemm.fast_accumulation or k <= _MAX_FAST,
        )
        return Scaled(out, (*lhs.scales, *rhs.scales), unit)

    def hand_on(
        self,
        first: Written,
        second: Written,
        want: Forms,
        bias: Array | None = None,
        *,
        has_relu: bool = False,
    ) -> Written | None:
        """Returns the activations of an inference as the next product reads them.

        The product writes them itself, in FP8; None where it or the next one runs in
        high precision.

        Args:
            first, second: the operands of fwd.
            want: the forms that are read.
            bias: float32; None if absent.
            has_relu: apply relu after the bias.
        """
        gemm, scale_inv = self.products.recipe.gemm("fwd"), want.scale_inv
        if gemm is None or want.bf16 or want.fp8 is None or scale_inv is None:
            return None
        lhs, rhs = _fp8_views("fwd", first, second)
        (of_lhs,), (of_rhs,) = lhs.scales, rhs.scales
        unscaled = None
        if bias is not None:
            padding = rhs.data.shape[0] - bias.size
            unscaled = jnp.pad(bias / of_lhs.value / of_rhs.value, (0, padding))
        factor = of_lhs.value / scale_inv.value * of_rhs.value
        out = xla.fp8_product_to_fp8(
            *(lhs.data, rhs.data, factor, unscaled),
            out_dtype=want.fp8,
            has_relu=has_relu,
            fast_accumulation=gemm.fast_accumulation,
        )
        return Written(fp8=out, scale_inv=scale_inv)


def cast(tails: Tails, x: Scaled, want: Forms) -> Written:
    """Returns an operand from a product, or from a matrix in high precision."""
    shape = want.shape_of(x.data)
    is_given = not x.scales and x.data.dtype == jnp.bfloat16
    is_given = is_given and x.data.shape == want.written_shape(shape)
    if want.fp8 is None:
        data = x.data if is_given else in_bf16(x)
        return Written(fp8.pad_to(data, want.written_shape(shape)))
    is_copied = want.bf16 and not is_given
    y, _ = tails.norm_tail(
        [x],
        epilogue=Epilogue("none"),
        want=dataclasses.replace(want, bf16=is_copied),
        xhat=None,
    )
    return y._replace(bf16=x.data) if want.bf16 and is_given else y


def weight(tails: Tails, site: GroupSite, kernel: Array, *, keep: bool) -> Written:
    """Returns the operand rhs from the float32 master weight."""
    return cast(tails, Scaled(kernel), site.forms("rhs", keep=keep))


def sites_of(
    group: Group,
    plans: Sequence[KernelPlan],
    states: Sequence[DelayedScaling | None],
) -> list[GroupSite]:
    """Returns the sites of a group with their plans and states."""
    scales: list[tuple[Scale, ...]] = [()] * len(plans)
    for joint in _joint_states(plans, states):
        for i, of_site in joint.scales():
            scales[i] = of_site
    products, gradients = map(Products.of, plans), (x.gradient for x in group.members)
    each = zip(products, scales, gradients, strict=True)
    return [GroupSite(*own) for own in each]


type _Amaxes = tuple[Array | None, Array | None, Array | None]


def next_states(
    plans: Sequence[KernelPlan],
    states: Sequence[DelayedScaling | None],
    amaxes: Sequence[_Amaxes],
) -> tuple[DelayedScaling | None, ...]:
    """Returns the gradients of the states.

    Args:
        plans, states: of the sites.
        amaxes: of parts of the operands (lhs, rhs, g) of each site, None where not
            measured.
    """
    gradients: list[DelayedScaling | None] = [None] * len(plans)
    for joint in _joint_states(plans, states):
        products = Products.of(plans[joint.sites[0]])
        parts = [x for i in joint.sites for x in amaxes[i]]
        tables = products.tables_after(joint.tables, parts)
        for i, table in zip(joint.sites, tables, strict=True):
            gradients[i] = DelayedScaling(table)
    return tuple(gradients)


class _JointStates(NamedTuple):
    """States of sites whose recipe is the same, in one array.

    A kernel on a state takes as long as its launch, and each site by itself would need
    several: the check of its table, the copy of each factor for the kernel that reads
    it, the maximum of amaxes, and the next table.

    Attributes:
        sites: their numbers.
        tables: float32, one a site, see `DelayedScaling`.
    """

    sites: tuple[int, ...]
    tables: Float[Array, "s 3 C"]

    def scales(self) -> Iterator[tuple[int, tuple[Scale, ...]]]:
        """Yields the number of each site with the scales of lhs, rhs and g."""
        vector = DelayedScaling(self.tables).scale_inv.reshape(-1)
        places = itertools.batched(range(vector.size), len(OPERANDS))
        for site, of_operands in zip(self.sites, places, strict=True):
            yield site, tuple(Scale(vector, at) for at in of_operands)


def _joint_states(
    plans: Iterable[KernelPlan], states: Sequence[DelayedScaling | None]
) -> Iterator[_JointStates]:
    """Yields the states of sites, without those that have none."""
    alike: dict[object, list[int]] = {}
    for i, (plan, state) in enumerate(zip(plans, states, strict=True)):
        state = read_state(plan.choice.recipe, state)
        if state is not None:
            # Not with states that vary over other axes of a mesh.
            axes = jax.typeof(state.table).mat.varying
            alike.setdefault((plan.choice.recipe, axes), []).append(i)
    for sites in alike.values():
        tables = {i: state.table for i in sites if (state := states[i]) is not None}
        together = max(1, _MOST_BYTES // tables[sites[0]].nbytes)
        for some in itertools.batched(sites, together):
            yield _JointStates(some, jnp.stack([tables[i] for i in some]))


def _contracted(role: Role, operand: Operand) -> int:
    return _CONTRACTED[role][ROLE_OPERANDS[role].index(operand)]


def _fp8_views(role: Role, first: Written, second: Written) -> list[Scaled]:
    """Returns the operands of a role as its product contracts them."""
    operands = zip((first, second), _CONTRACTED[role], strict=True)
    return [x.contracting(dim) for x, dim in operands]


def _bf16_view(x: Written, dim: int) -> Array:
    assert x.bf16 is not None
    return x.bf16 if dim == 1 else x.bf16.T
