"""What follows a product: the equations of its tails, their operands and results.

A tail runs in one pass over matrices of M rows and N columns. It takes products whose
scales were not applied yet, and writes its result in the forms that later products
read. Hopper's FP8 tensor cores contract the last dim of both operands, so the weight
gradient, which contracts the rows, reads the transposes: these are FP8 forms, too.

    cross     y = x0 * (z_1 + ... + z_p + bias)
    backward  u = x0 * (d_1 + ... + d_p)    dbias = sum over rows of u
    at last   dx0 = d_0 + sum over l of d_l * s_l    s_l = 1 + z_1 + ... + z_l

    head      dots = y w, the product of a row and a vector
    backward  the gradient of y is e w^T, of which e is that of the dots

    norm      y = drop(activation(gamma norm(z + bias + r) + beta)), or in another order
    backward  the gradient dz of the product, from dy = d_1 + ... + d_p

FP8 is written under a scale that is known before the pass: stored from earlier steps,
or the bound that a norm gives. The amax, for the next step's scale, is a by-product.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from loka_jax.fp8 import E4M3, padded_size
from loka_jax.normed import NO_VECTORS, Epilogue, NormVectors


@struct.dataclass
class Scale:
    """A scale where it lies: an entry of a float32 vector."""

    vector: Float[Array, "s"]
    at: int = struct.field(pytree_node=False, default=0)

    @classmethod
    def of(cls, value: Float[Array, ""]) -> "Scale":
        """Returns a scale that was computed by itself."""
        return cls(value.reshape(1))

    @property
    def value(self) -> Float[Array, ""]:
        """The scale by itself."""
        return self.vector[self.at]


@struct.dataclass
class Scaled:
    """A matrix that stands for `data` times a unit and its scales.

    Attributes:
        data: bfloat16, as of an FP8 product that was not scaled; FP8; or float32. It
            may be padded with zeros.
        scales: two at most, applied one after the other.
        unit: a power of two; 1 without scales.
    """

    data: Float[Array, "m n"]
    scales: tuple[Scale, ...] = ()
    unit: float = struct.field(pytree_node=False, default=1.0)


@struct.dataclass
class Outer:
    """The matrix `column row^T`, which is never written.

    Attributes:
        column, row: float32.
    """

    column: Float[Array, "m"]
    row: Float[Array, "n"]


@struct.dataclass
class Dropout:
    """Which elements of a result are 0: of row i and column j those with u_ij < rate.

    u is that of `unbiased.uniform`; the others are divided by 1 - rate. The backward
    pass draws it again.

    Attributes:
        words: uint32, of a step and layer.
        rate: the share that is 0, above 0 and below 1.
    """

    words: UInt32[Array, "2"]
    rate: float = struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forms:
    """The forms in which a matrix is written.

    Attributes:
        bf16: in bfloat16.
        fp8: in this FP8 format; None for no such form. Values beyond the scale
            saturate, NaN stays NaN.
        scale_inv: the scale of the FP8 form; None without one.
        transposed: the FP8 form's transpose too.
        amax: the largest magnitude before the cast, for delayed scaling.
        shape: rows and columns of the matrix, where operands were padded; None if none
            was.
        padded: pad every form, and what else is as large, with zeros to sizes that FP8
            products take.
    """

    bf16: bool = True
    fp8: DTypeLike | None = None
    scale_inv: Scale | None = None
    transposed: bool = False
    amax: bool = False
    shape: tuple[int, int] | None = None
    padded: bool = False

    def shape_of(self, operand: Float[Array, "r c"]) -> tuple[int, int]:
        """Returns rows and columns of the matrix that is computed from an operand."""
        rows, columns = operand.shape if self.shape is None else self.shape
        return rows, columns

    def written_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape in which a matrix of this shape is written."""
        rows, columns = shape
        return (padded_size(rows), padded_size(columns)) if self.padded else shape


class Written(NamedTuple):
    """A matrix in the forms that were asked for; None for others.

    Products read FP8 K-major: the matrix where they contract its columns, else the
    transpose.

    Attributes:
        bf16: in bfloat16.
        fp8, fp8_t: in FP8, and the transpose of that.
        scale_inv: the scale of both.
        amaxes: float32, of p parts of the matrix; their maximum is its amax.
    """

    bf16: Float[Array, "m n"] | None = None
    fp8: Float[Array, "m n"] | None = None
    fp8_t: Float[Array, "n m"] | None = None
    scale_inv: Scale | None = None
    amaxes: Float[Array, "p"] | None = None

    def contracting(self, dim: int) -> Scaled:
        """Returns the FP8 operand of a product that contracts dim 0 or 1."""
        data = self.fp8 if dim == 1 else self.fp8_t
        assert data is not None and self.scale_inv is not None
        return Scaled(data, (self.scale_inv,))


class CrossTail(NamedTuple):
    """The outputs of a cross tail, `y = x0 * s` with s a sum, each way.

    Attributes:
        y: the product, in the requested forms.
        row_sum: float32, the sum of y over its rows; None if not requested.
        dots: float32, the products of its rows and a head; None without one.
    """

    y: Written
    row_sum: Float[Array, "n"] | None
    dots: Float[Array, "m"] | None


class TailResiduals(NamedTuple):
    """What the forward pass of a norm tail keeps for the backward pass.

    Attributes:
        xhat: the normalized rows, in E4M3 under `normed.xhat_scale_inv` or in bfloat16;
            without a norm the activation's input, if there is no `product`.
        rstd: as in `normed.Normed`.
        product: of which, with the bias, an activation was taken: nothing is written.
        factor: what the result was multiplied with.
    """

    xhat: Float[Array, "m n"] | None = None
    rstd: Float[Array, "..."] | None = None
    product: Scaled | None = None
    factor: Scaled | None = None


class NormTailGradients(NamedTuple):
    """The outputs of the backward pass of a norm tail.

    Attributes:
        dz: gradient of z, in the requested forms.
        vectors: float32 gradients of bias, gamma and beta, where these are given.
        residual: bfloat16, of a factor, or of what is added behind the activation and
            before the norm; of another residual it is dz or dy.
    """

    dz: Written
    vectors: NormVectors
    residual: Float[Array, "m n"] | None = None


@runtime_checkable
class Tails(Protocol):
    """What runs tails: `xla.tails` and `triton.tails`, where each is described."""

    def norm_tail(
        self,
        summands: Sequence[Scaled],
        vectors: NormVectors = NO_VECTORS,
        dropout: Dropout | None = None,
        *,
        epilogue: Epilogue,
        want: Forms,
        xhat: DTypeLike | None = E4M3,
    ) -> tuple[Written, TailResiduals | None]:
        """Returns what follows a product, its first summand, and residuals."""
        ...

    def norm_tail_backward(
        self,
        gradients: Sequence[Scaled],
        residuals: TailResiduals,
        vectors: NormVectors = NO_VECTORS,
        dropout: Dropout | None = None,
        *,
        epilogue: Epilogue,
        want: Forms,
    ) -> NormTailGradients:
        """Returns the gradients of z and the vectors."""
        ...

    def cross_tail(
        self,
        summands: Sequence[Scaled | Outer],
        x0: Scaled,
        bias: Float[Array, "n"] | None = None,
        head: Float[Array, "n"] | None = None,
        *,
        want: Forms,
        has_row_sum: bool = False,
    ) -> CrossTail:
        """Returns `x0 * (z_1 + ... + z_p + bias)`."""
        ...

    def cross_gradient(
        self,
        gradients: Sequence[Sequence[Scaled | Outer]],
        products: Sequence[Scaled],
        biases: Sequence[Float[Array, "n"] | None],
        x0: Scaled | None = None,
        *,
        parts: Sequence[jax.ShapeDtypeStruct],
        shape: tuple[int, int],
    ) -> tuple[tuple[Float[Array, "m _"], ...], Float[Array, "n"] | None]:
        """Returns the gradient of each part of x0, and of a head."""
        ...

    def joined_cast(self, *parts: Float[Array, "m _"], want: Forms) -> Written:
        """Returns the columns of all parts, then zeros."""
        ...
