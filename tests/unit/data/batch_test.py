"""Schemas name what is wrong with their columns; positions follow each other."""

import pytest

from loka_jax.data.batch import Position, Schema, next_position, num_batches


def schema(**options):
    parts = {"label": "y", "dense": ("x",), "categorical": ("c",), "vocab_sizes": (5,)}
    return Schema(**(parts | options))


def test_no_features_are_refused():
    with pytest.raises(ValueError, match="no features.*--data.dense"):
        schema(dense=(), categorical=(), vocab_sizes=())


@pytest.mark.parametrize("twice", [{"dense": ("y",)}, {"dense": ("c",)}])
def test_a_column_has_one_role(twice):
    with pytest.raises(ValueError, match="named more than once"):
        schema(**twice)


@pytest.mark.parametrize("sizes", [(), (5, 5), (0,), (-1,), (2**31,)])
def test_table_sizes_must_fit(sizes):
    with pytest.raises(ValueError):
        schema(vocab_sizes=sizes)


def test_the_last_step_of_an_epoch_is_followed_by_the_next_epoch():
    assert next_position(Position(2, 3, 7), 5) == Position(2, 4, 7)
    assert next_position(Position(2, 4, 7), 5) == Position(3, 0, 7)


def test_a_partial_batch_counts():
    assert [num_batches(n, 4) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
