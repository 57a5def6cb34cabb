"""The benchmark of public models: what is imported, and what its arms share."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from experiments.bench import converted


def test_a_module_is_imported_without_what_its_packages_import(tmp_path):
    package = tmp_path / "someones" / "models"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("import something_not_installed\n")
    (package / "sizes.py").write_text("WIDTH = 8\n")
    (package / "mlp.py").write_text("from .sizes import WIDTH\n")
    assert converted.load(tmp_path, "someones.models.mlp").WIDTH == 8
    with pytest.raises(ValueError, match="has no someones.models.dlrm: name a check"):
        converted.load(tmp_path, "someones.models.dlrm")


def test_arms_share_weights_batches_and_dropout(tmp_path):
    layers = [linen.Dense(16), linen.relu, linen.Dropout(0.5, deterministic=False)]
    public = converted.Public(
        checkout=tmp_path,
        model=linen.Sequential([*layers, linen.Dense(16)]),
        batch=lambda key: ((jax.random.normal(key, (32, 16)),), jnp.float32(1.0)),
        loss=lambda out, target: jnp.mean((out - target) ** 2),
        learning_rate=1e-2,
    )
    arguments = converted.Arguments(steps=3, seeds=2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        written, in_bf16 = (
            converted.trained(public, arm, arguments) for arm in ("as written", "bf16")
        )
    # Casts to bfloat16 change a loss by less than 1 %, another batch by several.
    assert jnp.allclose(jnp.array(written), jnp.array(in_bf16), rtol=1e-2)
    assert abs(written[0][0] / written[1][0] - 1) > 0.02
