"""Digests of the timed programs of a table's candidates."""

import hashlib
from collections.abc import Collection, Mapping

from loka_jax.dispatch.programs import program_digest
from loka_jax.measure.compiling import of_leaves
from loka_jax.measure.programs import form_spec, planned, programs_of
from loka_jax.ops.device import HOPPER
from loka_jax.site import Choice, SiteSpec


def site_programs(
    spec: SiteSpec, passes: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Returns the digests of choices, each over the passes' programs on a Hopper GPU.

    Nothing is computed: the operands are abstract.

    Args:
        spec: the site.
        passes: by choice, the passes with times, by their names in a table.
    """
    return {
        name: _digest(spec, Choice.parse(name), names) for name, names in passes.items()
    }


def _digest(spec: SiteSpec, choice: Choice, names: Collection[str]) -> str:
    """Returns the digest of a choice."""
    by_form: dict[str, list[str]] = {}
    for name in sorted(names):
        pass_name, _, form = name.partition(" ")
        by_form.setdefault(form, []).append(pass_name)
    digests = []
    for form, pass_names in by_form.items():
        plan = planned(form_spec(spec, form), choice, HOPPER)
        programs = programs_of(plan).by_name
        for name in pass_names:
            function, arguments, _ = programs[name]
            flat = of_leaves(function, arguments)
            digest = program_digest(flat, arguments.leaves)
            digests.append(f"{name} {form}: {digest}")
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
