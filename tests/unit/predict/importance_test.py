"""A column is as important as the loss that another order of its values brings."""

import numpy as np
import pytest

from loka_jax.predict import importance_of
from tests.support.predict import predictor_of


def test_the_column_that_scores_depend_on_is_the_important_one(tmp_path):
    model, _ = predictor_of(tmp_path)  # whose logits are prices
    draw = np.random.default_rng(0)
    price = draw.normal(0, 2, 400)
    clicked = draw.random(400) < 1 / (1 + np.exp(-price))
    lines = [
        f"{y:d},{x},u{i % 5},{i % 3}"
        for i, (y, x) in enumerate(zip(clicked, price, strict=True))
    ]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["label,price,user,item", *lines, ""]))
    first, *others = importance_of(model, path, seed=1)
    order = np.random.default_rng(1).permutation(400)
    y = clicked.astype(float)
    loss = lambda x: np.logaddexp(0, np.where(y == 1, -x, x))  # noqa: E731
    more = loss(price[order]) - loss(price)
    q = y.mean()
    entropy = -q * np.log(q) - (1 - q) * np.log(1 - q)
    assert first.column == "price"
    assert first.ne == pytest.approx(more.mean() / entropy, rel=1e-5)
    assert first.half == pytest.approx(1.959964 * more.std() / 20 / entropy, rel=1e-5)
    assert {x.column for x in others} == {"user", "item"}
    assert all(x.ne == 0 and x.half == 0 for x in others)
    path.write_text("label,price,user,item\n0,1,u1,2\n0,2,u1,2\n")
    with pytest.raises(ValueError, match="one kind of label"):
        importance_of(model, path)
