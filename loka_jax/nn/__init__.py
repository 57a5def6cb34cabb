"""Flax modules in FP8: the only place where collections are read and written."""

import importlib
from typing import TYPE_CHECKING, Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from loka_jax.jagged import span_visibility
from loka_jax.nn.attention import SelfAttention
from loka_jax.nn.block_outputs import (
    BLOCKS,
    penalties_of,
    penalty,
    seeing_blocks,
    sees_blocks,
)
from loka_jax.nn.context import SiteContext, overriding, probing, site_context
from loka_jax.nn.convert import Converted, convert
from loka_jax.nn.dense import Dense, Fp8DotGeneral
from loka_jax.nn.dropout import Dropout
from loka_jax.nn.embeddings import Compress, EachDense, Fm, FmLcb, JoinedNorm
from loka_jax.nn.group import runs_tails
from loka_jax.nn.histories import (
    Histories,
    Sequences,
    histories_of,
    tokens_visibility,
    with_leaders,
)
from loka_jax.nn.hstu import HstuLayer, newest_rows
from loka_jax.nn.interaction import CrossDeep, CrossNet, Head
from loka_jax.nn.jagged_attention import jagged_attention
from loka_jax.nn.mlp import Mlp
from loka_jax.nn.norm_dense import NormDense, NormParameters
from loka_jax.nn.norms import (
    ActivationName,
    BlockNorm,
    NormName,
    QkNorm,
    QkNormName,
    activation,
    normalize,
)
from loka_jax.nn.observed import PROBE, by_path, merge_stats
from loka_jax.nn.overwriting import overwriting
from loka_jax.nn.planned import Model, Planned
from loka_jax.nn.scale_state import check_scales
from loka_jax.nn.sites import Site, list_sites, sites_of
from loka_jax.nn.softmax import attend, jagged_softmax_attention, rotated
from loka_jax.ops.distinct_rows import distinct_rows
from loka_jax.ops.interaction import dot_features, join_features
from loka_jax.ops.products import Activations
from loka_jax.ops.residual import Residual
from loka_jax.ops.sum_of_rows import sum_of_rows
from loka_jax.probe.site import Capture, ProbeConfig

if TYPE_CHECKING:
    from loka_jax.nn.nnx_convert import Fp8State, ProbeStats, take_scaling

__all__ = [
    "BLOCKS",
    "OVERWRITE_WITH_GRADIENT",
    "PROBE",
    "ActivationName",
    "Activations",
    "BlockNorm",
    "Capture",
    "Compress",
    "Converted",
    "CrossDeep",
    "CrossNet",
    "Dense",
    "Dropout",
    "EachDense",
    "Fm",
    "FmLcb",
    "Fp8DotGeneral",
    "Fp8State",
    "Head",
    "Histories",
    "HstuLayer",
    "JoinedNorm",
    "Mlp",
    "Model",
    "NormDense",
    "NormName",
    "NormParameters",
    "Planned",
    "ProbeConfig",
    "ProbeStats",
    "QkNorm",
    "QkNormName",
    "Residual",
    "SelfAttention",
    "Sequences",
    "Site",
    "SiteContext",
    "activation",
    "attend",
    "by_path",
    "check_scales",
    "convert",
    "distinct_rows",
    "dot_features",
    "histories_of",
    "jagged_attention",
    "jagged_softmax_attention",
    "join_features",
    "list_sites",
    "merge_stats",
    "newest_rows",
    "normalize",
    "overriding",
    "overwriting",
    "penalties_of",
    "penalty",
    "probing",
    "rotated",
    "runs_tails",
    "seeing_blocks",
    "sees_blocks",
    "site_context",
    "sites_of",
    "span_visibility",
    "sum_of_rows",
    "take_scaling",
    "tokens_visibility",
    "with_leaders",
]


def __getattr__(name: str) -> Any:
    """Returns what NNX models need; importing NNX takes a tenth of a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("loka_jax.nn.nnx_convert"), name)
