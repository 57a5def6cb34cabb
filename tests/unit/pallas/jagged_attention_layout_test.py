"""The order in which attention takes its tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import jagged
from loka_jax.jagged import BY_KEY, BY_QUERY, FORWARD
from loka_jax.pallas import jagged_attention_layout as layouts
from loka_jax.pallas.jagged_attention_layout import LaunchLayout, Task


@pytest.mark.parametrize("kind", [FORWARD, BY_QUERY, BY_KEY])
@pytest.mark.parametrize("most_ranked", [0, 1024])
def test_tiles_are_in_the_order_of_their_work(monkeypatch, most_ranked, kind):
    monkeypatch.setattr(layouts, "_MOST_RANKED", most_ranked)
    config = layouts.best_config(kind, 64)
    layout = LaunchLayout(kind, 2048, 1, 64, 1.0, 777, config, is_interpreted=False)
    offsets = jnp.array([0, 0, 700, 705, 1500, 1900])  # and rows of no sequence
    visible = jagged.visibility(offsets, 2048, jagged.CAUSAL)

    table = np.asarray(layouts.task_table(layout, visible))

    tiles, counts = (
        table[:, Task._fields.index(name) - 1] for name in ("tile", "count")
    )
    sizes = {"by_key": kind.by_key, "fixed": layout.tile, "streamed": config.block}
    visits = np.stack(jagged.blocks(visible, **sizes), axis=1)
    np.testing.assert_array_equal(table[:, 1:], visits[tiles])
    wanted = sorted(zip(-counts, tiles, strict=True))
    assert list(zip(-counts, tiles, strict=True)) == wanted
    assert sorted(tiles) == list(range(len(visits)))
    assert len({*counts}) > 2
