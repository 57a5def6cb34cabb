"""The operands of tails: scales where they lie, forms, layouts."""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3
from loka_jax.tails import Forms, Scale, Written


def test_products_contract_the_layout_whose_last_dim_they_need():
    data = jnp.arange(6.0).reshape(2, 3).astype(E4M3)
    copies = Written(fp8=data, fp8_t=data.T, scale_inv=Scale.of(jnp.float32(2)))
    assert copies.contracting(1).data.shape == (2, 3)
    assert copies.contracting(0).data.shape == (3, 2)
    np.testing.assert_array_equal(copies.contracting(0).scales[0].value, 2)
    with pytest.raises(AssertionError):
        copies._replace(fp8_t=None).contracting(0)


@pytest.mark.parametrize(
    "forms, shape, written",
    [
        (Forms(), (17, 30), (17, 30)),
        (Forms(padded=True), (17, 30), (32, 32)),
        (Forms(shape=(15, 29)), (15, 29), (15, 29)),
        (Forms(shape=(15, 33), padded=True), (15, 33), (16, 48)),
    ],
)
def test_forms_say_how_large_a_matrix_is_and_is_written(forms, shape, written):
    found = forms.shape_of(jnp.zeros((17, 30)))
    assert found == shape and forms.written_shape(found) == written
