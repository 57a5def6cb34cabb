"""Routes the ids of each batch to the devices that hold their rows.

A step routes the ids (`exchange.route`) of the batch three steps later: a separate
program would cost the host a third of a step. Where a call takes several steps, step i
of a call routes the batch of step i of the call after the next. While the steps in
between run, the host reads how long the lists are. A batch whose lists do not fit is
routed again by a separate program, with a larger capacity, so that a step always sees
all of its rows. Routing also computes what all devices must agree on before the step:
the weight of the whole batch and the number of bad ids.
"""

import collections
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from loka_jax.data import Batch, Position
from loka_jax.data.batch import event_rows
from loka_jax.ops import exchange
from loka_jax.ops.exchange import Routed
from loka_jax.ops.joint_collectives import gather_all, swap
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.train import tasks
from loka_jax.train.mesh.devices import (
    AXES,
    BATCH,
    SHARD,
    map_shards,
    order_of,
    shardings,
)
from loka_jax.train.tables import lookup
from loka_jax.train.tables.stacks import by_stack, regroup, split
from loka_jax.triton import Implementation

_LEAST = 16  # places in a list
# So that lists of rows of any number of bytes begin at multiples of 16 bytes: NCCL is
# slow where they do not (NVIDIA/nccl issue 413).
_MULTIPLE = 16
_GROWTH = 1.05
_CLIMB = 1.5
_AHEAD = 3  # steps; with fewer the host waits for the last that it launched


class Counts(NamedTuple):
    """Counts of a batch that all devices need, or those of a device's part of it.

    Attributes:
        need: the length of the longest list of any device, by stack.
        bad_ids: number of ids out of range.
        weight: of the examples; [T] of several tasks.
    """

    need: Any
    bad_ids: Int[Array, ""]
    weight: Float[Array, ""] | Float[Array, "T"]


class RoutedBatch(NamedTuple):
    """The result of routing a batch, which its step takes; routes are by stack."""

    routes: Any
    counts: Counts

    @property
    def missing(self) -> list[Any]:
        """Places that the longest list of each stack needs beyond its capacity."""
        need = self.counts.need
        return jax.tree.leaves(jax.tree.map(operator.sub, need, self.capacity))

    @property
    def capacity(self) -> Any:
        """The places of a list, for each stack."""
        return jax.tree.map(
            lambda route: route.asked.shape[1], self.routes, is_leaf=_is_routed
        )


class Routing(NamedTuple):
    """The routed batch of a step, and the part of the step in routing a later one.

    Attributes:
        batch: the routed batch.
        counts: of the later batch, of this device; after the step those of all devices
            along axis 0.
        asked: the lists that this device asks of others for the later batch; after the
            step those that others ask of it.
        before: after the step, the rows that `RowSync` averages as they were.
    """

    batch: RoutedBatch
    counts: Any = ()
    asked: Any = ()
    before: Any = None

    @property
    def bad_ids(self) -> Int[Array, ""]:
        """Number of ids of the batch out of range."""
        return self.batch.counts.bad_ids

    @property
    def total_weight(self) -> Float[Array, ""] | Float[Array, "T"]:
        """Weight of the examples of the batch; [T] of several tasks."""
        return self.batch.counts.weight


_EVERYWHERE: Any = P()
SPECS: Any = RoutedBatch(BATCH, _EVERYWHERE)


def routed_specs(count: int) -> tuple[Any, P]:
    """Returns the partition specs of `with_needs`."""
    return (SPECS,) * count, _EVERYWHERE


def routed_shardings(mesh: Mesh, count: int) -> tuple[Any, NamedSharding]:
    """Returns the shardings of `with_needs` on a mesh."""
    on_host = NamedSharding(mesh, _EVERYWHERE, memory_kind="pinned_host")
    return shardings(mesh, (SPECS,) * count), on_host


def with_needs(routed: Sequence[RoutedBatch]) -> tuple[tuple[RoutedBatch, ...], Any]:
    """Returns what a program that routes batches returns: them, and all `need`s."""
    needs = jax.tree.map(lambda *x: jnp.stack(x), *(one.counts.need for one in routed))
    return tuple(routed), needs


def lists_asked(routes: Any) -> list[Array]:
    """Returns the lists `asked` of every stack."""
    return [route.asked for route in jax.tree.leaves(routes, is_leaf=_is_routed)]


def routed_batch(routes: Any, arrived: list[Array], each: Counts) -> RoutedBatch:
    """Returns a routed batch from what devices have exchanged.

    Args:
        arrived: the lists that other devices ask this one for, by stack.
    """
    rest = iter(arrived)
    routes = jax.tree.map(
        lambda route: route._replace(asked=next(rest)), routes, is_leaf=_is_routed
    )
    need = jax.tree.map(lambda x: jnp.max(x, axis=0), each.need)
    bad, weight = (jnp.sum(x, axis=0, dtype=x.dtype) for x in each[1:])
    return RoutedBatch(routes, Counts(need, bad, weight))


def capacity_for(need: float, most: int) -> int:
    """Returns the capacity for lists of about `need` places.

    It leaves room for four standard deviations, if each list holds any of many ids
    independently of the others, and comes from a geometric ladder of multiples of 16,
    so that runs alike compile the same programs.

    Args:
        most: no list is longer.
    """
    room = max((need + 4 * math.sqrt(need)) / _LEAST, 1.0)
    rung = math.ceil(math.log(room, _GROWTH) - 1e-9)
    return min(math.ceil(_LEAST * _GROWTH**rung / _MULTIPLE) * _MULTIPLE, most)


class Router:
    """Routes batches, and remembers how long lists must be.

    Attributes:
        capacity: the places of a list, for each stack.
        climbs: how often a list did not fit, after the first batch.
    """

    def __init__(
        self,
        mesh: Mesh,
        tables: Tables,
        implementation: Implementation | None = None,
        steps_per_call: int = 1,
    ):
        """Prepares a program that routes a batch when it first runs."""
        self._most = by_stack(
            lambda spec: order_of(spec).places // mesh.shape[SHARD], tables
        )
        self.capacity: Any = by_stack(lambda _: _LEAST, tables)
        self.climbs = 0
        self._has_routed = False
        self._ahead = max(_AHEAD, 2 * steps_per_call)
        self._coming: collections.deque[_Coming] = collections.deque(
            maxlen=self._ahead + steps_per_call
        )
        self._spent: list[tuple[int | None, RoutedBatch]] = []
        self._tables = tables
        self._implementation: Implementation | None = implementation
        self.sharding = shardings(mesh, BATCH)

        def route(capacity: Any, batch: Batch) -> Any:
            def routed(batch: Batch) -> Any:
                routes, counts = self.part(capacity, batch)
                arrived = swap(lists_asked(routes), SHARD)
                each = gather_all(counts, AXES)
                return with_needs([routed_batch(routes, arrived, each)])

            return map_shards(routed, mesh, BATCH, routed_specs(1))(batch)

        self._run = jax.jit(
            route,
            static_argnums=0,
            in_shardings=self.sharding,
            out_shardings=routed_shardings(mesh, 1),
        )

    def put(self, batch: Batch) -> Batch:
        """Returns a batch spread over the devices, itself if it is."""
        leaves = jax.tree.leaves(batch)
        if all(getattr(x, "sharding", None) == self.sharding for x in leaves):
            return batch
        return jax.device_put(batch, self.sharding)

    def look_ahead(
        self, batches: Iterable[tuple[Position, Batch]]
    ) -> Iterator[tuple[Position, Batch]]:
        """Yields each batch after the router has taken those that steps look ahead."""
        waiting: collections.deque[tuple[Position, Batch]] = collections.deque()
        for position, batch in batches:
            self._coming.append(_Coming(batch, self.put(batch)))
            waiting.append((position, batch))
            if len(waiting) > self._ahead:
                yield waiting.popleft()
        yield from waiting

    def __call__(self, batch: Batch) -> tuple[Batch, RoutedBatch]:
        """Returns a batch on its devices, and the routed batch."""
        coming = self._find(batch)
        while coming.routed is None or not self._fits(coming):
            self._route_alone(coming)
        self._has_routed = True
        return coming.placed, coming.routed

    def together(
        self, batches: Sequence[Batch]
    ) -> tuple[tuple[Batch, ...], tuple[RoutedBatch, ...]]:
        """Returns batches on their devices, and routed with the same capacity."""
        while True:
            placed, routed = zip(*map(self, batches), strict=True)
            if all(x.capacity == self.capacity for x in routed):
                return placed, routed

    def run(
        self, program: Callable, state: dict[str, Any], batches: Sequence[Batch]
    ) -> tuple[dict[str, Any], Any]:
        """Returns the parts of the state after a step on each batch, and `before`.

        Args:
            program: by `programs.train_program`; it also routes later batches, those of
                `batches` again if none is known.
        """
        placed, routed = self.together(batches)
        followers = self._followers(batches)
        coming = tuple(x.placed for x in followers) or placed
        spent = tuple(map(self._take_spent, placed))
        state, before, (later, needs) = program(state, placed, routed, coming, spent)
        # Later steps may write over them.
        self._spent += zip(map(event_rows, placed), routed, strict=True)
        for one in self._coming:
            if any(one.batch is batch for batch in batches):
                one.routed = None
        for i, one in enumerate(followers):
            one.routed, one.needs, one.place = later[i], needs, i
        return state, before

    def _take_spent(self, placed: Batch) -> RoutedBatch:
        """Returns a routed batch that no step needs any more, to write over.

        It is that of a former step, or `placed` routed again, if there is none.
        """
        former = [x for x in self._spent if x[1].capacity == self.capacity]
        self._spent = former[-2 * self._ahead :]
        for i, (rows, routed) in enumerate(self._spent):
            if rows == event_rows(placed):
                del self._spent[i]
                return routed
        return self._route_alone(_Coming(placed, placed))

    def part(self, capacity: Any, batch: Batch) -> tuple[Any, Counts]:
        """Returns the routes of a device's part of a batch, by stack, and its counts.

        To be run under a `shard_map`. The lists `asked` are not exchanged yet.
        """

        def one(spec: TableSpec, part: Batch, capacity: int):
            order = order_of(spec)
            places, bad = lookup.places(spec, part, order)
            how: Any = (places, order, capacity, SHARD)
            return *exchange.route(*how, implementation=self._implementation), bad

        routed = by_stack(one, self._tables, split(self._tables, batch), capacity)
        routes, need, bad = regroup(self._tables, routed)
        weight = jnp.sum(tasks.labels_and_weights(batch)[1], axis=0)
        return routes, Counts(need, jax.tree.reduce(jnp.add, bad), weight)

    def _route_alone(self, coming: "_Coming") -> RoutedBatch:
        """Routes a batch by a separate program."""
        (routed,), needs = self._run(self.capacity, coming.placed)
        coming.routed, coming.needs, coming.place = routed, needs, 0
        return routed

    def _find(self, batch: Batch) -> "_Coming":
        matches = (x for x in self._coming if x.batch is batch)
        return next(matches, None) or _Coming(batch, self.put(batch))

    def _followers(self, batches: Sequence[Batch]) -> list["_Coming"]:
        """Returns the batches that the steps of `batches` route.

        They are none if the router has not taken batches so far ahead, or if they have
        other numbers of rows, as those of an event log may: each pair of these would be
        a program.
        """
        newest = len(self._coming) - 1 - self._ahead
        if newest < 0 or self._coming[newest].batch is not batches[-1]:
            return []
        found = list(self._coming)[-len(batches) :]
        alike = [event_rows(one.batch) for one in found] == [*map(event_rows, batches)]
        return found if alike else []

    def _fits(self, coming: "_Coming") -> bool:
        """Returns whether all lists fit; raises the capacity if they do not."""
        assert coming.routed is not None
        need, capacity = coming.need(), coming.routed.capacity
        if any(jax.tree.leaves(jax.tree.map(operator.gt, need, capacity))):
            self.capacity = jax.tree.map(self._enough, need, self.capacity, self._most)
            self.climbs += self._has_routed
            return False
        # Routed before the last climb: steps of both capacities would take turns.
        return capacity == self.capacity

    def _enough(self, need: Any, capacity: int, most: int) -> int:
        if need <= capacity:
            return capacity
        least = _CLIMB * capacity if self._has_routed else 0.0
        return capacity_for(max(float(need), least), most)


@dataclasses.dataclass
class _Coming:
    """A batch that is to come.

    Attributes:
        batch: as the host has it.
        placed: the same on its devices.
        routed: the same, routed, once it is.
        needs: the `need` of all batches that the same program has routed, along axis 0,
            in the host's memory: reading one from a device takes 0.3 ms.
        place: of this batch along that axis.
    """

    batch: Batch
    placed: Batch
    routed: RoutedBatch | None = None
    needs: Any = None
    place: int = 0

    def need(self) -> Any:
        """Returns the length of the longest list, by stack, once the program has it."""
        return jax.tree.map(lambda x: np.asarray(x)[self.place], self.needs)


def _is_routed(x: Any) -> bool:
    return isinstance(x, Routed)
