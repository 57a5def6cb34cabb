"""The options of the embedding tables: `--embedding.dim 32`."""

import dataclasses
from typing import Literal

from loka_jax.ops.tables import POOLINGS, Pooling, Storage
from loka_jax.options import pairs, require

_MAX_DIM = 4096
_DIMS = f"in 1..{_MAX_DIM}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """The embedding tables.

    Attributes:
        dim: dimension of every embedding vector that the model takes.
        dims: "COLUMN=8" gives the table of a column vectors of another dimension, which
            a learned linear map takes to `dim`; columns that share the table follow.
        pooling: how the rows of a multi-valued column become one vector: "sum" or
            "mean" for all of them, "COLUMN=mean" for one; the default is "mean". Values
            with weights get the weighted sum or mean.
        crosses: "A*B=1000" gives each pair of values of two columns a weight in the
            logit, in a table of so many rows; one of them may hold lists.
        init_stddev: standard deviation of their initial values.
        dtype: how rows are kept: "f32", or "bf16" in half the memory. They are updated
            in float32, and so is what their optimizer keeps, and are rounded
            stochastically.
        implementation: "xla" to use XLA only; None to update the rows by kernels where
            they apply.
    """

    dim: int = 16
    dims: tuple[str, ...] = ()
    pooling: tuple[str, ...] = ()
    crosses: tuple[str, ...] = ()
    init_stddev: float = 0.01
    dtype: Storage = "f32"
    implementation: Literal["xla"] | None = None

    def __post_init__(self):  # noqa: D105
        require(1 <= self.dim <= _MAX_DIM, "--embedding.dim", self.dim, _DIMS)
        stddev = self.init_stddev
        require(0 <= stddev < 10, "--embedding.init-stddev", stddev, "in [0, 10)")

    def dims_of(
        self, columns: tuple[str, ...], owners: tuple[str, ...] = ()
    ) -> dict[str, int]:
        """Returns the dim of each column's table.

        Args:
            owners: the column whose table each uses; () if each has its own.

        Raises:
            ValueError: for an entry that is not one of a column with a table.
        """
        owners = owners or columns
        own = pairs("--embedding.dims", self.dims, tuple(dict.fromkeys(owners)))
        for column, dim in own.items():
            is_dim = dim.isdecimal() and 1 <= int(dim) <= _MAX_DIM
            require(is_dim, f"--embedding.dims {column}", dim, _DIMS)
        dims = (int(own.get(owner, self.dim)) for owner in owners)
        return dict(zip(columns, dims, strict=True))

    def pooling_of(self, multi: tuple[str, ...]) -> tuple[Pooling, ...]:
        """Returns the pooling of each multi-valued column.

        Raises:
            ValueError: for an entry that is neither a pooling nor one of a column.
        """
        common = [entry for entry in self.pooling if entry in POOLINGS]
        single = tuple(entry for entry in self.pooling if entry not in POOLINGS)
        own = pairs("--embedding.pooling", single, multi)
        default = common[-1] if common else "mean"
        chosen = tuple(own.get(column, default) for column in multi)
        for pooling in chosen:
            require(pooling in POOLINGS, "--embedding.pooling", pooling, "sum or mean")
        return chosen
