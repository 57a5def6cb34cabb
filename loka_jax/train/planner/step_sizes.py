"""The sizes of a training step of one GPU, and of a mesh of M x L of them."""

import dataclasses
from collections.abc import Iterator

from loka_jax.train.mesh.devices import group_counts

WIRE_BYTES = 2  # of a value: bfloat16
ID_BYTES = 4
SPARE = 1.05  # capacity over distinct ids


@dataclasses.dataclass(frozen=True)
class Mesh:
    """M replicas of L shards."""

    replicas: int
    shards: int

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"{self.replicas} x {self.shards}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A stack of tables, and its part in a step of one GPU.

    Attributes:
        rows: R.
        dim: D.
        row_bytes: of a row and its optimizer's state.
        value_bytes: of a value of a row.
        lookups: N.
        distinct: U.
        averaged: rows of a shard that a group touches from one average of groups to the
            next, with 1, 2, 4, ... shards; empty if groups do not average.
    """

    rows: int
    dim: int
    row_bytes: int
    lookups: int
    distinct: float
    value_bytes: int = 4
    averaged: tuple[float, ...] = ()

    @property
    def sent_ids(self) -> float:
        """K, the ids in this GPU's lists for the owners."""
        return SPARE * self.distinct

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps of a row."""
        return self.row_bytes - self.value_bytes * self.dim

    def rows_for_replicas(self, mesh: Mesh, average_every: int) -> float:
        """Returns the rows that this GPU gives to other replicas at a time."""
        if not average_every:
            return self.sent_ids
        touched = self.sent_ids
        if average_every > 1:  # a row once, of all devices and steps
            touched = SPARE * self.averaged[mesh.shards.bit_length() - 1]
        return min(touched, self.rows / mesh.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step of one GPU.

    Attributes:
        batch: examples of a GPU.
        gradient_bytes: of the dense gradients, float32.
        state_bytes: of dense parameters, optimizer state and gradients.
        activation_bytes: estimate of what the backward pass keeps.
        dense_us: time of the step without tables.
        steps_per_call: steps that share a call of the host.
        average_every: steps from one average of groups that update rows alone to the
            next; 0 if all groups get all gradients.
    """

    name: str
    batch: int
    stacks: tuple[Stack, ...]
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    dense_us: float
    steps_per_call: int = 1
    average_every: int = 0


def meshes(gpus: int) -> Iterator[Mesh]:
    """Yields all meshes of that many GPUs, those with the most shards first."""
    for replicas in group_counts(gpus):
        yield Mesh(replicas, gpus // replicas)
