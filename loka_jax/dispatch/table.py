"""The measurements of candidates on one kind of device, as a readable JSON file.

Speed and error of every candidate are kept, so that limits can change without measuring
again. A table holds only for its schema, device, versions of libraries and the driver
up to patch versions, and sources that decide speed. Elsewhere it is ignored as a whole,
and never overwritten.

A change of these sources may leave all programs as they are. So a table keeps the
digests of its candidates' programs, and `experiments/restamp.py` compares them.
"""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import re
from collections.abc import Callable, Collection, Iterator
from reprlib import repr as short
from typing import Any, get_args

from loka_jax import jsonfile
from loka_jax.dispatch.fields import fields, items, mapping, number, positive, text
from loka_jax.dispatch.header import Header
from loka_jax.measure.intervals import Interval
from loka_jax.measure.roofline import Roofline
from loka_jax.normed import ActivationName, NormName
from loka_jax.quality import MEASURES
from loka_jax.recipe import ROLES, Role
from loka_jax.site import Choice, SiteSpec

SCHEMA = 3
# A pass by itself, and within a chain of sites that hand their activations on in FP8:
# such an lhs comes in, such activations go out, or both.
PASSES = tuple(
    f"{name}{form}"
    for name in ("training", "inference")
    for form in ("", " in", " out", " in out")
)
# A table's sites have no form of input or output: those are passes.
_SITE_FIELDS = ("m", "k", "n", "norm", "activation", "use_bias")
_ENTRY_FIELDS = ("site", "times", "errors", "failures", "effects", "programs")
_OPTIONAL_FIELDS = ("refused",)
_MAX_BYTES = 4 << 20
_MAX_SIZE = 1 << 31
_DIGEST = re.compile("[0-9a-f]{16}")


class BadTable(ValueError):
    """The error of an invalid table: one sentence with the file and the reason."""


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
        programs: by candidate, the digest of the programs of all its passes.
        refused: by source, why a site has no FP8: with it the whole plan raised the
            loss too much. Holds until the effect of this source is measured again.
    """

    times: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, RoleErrors] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    effects: dict[str, Interval] = dataclasses.field(default_factory=dict)
    programs: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def passes(self) -> dict[str, Collection[str]]:
        """Returns the passes that were timed, by candidate."""
        candidates = {name for times in self.times.values() for name in times}
        return {
            name: [pass_ for pass_, times in self.times.items() if name in times]
            for name in sorted(candidates)
        }


@dataclasses.dataclass
class Table:
    """Entries by site, measured with the device, versions and sources of the header.

    Attributes:
        header: what the table holds for.
        sites: the measurements.
        roofline: of the device; None if it was not measured.
    """

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
            times = {
                name: old.times.get(name, {}) | entry.times.get(name, {})
                for name in PASSES
                if name in old.times or name in entry.times
            }
            failures = {
                name: why
                for name, why in (old.failures | entry.failures).items()
                if name in entry.failures or not _is_measured(name, entry)
            }
            sites[key] = Entry(
                times,
                old.errors | entry.errors,
                failures,
                old.effects | entry.effects,
                old.programs | entry.programs,
                _still_refused(old, entry) | entry.refused,
            )
        header = self.header.filled(other.header)
        return Table(header, sites, other.roofline or self.roofline)


def _still_refused(old: Entry, new: Entry) -> dict[str, str]:
    return {
        source: why for source, why in old.refused.items() if source not in new.effects
    }


def _is_measured(name: str, entry: Entry) -> bool:
    return any(name in times for times in entry.times.values())


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
        BadTable: if the file is not a valid table.
        ValueError: if it was measured elsewhere, is too large, or cannot be locked.
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
    return {
        "schema": SCHEMA,
        "header": dataclasses.asdict(table.header),
        "roofline": table.roofline and dataclasses.asdict(table.roofline),
        "sites": [
            {
                "site": {name: getattr(key, name) for name in _SITE_FIELDS},
                "times": entry.times,
                "errors": {
                    source: {
                        role: {
                            name: {m: list(e) for m, e in errors.items()}
                            for name, errors in by_name.items()
                        }
                        for role, by_name in by_role.items()
                    }
                    for source, by_role in entry.errors.items()
                },
                "failures": entry.failures,
                "effects": {
                    source: list(effect) for source, effect in entry.effects.items()
                },
                "programs": entry.programs,
                "refused": entry.refused,
            }
            for key, entry in sorted(table.sites.items())
        ],
    }


def read(path: pathlib.Path) -> Table:
    """Returns the table in a file.

    Raises:
        BadTable: if the file cannot be read, or is not a valid table.
    """
    try:
        return from_json(jsonfile.read(path, max_bytes=_MAX_BYTES))
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise BadTable(f"{path} is not a dispatch table: {error}") from None


def from_json(value: Any) -> Table:
    """Returns the table in a JSON value.

    Raises:
        ValueError: if it is not in the format of `to_json`.
    """
    value = fields(value, ("schema", "header", "roofline", "sites"))
    if value["schema"] != SCHEMA:
        raise ValueError(f"schema {short(value['schema'])} is not {SCHEMA}.")
    header = {k: text(v) for k, v in _header_fields(value["header"]).items()}
    sites: dict[SiteSpec, Entry] = {}
    for item in items(value["sites"]):
        item = fields(item, _ENTRY_FIELDS, _OPTIONAL_FIELDS)
        key = _site(item["site"])
        if key in sites:
            raise ValueError(f"site {key} occurs twice.")
        sites[key] = Entry(
            times=_times(item["times"]),
            errors=_pairs(item["errors"], text, _errors),
            failures=_pairs(item["failures"], _choice, text),
            effects=_pairs(item["effects"], text, _interval),
            programs=_pairs(item["programs"], _choice, _hex),
            refused=_pairs(item.get("refused", {}), text, text),
        )
    return Table(Header(**header), sites, _roofline(value["roofline"]))


def _header_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a header; old ones lack versions."""
    all_fields = dataclasses.fields(Header)
    optional = [x.name for x in all_fields if x.default is not dataclasses.MISSING]
    required = {x.name for x in all_fields} - set(optional)
    return fields(value, required, optional)


def _roofline(value: Any) -> Roofline | None:
    if value is None:
        return None
    names = [field.name for field in dataclasses.fields(Roofline)]
    limits = {k: positive(v) for k, v in fields(value, names).items()}
    return Roofline(**limits | {"sms": int(limits["sms"])})  # pyright: ignore


def _site(value: Any) -> SiteSpec:
    value = fields(value, _SITE_FIELDS)
    for name in ("m", "k", "n"):
        size = value[name]
        if type(size) is not int or not 0 < size < _MAX_SIZE:
            raise ValueError(f"{name}={short(size)} is not a size.")
    if value["norm"] not in get_args(NormName):
        raise ValueError(f"norm {short(value['norm'])} is unknown.")
    if value["activation"] not in get_args(ActivationName):
        raise ValueError(f"activation {short(value['activation'])} is unknown.")
    if type(value["use_bias"]) is not bool:
        raise ValueError(f"use_bias={short(value['use_bias'])} is no boolean.")
    return SiteSpec(**value)


def _pairs[T](
    value: Any, key: Callable[[Any], str], item: Callable[[Any], T]
) -> dict[str, T]:
    """Returns an object with each name checked by `key`, each value by `item`."""
    return {key(k): item(v) for k, v in mapping(value).items()}


def _times(value: Any) -> dict[str, dict[str, float]]:
    by_pass = {}
    for pass_name, times in mapping(value).items():
        if pass_name not in PASSES:
            raise ValueError(f"pass {short(pass_name)} is unknown.")
        by_pass[pass_name] = _pairs(times, _choice, positive)
    return by_pass


def _errors(value: Any) -> RoleErrors:
    value = fields(value, ROLES)
    by_role: RoleErrors = {}
    for role in ROLES:
        by_role[role] = {
            _choice(f"xla {text(name)}").removeprefix("xla "): {
                measure: _interval(error)
                for measure, error in fields(errors, MEASURES).items()
            }
            for name, errors in mapping(value[role]).items()
        }
    return by_role


def _interval(value: Any) -> Interval:
    numbers = [number(x) for x in items(value)]
    if len(numbers) != 3:
        raise ValueError(f"{short(value)} is not a mean and its interval.")
    mean, low, high = numbers
    if not low <= mean <= high:
        raise ValueError(f"the mean {mean} is not in its interval {low} to {high}.")
    return Interval(mean, low, high)


def _choice(name: Any) -> str:
    # Only known providers and recipes, so that a file cannot name code.
    return Choice.parse(text(name)).name


def _hex(value: Any) -> str:
    if not _DIGEST.fullmatch(text(value)):
        raise ValueError(f"{short(value)} is not a digest.")
    return value
