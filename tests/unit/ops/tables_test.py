"""The tables of fields: where rows lie, which are shared, and what is refused."""

import pytest

from loka_jax.ops.tables import MixedTables, TableSpec, require_one_array, with_dims


def test_offsets_are_the_rows_before_and_owners_share_their_rows():
    spec = TableSpec(rows=(3, 5, 2), dim=4)
    assert (spec.offsets, spec.total_rows, spec.num_single) == ((0, 3, 8), 10, 3)
    shared = TableSpec(rows=(3, 5, 3, 2), dim=4, pooling=("mean",), owners=(0, 1, 0, 3))
    assert (shared.offsets, shared.total_rows) == ((0, 3, 0, 8), 10)
    assert shared.num_single == 3
    assert TableSpec((1,), 1, storage="bf16").dtype == "bfloat16"


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(rows=(2**31 - 1,) * 257), "rows in all are more than 549755813887"),
        (dict(rows=(3, 0)), "positive number for each field"),
        (dict(rows=(3,), dim=0), "dim=0"),
        (dict(rows=(3,), pooling=("sum", "sum")), "more entries than there are fields"),
        (dict(rows=(3, 4), owners=(0, 0)), "fields with as many rows"),
        (dict(rows=(3, 3, 3), owners=(1, 2, 2)), "own its table itself"),
    ],
)
def test_impossible_tables_are_refused_with_a_reason(options, reason):
    with pytest.raises(ValueError, match=reason):
        TableSpec(**{"dim": 4, **options})
    TableSpec(rows=(2**38, 2**38 - 1), dim=4)


def test_fields_of_one_dim_are_a_stack():
    spec = TableSpec(
        rows=(3, 5, 3, 2, 7), dim=8, pooling=("sum", "mean"), owners=(0, 1, 0, 3, 4)
    )
    assert with_dims(spec, (8,) * 5) is spec
    mixed = with_dims(spec, (16, 4, 16, 4, 16))
    assert isinstance(mixed, MixedTables) and mixed.dim == 8
    assert mixed.fields == ((1, 3), (0, 2, 4))
    assert mixed.stacks == (
        TableSpec(rows=(5, 2), dim=4, pooling=("sum",), owners=(0, 1)),
        TableSpec(rows=(3, 3, 7), dim=16, pooling=("mean",), owners=(0, 0, 2)),
    )


def test_tables_too_large_for_one_device_are_refused_by_the_sentence():
    require_one_array(TableSpec(rows=(2**30, 2**30 - 1), dim=4))
    large = TableSpec(rows=(2**30, 2**30), dim=4)
    for tables in (large, MixedTables((large,), ((0, 1),), 4)):
        with pytest.raises(ValueError, match="2147483648 rows .* int32 .* --mesh.sha"):
            require_one_array(tables)
