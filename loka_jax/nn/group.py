"""Groups of a module's sites: which plans they have, and their variables."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from loka_jax import triton
from loka_jax.group import Dense, Group, Member
from loka_jax.nn.context import current
from loka_jax.ops.device import local_device
from loka_jax.ops.group import why_not
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.recipe import Recipe
from loka_jax.site import Choice, Provider

# The least size of a product of which a group has one by default. Narrow layers alone
# are left to kernels that multiply and normalize at once.
WIDE = 1024


class Within(NamedTuple):
    """What a module is told whose layers are part of a larger group.

    Attributes:
        group: all of it.
        plans: of the module's own sites if the group runs as one operation; then the
            module returns its `Part`. None if its layers run by themselves.
    """

    group: Group
    plans: tuple[KernelPlan, ...] | None = None


class Part(NamedTuple):
    """The variables of some layers of a group, in the order of `run_group`."""

    layers: tuple[tuple[LayerArrays, ...], ...]
    states: tuple[Any, ...]


class GroupPlan(NamedTuple):
    """The plan of a site of a group, and why the site runs apart if it does."""

    plan: KernelPlan
    why_apart: str | None


def group_plans(
    group: Group,
    members: Sequence[Member],
    recipes: Sequence[str | Recipe],
    implementation: Provider | None,
) -> list[KernelPlan | None]:
    """Returns the plans of the sites that run in a group; None for the others."""
    each = plans_in_group(group, members, recipes, implementation)
    return [x.plan if x.why_apart is None else None for x in each]


def plans_in_group(
    group: Group,
    members: Sequence[Member],
    recipes: Sequence[str | Recipe],
    implementation: Provider | None,
) -> list[GroupPlan]:
    """Returns the plans of sites in a group, and why they run apart.

    A site runs in it if its choice or the module's implementation says "group". By
    default all sites of a group do that has a wide one, where the kernels of tails run;
    of a cross network only in FP8.

    Args:
        group: all of it.
        members: some of its sites.
        recipes: of each.
        implementation: of the module.
    """
    each = []
    for member, recipe in zip(members, recipes, strict=True):
        plan = current().plan(member.path, member.spec, recipe, "group")
        why_apart = _why_apart(plan, member.path, group, implementation)
        each.append(GroupPlan(plan, why_apart))
    return each


def _why_apart(
    plan: KernelPlan, path: str, group: Group, implementation: Provider | None
) -> str | None:
    if implementation not in (None, "group"):
        return f"implementation {implementation!r}"
    if current().observer is not None:
        return "Probe observes it"
    if plan.choice.provider != "group":
        return f"its choice is {plan.choice.name}"
    if plan.why_not is not None:
        return plan.why_not
    if implementation == "group" or isinstance(current().choices.get(path), Choice):
        return None
    # Products of one value count together, such as those of queries, keys and values.
    sizes = [sum(x.spec.n for x in group.readers(value)) for value in group.values]
    if max(*sizes, *(x.spec.k for x in group.members)) < WIDE:
        return f"none of its layers is {WIDE:,} wide"
    device = current().device or local_device()
    if (missing := triton.why_not_installed() or device.why_not_tails) is not None:
        return missing
    if plan.choice.is_fp8 or isinstance(group.layer_of(path), Dense):
        return None
    return "a cross network in bfloat16"


def runs_tails() -> bool:
    """Returns True if kernels of tails run on the device that sites are planned for."""
    device = current().device or local_device()
    return not (triton.why_not_installed() or device.why_not_tails)


def joined(
    group: Group, plans: Sequence[KernelPlan | None]
) -> tuple[KernelPlan, ...] | None:
    """Returns the plans of a whole group if it runs as one operation, else None."""
    own = tuple(plan for plan in plans if plan is not None)
    if len(own) < len(plans) or why_not(group, own) is not None:
        return None
    return own


def without_fp8_dlhs(plan: KernelPlan) -> KernelPlan:
    """Returns the plan with dlhs in high precision.

    Below a head g is one number of an example times the head's weights
    (docs/recipes.md, "The layer below a head").
    """
    recipe = plan.choice.recipe
    if recipe.dlhs is None:
        return plan
    parts = recipe.name.split("/")  # one name, or those of fwd, dlhs and drhs
    name = f"{parts[0]}/bf16/{parts[-1]}"
    choice = Choice("group", dataclasses.replace(recipe, name=name, dlhs=None))
    return resolve(plan.spec, choice, plan.device)
