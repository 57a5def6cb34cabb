"""Digests of the timed programs of a table's candidates."""

import functools
import hashlib
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from loka_jax.dispatch.programs import program_digest
from loka_jax.measure.passes import Operands, in_chains, inference, training
from loka_jax.measure.timing import Case
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
    operands = (
        jax.ShapeDtypeStruct((spec.m, spec.k), jnp.bfloat16),
        jax.ShapeDtypeStruct((spec.k, spec.n), jnp.float32),
        jax.ShapeDtypeStruct((spec.m, spec.n), jnp.bfloat16),
    )

    def digest(choice: Choice, names: Collection[str]) -> str:
        digests = []
        for group in _groups(names):
            run = functools.partial(_run, choice, spec, group)
            digests.append(f"{' + '.join(group)}: {program_digest(run, operands)}")
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]

    return {name: digest(Choice.parse(name), passes[name]) for name in passes}


def _groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Returns the groups of passes to trace together: each alone, those in chains."""
    in_chains = tuple(sorted(set(names) - {"training", "inference"}))
    alone = [(name,) for name in sorted(set(names).difference(in_chains))]
    return [*alone, in_chains] if in_chains else alone


def _run(choice: Choice, spec: SiteSpec, group: tuple[str, ...], *operands):
    """Returns the results of passes, separated from their arguments by barriers."""
    results = []
    for case in _cases(choice, spec, group, operands):
        arguments = jax.tree.map(jax.lax.optimization_barrier, case.arguments[0])
        results.append(case.function(*arguments))
    return results


def _cases(
    choice: Choice, spec: SiteSpec, group: tuple[str, ...], operands: Operands
) -> list[Case]:
    if group == ("training",):
        return [training(choice, spec, [operands], HOPPER)]
    if group == ("inference",):
        return [inference(choice, spec, [operands], HOPPER)]
    cases = in_chains(choice, spec, [operands], HOPPER)
    return [cases[name] for name in group]
