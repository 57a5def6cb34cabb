"""The families of kernels that run beside the kernels of sites, and what checks each.

A kernel that is in no family here, nor checked at each site where it runs, cannot run:
operations name a family to choose its kernels, and a test lists those that exist.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loka_jax.measure.check_families import Case, why_any_wrong
from loka_jax.measure.family_pallas import (
    fm_lcbs,
    fm_lcbs_backward,
    fp8_jagged_attentions,
    jagged_attentions,
    jagged_softmaxes,
)
from loka_jax.measure.family_rows import (
    dot_features_cases,
    gated_norms,
    joined_norms,
    merges,
    packings,
    routes,
    row_updates,
    row_wires,
)
from loka_jax.measure.family_tails import cross_tails, joined_casts, norm_tails


class Family(NamedTuple):
    """Kernels that are right or wrong together.

    Attributes:
        entries: the functions that launch them, as "provider.module.function".
        cases: returns what they are checked on.
    """

    entries: tuple[str, ...]
    cases: Callable[[], Sequence[Case]]


def why_wrong(name: str, **how: Any) -> str | None:
    """Returns what is wrong with a family on this device, or None.

    Raises:
        ValueError: if there is no such family.
    """
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{name!r} is no family of kernels: name one of {known}.")
    return why_any_wrong(FAMILIES[name].cases(), **how)


def _family(
    cases: Callable[[], Sequence[Case]], provider: str, *entries: str
) -> Family:
    return Family(tuple(f"{provider}.{entry}" for entry in entries), cases)


FAMILIES: dict[str, Family] = {
    "norm_tail": _family(
        norm_tails, "triton", "tails.norm_tail", "tails.norm_tail_backward"
    ),
    "cross_tail": _family(
        cross_tails, "triton", "tails.cross_tail", "tails.cross_gradient"
    ),
    "joined_cast": _family(joined_casts, "triton", "tails.joined_cast"),
    "joined_norm": _family(
        joined_norms,
        "triton",
        "joined_norm.joined_norm",
        "joined_norm.joined_norm_backward",
    ),
    "gated_norm": _family(
        gated_norms, "triton", "gated_norm.gated_norm", "gated_norm.gated_norm_backward"
    ),
    "dot_features": _family(
        dot_features_cases,
        "triton",
        "dot_features.dot_features",
        "dot_features.dot_features_backward",
    ),
    "row_update": _family(
        row_updates,
        "triton",
        "row_update.sum_runs",
        "row_update.sgd",
        "row_update.rowwise_adagrad",
    ),
    "route": _family(routes, "triton", "route.lists"),
    "merge": _family(merges, "triton", "merge.merge_lists"),
    "row_wire": _family(row_wires, "triton", "row_wire.encode", "row_wire.decode"),
    "packed": _family(
        packings, "triton", "packed.pack", "packed.sum_packed", "packed.unpack"
    ),
    "fm_lcb": _family(fm_lcbs, "pallas", "fm_lcb.fm_lcb"),
    "fm_lcb_backward": _family(
        fm_lcbs_backward, "pallas", "fm_lcb_backward.fm_lcb_backward"
    ),
    "jagged_attention": _family(
        jagged_attentions,
        "pallas",
        "jagged_attention.attend",
        "jagged_attention.gradients",
    ),
    "jagged_attention_fp8": _family(
        fp8_jagged_attentions, "pallas", "jagged_attention.attend"
    ),
    "jagged_softmax": _family(
        jagged_softmaxes, "pallas", "jagged_softmax.forward", "jagged_softmax.backward"
    ),
}
# Checked at every site that they are to run at, see `checking`.
BY_SITE = (
    "pallas.dense_norm.dense_norm",
    "pallas.norm_quantize.norm_quantize",
    "pallas.norm_backward.norm_backward",
    "triton.matmul.fp8_matmul",
)
