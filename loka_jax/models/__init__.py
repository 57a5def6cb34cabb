"""Ranking models, in short files that read like the equations of the papers."""

from loka_jax.models.dcnv2 import Dcnv2
from loka_jax.models.dhen import Dhen, DhenDlrm
from loka_jax.models.dlrm import Dlrm
from loka_jax.models.hstu import Hstu
from loka_jax.models.interformer import InterFormer
from loka_jax.models.mmoe import Mmoe
from loka_jax.models.onetrans import OneTrans
from loka_jax.models.own import OwnModel, own_model
from loka_jax.models.ranking import RankingModel
from loka_jax.models.wukong import Wukong

__all__ = [
    "Dcnv2",
    "Dhen",
    "DhenDlrm",
    "Dlrm",
    "Hstu",
    "InterFormer",
    "Mmoe",
    "OneTrans",
    "OwnModel",
    "RankingModel",
    "Wukong",
    "own_model",
]
