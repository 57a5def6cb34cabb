"""The embedding tables of a model: how many rows each field has, and where they lie."""

import dataclasses
import itertools
from typing import Literal, get_args

Pooling = Literal["sum", "mean"]
POOLINGS = get_args(Pooling)
Storage = Literal["f32", "bf16"]
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}
_MOST_ROWS = 2**39  # that `row_order` has places for


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The tables of all fields, stacked in field order into one array.

    Attributes:
        dim: D, the embedding dim of all tables.
        pooling: how the rows of the last fields are pooled, whose ids come in lists;
            the fields before them have one id each.
        owners: the number of the field whose table each field uses; () if each has its
            own.
        storage: how the values of rows are kept.
        wide: of the last fields, as many are no inputs of the model, but of a wide part
            beside it.
    """

    rows: tuple[int, ...]
    dim: int
    pooling: tuple[Pooling, ...] = ()
    owners: tuple[int, ...] = ()
    storage: Storage = "f32"
    wide: int = 0

    def __post_init__(self):
        """Checks the ranges.

        Raises:
            ValueError: if a size is not positive, or there are too many rows.
        """
        if not self.rows or not all(rows > 0 for rows in self.rows):
            raise ValueError(
                f"rows={self.rows} must hold a positive number for each field."
            )
        if not len(self.pooling) <= len(self.rows):
            raise ValueError(f"{self.pooling=} has more entries than there are fields.")
        if self.owners and [self.rows[o] for o in self.owners] != [*self.rows]:
            raise ValueError(f"{self.owners=} must be fields with as many rows.")
        if any(self.owners[o] != o for o in self.owners):
            raise ValueError(f"{self.owners=}: an owner must own its table itself.")
        if not self.dim > 0:
            raise ValueError(f"dim={self.dim} must be positive.")
        if not self.total_rows < _MOST_ROWS:
            raise ValueError(
                f"{self.total_rows} rows in all are more than {_MOST_ROWS - 1}: hash "
                "the largest fields into fewer rows."
            )

    @property
    def dtype(self) -> str:
        """The name of the dtype of the array."""
        return _DTYPES[self.storage]

    @property
    def num_single(self) -> int:
        """The number of fields that have one id each."""
        return len(self.rows) - len(self.pooling)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each field's table."""
        first = tuple(itertools.accumulate(self._own_rows[:-1], initial=0))
        return tuple(first[owner] for owner in self.owners) if self.owners else first

    @property
    def total_rows(self) -> int:
        """R, the number of rows of all tables together."""
        return sum(self._own_rows)

    @property
    def _own_rows(self) -> tuple[int, ...]:
        """The rows of each field's table, 0 if it uses that of another field."""
        fields = range(len(self.rows))
        owners = self.owners or tuple(fields)
        return tuple(self.rows[f] if owners[f] == f else 0 for f in fields)


@dataclasses.dataclass(frozen=True)
class MixedTables:
    """Tables of several embedding dims: a stack for each dim.

    Attributes:
        fields: the numbers of each stack's fields among all, in ascending order.
        dim: D, the dim of the vectors that the model takes.
    """

    stacks: tuple[TableSpec, ...]
    fields: tuple[tuple[int, ...], ...]
    dim: int


type Tables = TableSpec | MixedTables


def with_dims(spec: TableSpec, dims: tuple[int, ...]) -> Tables:
    """Returns the tables of `spec` with the dim of each field in place of `spec.dim`.

    The same `spec` if it is that of all. Fields that share a table have the same.
    """
    if set(dims) == {spec.dim}:
        return spec
    groups = tuple(
        tuple(field for field, other in enumerate(dims) if other == dim)
        for dim in sorted(set(dims))
    )
    stacks = tuple(_part(spec, fields, dims[fields[0]]) for fields in groups)
    return MixedTables(stacks, groups, spec.dim)


def require_one_array(tables: Tables) -> None:
    """Checks that the rows of each stack fit in an array on one device.

    Raises:
        ValueError: if their numbers would not fit in int32.
    """
    stacks = (tables,) if isinstance(tables, TableSpec) else tables.stacks
    for stack in stacks:
        if not stack.total_rows < 2**31:
            raise ValueError(
                f"{stack.total_rows} rows in all do not fit in int32 ids of one device "
                f"(at most {2**31 - 1}): spread them over several with --mesh.shards, "
                "or hash the largest fields into fewer rows."
            )


def _part(spec: TableSpec, fields: tuple[int, ...], dim: int) -> TableSpec:
    """Returns the tables of some fields, with their own dim."""
    owners = spec.owners or tuple(range(len(spec.rows)))
    lists = [field - spec.num_single for field in fields if field >= spec.num_single]
    return TableSpec(
        rows=tuple(spec.rows[field] for field in fields),
        dim=dim,
        pooling=tuple(spec.pooling[place] for place in lists),
        owners=tuple(fields.index(owners[field]) for field in fields),
        storage=spec.storage,
    )
