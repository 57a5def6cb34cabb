"""Predicted times of groups of sites as one operation (`ops.group`).

Timed by itself, a site casts what in a group the tail before it has written, and its
time lacks what lies between the products. So the time of a group is counted, in what
the device's limits allow:

    time = 1.10 FP8 flops / rate + 0.96 bfloat16 flops / rate + bytes moved / copy rate
           + 2.9 launches of each kernel

    dense     a tail reads z and writes each form of the next lhs; backward one reads dy
              and what forward kept, and writes each form of g (what a tail of whole
              rows reads, it reads twice)
    cross     each pass reads x0 and the products of all layers so far, and writes the
              forms of the next operand; the last one makes dx0
    weights   are read in float32 and written in each form; their gradient counts as
              float32, which it is where the model does not cast its weights

The factors on flops are fitted on the stacks of `wide_stack_h200.json`: 9 % off at
three stacks of 1,024 to 7,680 features in the root mean square, 19 % at worst. That on
launches, what a kernel takes besides its work, is of 4,096 rows of a narrow cross
network on an H100; that on the bytes of cross layers of the kernels of
`wide_models_h200.json`, 448 and 3,456 features at 8,192 and 65,536 rows: 23 % off at
worst.
"""

from collections.abc import Mapping

from loka_jax.dispatch.work import roles_of
from loka_jax.group import Cross, Group
from loka_jax.measure.roofline import Roofline
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, ROLES, Operand, Recipe
from loka_jax.site import SiteSpec

SPREAD = 0.12  # of the logarithm of a predicted time
_FP8, _BF16 = 1.10, 0.96  # times at the rate of the roofline
_F32_BYTES, _BF16_BYTES, _FP8_BYTES = 4, 2, 1
_LAUNCH = 2.9  # times an empty kernel
_PASSES = 1.2  # times at the copy rate
# Kernels of a layer: products, passes, and their sums; in FP8 the cast of its weight,
# too; of a norm of whole rows its statistics. Of a cross layer's product: in training
# its weight's cast as well. Of a cross network: what reads and joins features, makes
# their gradient and next states.
_OF_DENSE = {"training": 7, "inference": 2}
_OF_STATISTICS = {"training": 2, "inference": 1}
_OF_CROSSED = {"training": 9, "inference": 2}
_OF_CROSS = {"training": 10, "inference": 1}
# Bytes of an element of the features: of a cross layer between its products by XLA
# (x0 * h + x reads three arrays and writes one; its gradients are five passes), of the
# join of features, and of the features that a head reads.
_BY_XLA = {"training": 26, "inference": 8}
_JOIN = 4
_HEAD = {"training": 6, "inference": 2}

type Recipes = Mapping[str, Recipe]


def group_us(
    group: Group, recipes: Recipes, pass_name: str, roofline: Roofline
) -> float:
    """Returns the predicted microseconds of a group, by recipes, as one operation."""
    us = 0.0
    for layer in group.layers:
        if isinstance(layer, Cross):
            us += _cross_us(layer, recipes, pass_name, roofline)
        elif layer.member is not None:
            spec, recipe = layer.member.spec, recipes[layer.member.path]
            us += dense_us(spec, recipe, pass_name, roofline)
            if group.is_crossed(layer.reads):  # the cross network writes it
                written = written_bytes("lhs", recipe, pass_name)
                us -= spec.m * spec.k * (2 + written) / roofline.bytes_per_us
    return us


def apart_us(group: Group, pass_name: str, roofline: Roofline) -> float:
    """Returns the time of what lies between a group's sites if these run apart.

    That of cross networks, of the join of their features, and of a head on them.
    """
    crosses = [layer for layer in group.layers if isinstance(layer, Cross)]
    moved = sum(_BY_XLA[pass_name] * len(layer.members) for layer in crosses)
    if group.head is not None:
        moved += _JOIN + _HEAD[pass_name]
    return _moved_us(group, moved, roofline)


def beside_us(group: Group, pass_name: str, roofline: Roofline) -> float:
    """Returns the time between a cross network as one operation and sites apart."""
    moved = (_JOIN + 2 * _HEAD[pass_name]) * (group.head is not None)
    return _moved_us(group, moved, roofline)


def _moved_us(group: Group, bytes_an_element: int, roofline: Roofline) -> float:
    elements = group.rows * group.columns(0)
    return bytes_an_element * elements / roofline.bytes_per_us


def dense_us(
    spec: SiteSpec, recipe: Recipe, pass_name: str, roofline: Roofline
) -> float:
    """Returns the predicted microseconds of a dense layer within a group."""
    m, k, n = spec.m, spec.k, spec.n
    casts_weight = pass_name == "training" and any(map(recipe.gemm, ROLES))
    us = _products_us(spec, recipe, pass_name, roofline)
    statistics = _OF_STATISTICS[pass_name] * spec.has_affine
    us += _launches_us(_OF_DENSE[pass_name] + casts_weight + statistics, roofline)
    moved = m * k * (_BF16_BYTES + written_bytes("lhs", recipe, pass_name))
    again = m * n * spec.has_affine
    moved += again * _BF16_BYTES
    if pass_name == "training":
        kept = _FP8_BYTES if recipe.fwd is not None else _BF16_BYTES
        xhat = kept * (spec.norm != "none")
        g = written_bytes("g", recipe, pass_name)
        moved += m * n * (_BF16_BYTES + kept + xhat + g)
        moved += again * (_BF16_BYTES + xhat)
        moved += k * n * (2 * _F32_BYTES + written_bytes("rhs", recipe, pass_name))
    return us + moved / roofline.bytes_per_us


def _cross_us(
    layer: Cross, recipes: Recipes, pass_name: str, roofline: Roofline
) -> float:
    """Returns the predicted microseconds of a cross network as one operation."""
    members = [member for own in layer.members for member in own]
    recipe, first = recipes[members[0].path], members[0].spec
    us = sum(_products_us(x.spec, recipe, pass_name, roofline) for x in members)
    us += _launches_us(
        len(members) * _OF_CROSSED[pass_name] + _OF_CROSS[pass_name], roofline
    )
    moved = _PASSES * first.m * first.k * _of_passes(layer, recipe, pass_name)
    if pass_name == "training":
        lhs, rhs, g = (written_bytes(x, recipe, pass_name) for x in OPERANDS)
        for x in members:  # in float32, and so is its gradient
            spec = x.spec
            moved += spec.k * spec.n * (8 + rhs)
        if len(layer.members[0]) > 1:  # what a product leaves for the next one
            narrow = first.m * first.n * len(layer.members)
            moved += narrow * (2 + lhs + 2 + g)
    return us + moved / roofline.bytes_per_us


def _of_passes(layer: Cross, recipe: Recipe, pass_name: str) -> int:
    """Returns the bytes an element that the passes over all features move."""
    depth = len(layer.members)
    lhs = written_bytes("lhs", recipe, pass_name)
    # Products leave in FP8, and x0 is read so.
    an_element = 2 + lhs + sum(i + 1 + lhs for i in range(1, depth + 1))
    if pass_name == "training":
        g = written_bytes("g", recipe, pass_name)
        an_element += sum(i + 1 + g for i in range(1, depth + 1))
        an_element += (depth + 1) + depth + 2
    return an_element


def _launches_us(kernels: int, roofline: Roofline) -> float:
    """Returns the microseconds that kernels take besides their work."""
    return kernels * _LAUNCH * roofline.launch_us


def _products_us(
    spec: SiteSpec, recipe: Recipe, pass_name: str, roofline: Roofline
) -> float:
    flops, us = 2.0 * spec.m * spec.k * spec.n, 0.0
    for role in roles_of(pass_name):
        if recipe.gemm(role) is None:
            us += _BF16 * flops / roofline.bf16_flops_per_us
        else:
            us += _FP8 * flops / roofline.fp8_flops_per_us
    return us


def written_bytes(operand: Operand, recipe: Recipe, pass_name: str) -> int:
    """Returns the bytes that an element takes in all forms that products read."""
    gemms = [
        recipe.gemm(role)
        for role in roles_of(pass_name)
        if operand in ROLE_OPERANDS[role]
    ]
    in_fp8 = sum(gemm is not None for gemm in gemms)
    return _FP8_BYTES * in_fp8 + _BF16_BYTES * (in_fp8 < len(gemms))
