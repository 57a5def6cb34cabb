"""Live errors that a run has learned of itself, kept for the next run of the same.

They are of a source: the name of a run with a digest of its data, model, tables,
optimizer and batch (`Config.source`). Each source has a file of its own for a device,
its versions and the kernels, in the format of tables. What is not of this source, or of
sites of other sizes, is not read; a damaged file is removed. Numbers that somebody else
has written there do no lasting harm: a run that enters FP8 by kept errors observes its
own, which take FP8 back where they are above their limits.

The first errors of a site are kept until later ones demote it: by errors that varied
from run to run, each run would have another plan, and compile other programs.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Collection, Mapping, Sequence

from loka_jax.cache_folder import cache_folder
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import Entry, RoleErrors, Table
from loka_jax.nn import Site
from loka_jax.recipe import ROLES


def learned_path(source: str) -> pathlib.Path:
    """Returns the file of a source's errors, with this device, versions and kernels."""
    about = [source, dataclasses.asdict(header_here())]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    return cache_folder("learned") / f"{digest}.json"


def keep_errors(
    source: str,
    sites: Sequence[Site],
    errors: Mapping[str, RoleErrors],
    demoted: Collection[str] = (),
) -> str | None:
    """Keeps errors by path for later runs; returns why not, or None.

    Those that are kept already stay, but of sites that the new ones have demoted.
    """
    kept = kept_errors(source, sites)
    stay = {path: x for path, x in kept.items() if path not in demoted}
    own = kept | {path: _filled(x, stay.get(path, {})) for path, x in errors.items()}
    if own == kept:
        return None
    entries: dict = {}
    for site in sites:
        if site.path in own:
            entry = entries.setdefault(table_key(site.spec), Entry())
            entry.errors[f"{source} {site.path}"] = own[site.path]
    path = learned_path(source)
    try:
        with tables.locked(path):
            tables.write(path, Table(header_here(), entries))
    except (OSError, ValueError) as error:
        return f"Errors were not kept for later runs: {error}"
    return None


def _filled(errors: RoleErrors, kept: RoleErrors) -> RoleErrors:
    """Returns errors of a site, those that are kept in place of newer ones."""
    return {role: errors.get(role, {}) | kept.get(role, {}) for role in ROLES}


def kept_errors(source: str, sites: Sequence[Site]) -> dict[str, RoleErrors]:
    """Returns the errors by path that an earlier run of a source has kept."""
    path = learned_path(source)
    if not path.exists():
        return {}
    try:
        table = tables.read(path)
    except ValueError:
        path.unlink(missing_ok=True)
        return {}
    if table.header.why_not(header_here()) is not None:
        return {}
    found = {}
    for site in sites:
        entry = table.sites.get(table_key(site.spec), Entry())
        if (name := f"{source} {site.path}") in entry.errors:
            found[site.path] = entry.errors[name]
    return found
