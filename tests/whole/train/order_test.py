"""Models of event logs learn what only the order of a history tells."""

import pytest

from loka_jax.models import InterFormer, OneTrans
from tests.support.event_runs import assert_order_is_learned

INTERFORMER = InterFormer(
    dim=16,
    num_layers=1,
    num_heads=1,
    num_embeddings=2,
    num_sums=1,
    num_cls=1,
    num_seeds=1,
    num_recent=1,
    item_mlp=(),
    dot_mlp=(16,),
    cross_rank=16,
    head_mlp=(32,),
    max_length=10,
    age_buckets=8,
    recipe="fp8_tensorwise",
)
ONETRANS = OneTrans(
    dim=16,
    num_layers=1,
    num_heads=1,
    num_tokens=2,
    ffn_factor=2,
    item_mlp=(),
    head_mlp=(32,),
    max_length=18,
    age_buckets=8,
    recipe="fp8_tensorwise",
)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        # Batches of one or two shapes, as each shape takes a program.
        (INTERFORMER, dict(examples=14_000, batch_size=256, row_capacity=1408)),
        (ONETRANS, dict(examples=20_000, batch_size=24, targets="all")),
    ],
    ids=["InterFormer", "OneTrans"],
)
def test_the_order_of_a_history_is_learned(tmp_path, model, options):
    assert_order_is_learned(model, tmp_path, history=8, **options)
