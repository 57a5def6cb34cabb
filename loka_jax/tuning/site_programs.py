"""The programs of a site's candidates, by digest: what the times in a table are of."""

import functools
import hashlib
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from loka_jax.dispatch.candidates import SiteKey
from loka_jax.dispatch.programs import program_digest
from loka_jax.probe.timing import Case
from loka_jax.site import Choice
from loka_jax.tuning.passes import Operands, in_rows, inference, training


def site_programs(
    site: SiteKey, passes: Mapping[str, Collection[str]]
) -> dict[str, str]:
    """Returns a digest by choice over the programs of its passes.

    Nothing is computed: the programs are those of abstract operands.

    Args:
        site: where.
        passes: by choice, those with times, as a table calls them.
    """
    operands = (
        jax.ShapeDtypeStruct((site.m, site.k), jnp.bfloat16),
        jax.ShapeDtypeStruct((site.k, site.n), jnp.float32),
        jax.ShapeDtypeStruct((site.m, site.n), jnp.bfloat16),
    )

    def digest(choice: Choice, names: Collection[str]) -> str:
        digests = []
        for group in _groups(names):
            run = functools.partial(_run, choice, site, group)
            digests.append(f"{' + '.join(group)}: {program_digest(run, operands)}")
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]

    return {name: digest(Choice.parse(name), passes[name]) for name in passes}


def _groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Returns the passes that are traced together: alone, and all of those in chains.

    A warm pass is the program of the pass.
    """
    names = {name.removesuffix(" warm") for name in names}
    in_chains = tuple(sorted(names - {"training", "inference"}))
    alone = [(name,) for name in sorted(names.difference(in_chains))]
    return [*alone, in_chains] if in_chains else alone


def _run(choice: Choice, site: SiteKey, group: tuple[str, ...], *operands):
    """Returns the results of passes, parted by barriers from their arguments."""
    results = []
    for case in _cases(choice, site, group, operands):
        arguments = jax.tree.map(jax.lax.optimization_barrier, case.arguments[0])
        results.append(case.function(*arguments))
    return results


def _cases(
    choice: Choice, site: SiteKey, group: tuple[str, ...], operands: Operands
) -> list[Case]:
    if group == ("training",):
        return [training(choice, site, [operands])]
    if group == ("inference",):
        return [inference(choice, site, [operands])]
    cases = in_rows(choice, site, [operands])
    return [cases[what] for what in group]
