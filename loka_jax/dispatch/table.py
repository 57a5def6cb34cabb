"""The measurements of candidates on one kind of device, as a readable JSON file.

Speed and error of every candidate are kept, so that limits can change without measuring
again. A table holds only for its schema, device, versions of libraries and the driver
up to patch versions, and sources that decide speed. Elsewhere it is ignored as a whole,
and never overwritten.
"""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
from collections.abc import Collection, Iterator
from typing import Annotated, Any

import msgspec

from loka_jax import jsonfile
from loka_jax.dispatch.header import Header
from loka_jax.measure.intervals import Interval
from loka_jax.measure.roofline import Roofline
from loka_jax.quality import MEASURES
from loka_jax.recipe import ROLES, Role
from loka_jax.site import Choice, SiteSpec
from loka_jax.terminal import clip

SCHEMA = 4
# A pass by itself, and within a chain of sites that hand their activations on in FP8:
# such an lhs comes in, such activations go out, or both.
ATTENTION = "attention"  # the forward pass of one, see `dispatch.attention`
PASSES = tuple(
    f"{name}{form}"
    for name in ("training", "inference")
    for form in ("", " in", " out", " in out")
) + (ATTENTION,)
_MAX_BYTES = 4 << 20
_MOST = 1 << 31

# Of a file.
Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


# By measure, of one product of a candidate.
type Errors = dict[str, Interval]
# By product and the name of a recipe that casts it so.
type RoleErrors = dict[Role, dict[str, Errors]]


@dataclasses.dataclass
class Entry:
    """The measurements of a site.

    Attributes:
        times: microseconds by pass ("training" is forward and backward) and candidate.
        errors: by source of the operands: run and site, as in
            "fp8_dlrm@0123456789ab top_mlp/dense_0" (`Config.source`).
        failures: of candidates that could not run, or were wrong; one sentence each.
        effects: by source, as `errors`, the relative change of the model's loss
            on held-out data if the forward product of this site alone is in FP8.
        refused: by source, why a site has no FP8: with it the whole plan raised the
            loss too much. Holds until the effect of this source is measured again.
    """

    times: dict[str, dict[Text, Positive]] = dataclasses.field(default_factory=dict)
    errors: dict[Text, RoleErrors] = dataclasses.field(default_factory=dict)
    failures: dict[Text, Text] = dataclasses.field(default_factory=dict)
    effects: dict[Text, Interval] = dataclasses.field(default_factory=dict)
    refused: dict[Text, Text] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class _Row(Entry):
    """An `Entry` in a file."""

    site: SiteSpec


@dataclasses.dataclass
class _File:
    schema: int
    header: Header
    roofline: Roofline | None
    sites: list[_Row]


@dataclasses.dataclass
class Table:
    """Entries by site, measured with the device, versions and sources of the header."""

    header: Header
    sites: dict[SiteSpec, Entry] = dataclasses.field(default_factory=dict)
    roofline: Roofline | None = None

    def merged(self, other: "Table") -> "Table":
        """Returns both tables in one; where both have a measurement, the other's.

        Raises:
            ValueError: if their devices, versions or sources differ.
        """
        why_not = other.header.why_not(self.header)
        if why_not is not None:
            raise ValueError(f"the tables cannot be merged: {why_not}.")
        sites = dict(self.sites)
        for key, entry in other.sites.items():
            old = sites.get(key, Entry())
            measured = set().union(*entry.times.values())
            sites[key] = Entry(
                {
                    name: old.times.get(name, {}) | entry.times.get(name, {})
                    for name in PASSES
                    if name in old.times or name in entry.times
                },
                old.errors | entry.errors,
                _without(old.failures, measured) | entry.failures,
                old.effects | entry.effects,
                _without(old.refused, entry.effects) | entry.refused,
            )
        header = self.header.filled(other.header)
        return Table(header, sites, other.roofline or self.roofline)


def _without(values: dict[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in names}


def write(path: pathlib.Path, table: Table):
    """Writes a table in one step: readers see the old one or the new one.

    Raises:
        ValueError: if it is larger than `read` accepts.
    """
    text = json.dumps(to_json(table), indent=1, allow_nan=False) + "\n"
    if len(text) > _MAX_BYTES:
        raise ValueError(
            f"{path} would be larger than {_MAX_BYTES >> 20} MiB: begin another table."
        )
    jsonfile.write_text(path, text)


def add(path: pathlib.Path, table: Table) -> Table:
    """Adds measurements to the table in a file, and returns all that are in it then.

    Several processes may add at once: one after another reads, merges and writes.

    Raises:
        ValueError: if the file is no valid table, was measured elsewhere, is too large,
            or cannot be locked.
    """
    with locked(path):
        if path.exists():
            table = read(path).merged(table)
        write(path, table)
    return table


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Excludes other processes that add to a table; waits for them.

    The lock is a file beside the table. It stays, because a process may wait for it.

    Raises:
        ValueError: if that file cannot be made or locked.
    """
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(lock, "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written, as {lock} cannot be locked "
                f"({error.strerror}): choose another file."
            ) from None
        yield


def to_json(table: Table) -> dict[str, Any]:
    """Returns the JSON value of a table."""
    rows = [_Row(site=key, **vars(table.sites[key])) for key in sorted(table.sites)]
    return msgspec.to_builtins(_File(SCHEMA, table.header, table.roofline, rows))


def read(path: pathlib.Path) -> Table:
    """Returns the table in a file.

    Raises:
        ValueError: if the file cannot be read, or is not a valid table.
    """
    try:
        value = jsonfile.read(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): name another file."
        ) from None
    try:
        return from_json(value)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a dispatch table ({str(error).removesuffix('.')}): name "
            "another file."
        ) from None


def from_json(value: Any) -> Table:
    """Returns the table in a JSON value.

    Raises:
        ValueError: if it is not in the format of `to_json`.
    """
    schema = jsonfile.as_dict(value).get("schema")
    if schema != SCHEMA:
        raise ValueError(f"its schema is {clip(schema)}, not {SCHEMA}.")
    file = jsonfile.typed(value, _File)
    if file.roofline is not None and min(vars(file.roofline).values()) <= 0:
        raise ValueError("a limit of its roofline is not positive.")
    sites: dict[SiteSpec, Entry] = {}
    for row in file.sites:
        fields = dict(vars(row))
        key = fields.pop("site")
        if not all(0 < size < _MOST for size in (key.m, key.k, key.n)):
            raise ValueError(f"site {key} has a size that no array has.")
        if key in sites:
            raise ValueError(f"site {key} occurs twice.")
        sites[key] = Entry(**fields)
        _require_known(sites[key])
    return Table(file.header, sites, file.roofline)


def _require_known(entry: Entry):
    """Raises ValueError for names or intervals that a table cannot have."""
    _require_among(entry.times, PASSES)
    # Only known providers and recipes, so that a file cannot name code.
    choices = {*entry.failures, *(x for times in entry.times.values() for x in times)}
    intervals = [*entry.effects.values()]
    for by_role in entry.errors.values():
        _require_among(by_role, ROLES, all_of_them=True)
        for by_recipe in by_role.values():
            choices |= {f"xla {recipe}" for recipe in by_recipe}
            for errors in by_recipe.values():
                _require_among(errors, MEASURES, all_of_them=True)
                intervals += errors.values()
    for name in choices:
        Choice.parse(name)
    for mean, low, high in intervals:
        if not low <= mean <= high:
            raise ValueError(f"the mean {mean} is not in its interval {low} to {high}.")


def _require_among(value: Collection, names: Collection, *, all_of_them: bool = False):
    if not set(value) <= set(names) or (all_of_them and len(value) < len(names)):
        raise ValueError(f"{clip(sorted(value))} are not {', '.join(names)}.")
