"""The measurements of candidates on one kind of device, as a readable JSON file.

Speed and error of every candidate are kept, so that limits can change without measuring
again. A table holds only for its schema, device, versions of the libraries, and sources
that decide speed. Elsewhere it is ignored as a whole, and never overwritten.

A change of these sources may leave all programs as they are. So a table keeps the
digests of its candidates' programs, and `experiments/restamp.py` compares them.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

import jax

from loka_jax import jsonfile
from loka_jax.dispatch import sources
from loka_jax.measure.intervals import Interval
from loka_jax.normed import ActivationName, NormName
from loka_jax.recipe import ROLES, Role
from loka_jax.site import Choice, SiteSpec

SCHEMA = 2
# A pass by itself, with its operands in the L2, and within a chain of sites that hand
# their activations on in FP8: such an lhs comes in, such activations go out, or both.
PASSES = tuple(
    f"{name}{form}"
    for name in ("training", "inference")
    for form in ("", " warm", " in", " out", " in out")
)
# A table's sites have no form of input or output: those are passes.
_SITE_FIELDS = ("m", "k", "n", "norm", "activation", "use_bias")
MEASURES = ("relative_l2", "worst_row", "mere")
_MAX_BYTES = 4 << 20
_MAX_SIZE = 1 << 31
_DIGEST = re.compile("[0-9a-f]{16}")


class BadTable(ValueError):
    """The error of an invalid table: one sentence with the file and the reason."""


@dataclasses.dataclass(frozen=True)
class Header:
    """The device, versions and sources that a table was measured with.

    Attributes:
        device_kind: as JAX names it.
        jax, jaxlib: versions.
        triton: versions of jax-triton and Triton; empty if they are not installed.
        kernels: digest of the sources, see `sources.digest`.
    """

    device_kind: str
    jax: str
    jaxlib: str
    triton: str
    kernels: str

    def why_not(self, here: "Header") -> str | None:
        """Returns which part differs here, or None.

        A machine without Triton runs none of its candidates, and the times of others
        hold there.
        """
        for field in dataclasses.fields(self):
            measured, current = getattr(self, field.name), getattr(here, field.name)
            is_missing = field.name == "triton" and not (measured and current)
            if measured == current or is_missing:
                continue
            if field.name == "kernels":
                return "the kernels have changed since"
            name = field.name.replace("_", " ")
            return f"it was measured with {name} {measured}, but here it is {current}"
        return None


# By measure, of one product of a candidate.
type Errors = dict[str, Interval]
# By product and the name of a recipe that casts it so.
type RoleErrors = dict[Role, dict[str, Errors]]


@dataclasses.dataclass
class Entry:
    """The measurements of a site.

    Attributes:
        times: microseconds by pass ("training" is forward and backward) and candidate.
        errors: by source of the operands, such as "fp8_dlrm top_mlp/dense_0".
        failures: of candidates that could not run, or were wrong; one sentence each.
        effects: by source, as `errors`, the relative change of the model's loss
            on held-out data if the forward product of this site alone is in FP8.
        programs: by candidate, the digest of the programs of all its passes.
    """

    times: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    errors: dict[str, RoleErrors] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    effects: dict[str, Interval] = dataclasses.field(default_factory=dict)
    programs: dict[str, str] = dataclasses.field(default_factory=dict)

    def passes(self) -> dict[str, Collection[str]]:
        """Returns the passes that were timed, by candidate."""
        candidates = {name for times in self.times.values() for name in times}
        return {
            name: [pass_ for pass_, times in self.times.items() if name in times]
            for name in sorted(candidates)
        }


@dataclasses.dataclass
class Table:
    """Entries by site, measured with the device, versions and sources of the header."""

    header: Header
    sites: dict[SiteSpec, Entry] = dataclasses.field(default_factory=dict)

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
            )
        triton = self.header.triton or other.header.triton
        return Table(dataclasses.replace(self.header, triton=triton), sites)


def _is_measured(name: str, entry: Entry) -> bool:
    return any(name in times for times in entry.times.values())


def header_here() -> Header:
    """Returns the header of a table that holds in this process."""
    return Header(
        device_kind=jax.devices()[0].device_kind,
        jax=jax.__version__,
        jaxlib=sources.version("jaxlib"),
        triton=sources.triton_versions(),
        kernels=sources.digest(),
    )


def write(path: pathlib.Path, table: Table):
    """Writes a table in one step: readers see the old one or the new one."""
    jsonfile.write_text(path, json.dumps(to_json(table), indent=1) + "\n")


def to_json(table: Table) -> dict[str, Any]:
    """Returns the JSON value of a table."""
    return {
        "schema": SCHEMA,
        "header": dataclasses.asdict(table.header),
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
        if path.stat().st_size > _MAX_BYTES:
            raise BadTable(f"{path} is larger than {_MAX_BYTES >> 20} MiB.")
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        return from_json(value)
    except BadTable:
        raise
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError, TypeError) as error:
        raise BadTable(f"{path} is not a dispatch table: {error}") from None


def from_json(value: Any) -> Table:
    """Returns the table in a JSON value.

    Raises:
        ValueError: if it is not in the format of `to_json`.
    """
    value = _fields(value, "schema", "header", "sites")
    if value["schema"] != SCHEMA:
        raise ValueError(f"schema {value['schema']!r} is not {SCHEMA}.")
    names = [field.name for field in dataclasses.fields(Header)]
    header = {k: _text(v) for k, v in _fields(value["header"], *names).items()}
    sites: dict[SiteSpec, Entry] = {}
    for item in _list(value["sites"]):
        item = _fields(
            item, "site", "times", "errors", "failures", "effects", "programs"
        )
        key = _site(item["site"])
        if key in sites:
            raise ValueError(f"site {key} occurs twice.")
        sites[key] = Entry(
            times=_times(item["times"]),
            errors={_text(k): _errors(v) for k, v in _dict(item["errors"]).items()},
            failures={_choice(k): _text(v) for k, v in _dict(item["failures"]).items()},
            effects={_text(k): _interval(v) for k, v in _dict(item["effects"]).items()},
            programs={_choice(k): _hex(v) for k, v in _dict(item["programs"]).items()},
        )
    return Table(Header(**header), sites)


def _site(value: Any) -> SiteSpec:
    value = _fields(value, *_SITE_FIELDS)
    for name in ("m", "k", "n"):
        size = value[name]
        if type(size) is not int or not 0 < size < _MAX_SIZE:
            raise ValueError(f"{name}={size!r} is not a size.")
    if value["norm"] not in get_args(NormName):
        raise ValueError(f"norm {value['norm']!r} is unknown.")
    if value["activation"] not in get_args(ActivationName):
        raise ValueError(f"activation {value['activation']!r} is unknown.")
    if type(value["use_bias"]) is not bool:
        raise ValueError(f"use_bias={value['use_bias']!r} is not true or false.")
    return SiteSpec(**value)


def _times(value: Any) -> dict[str, dict[str, float]]:
    by_pass = {}
    for pass_name, times in _dict(value).items():
        if pass_name not in PASSES:
            raise ValueError(f"pass {pass_name!r} is unknown.")
        by_pass[pass_name] = {
            _choice(name): _positive(time) for name, time in _dict(times).items()
        }
    return by_pass


def _errors(value: Any) -> RoleErrors:
    value = _fields(value, *ROLES)
    by_role: RoleErrors = {}
    for role in ROLES:
        by_role[role] = {
            _choice(f"xla {_text(name)}").removeprefix("xla "): {
                measure: _interval(error)
                for measure, error in _fields(errors, *MEASURES).items()
            }
            for name, errors in _dict(value[role]).items()
        }
    return by_role


def _interval(value: Any) -> Interval:
    low_mean_high = [_number(x) for x in _list(value)]
    if len(low_mean_high) != 3:
        raise ValueError(f"{value!r} is not a mean and an interval.")
    return Interval(*low_mean_high)


def _choice(name: Any) -> str:
    # Only known providers and recipes, so that a file cannot name code.
    return Choice.parse(_text(name)).name


def _fields(value: Any, *names: str) -> dict[str, Any]:
    value = _dict(value)
    if set(value) != set(names):
        raise ValueError(f"fields {sorted(value)} are not {sorted(names)}.")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{str(value)[:40]!r} is not an object.")
    return dict(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]!r} is not a list.")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError(f"{str(value)[:40]!r} is not a text.")
    return value


def _hex(value: Any) -> str:
    if not _DIGEST.fullmatch(_text(value)):
        raise ValueError(f"{value[:40]!r} is not a digest.")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is not a finite number.")
    return float(value)


def _positive(value: Any) -> float:
    number = _number(value)
    if number <= 0:
        raise ValueError(f"time {number} is not positive.")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice in an object.")
    return fields


def _no_constant(name: str):
    raise ValueError(f"{name} is not a number.")
