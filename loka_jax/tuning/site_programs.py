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
    of_pass = _DigestsOfSite(site)
    return {name: of_pass.combined(name, passes[name]) for name in passes}


class _DigestsOfSite:
    """Digests of passes at a site, each computed once: inferences are often shared."""

    def __init__(self, site: SiteKey):
        self._site = site
        self._operands = (
            jax.ShapeDtypeStruct((site.m, site.k), jnp.bfloat16),
            jax.ShapeDtypeStruct((site.k, site.n), jnp.float32),
            jax.ShapeDtypeStruct((site.m, site.n), jnp.bfloat16),
        )
        self._digests: dict[tuple, str] = {}

    def combined(self, name: str, passes: Collection[str]) -> str:
        choice = Choice.parse(name)
        # A warm pass is the program of the pass.
        names = {what.removesuffix(" warm") for what in passes}
        in_chains = tuple(sorted(names - {"training", "inference"}))
        groups = [(what,) for what in sorted(names - {*in_chains})]
        groups += [in_chains] if in_chains else []
        digests = [f"{group} {self._digest(choice, group)}" for group in groups]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]

    def _digest(self, choice: Choice, group: tuple[str, ...]) -> str:
        is_inference = group == ("inference",)
        recipe = choice.recipe.fwd if is_inference else choice.recipe
        key = choice.provider, recipe, choice.recipe.is_delayed, group
        if key not in self._digests:
            run = functools.partial(_run, choice, self._site, group)
            self._digests[key] = program_digest(run, self._operands)
        return self._digests[key]


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
