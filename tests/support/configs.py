"""Small forms of registered configurations, which train on a CPU in seconds.

A command line takes them, too: `tiny_config("fp8_dlrm")` is the value of `--config`.
"""

import dataclasses

from experiments.configs import get_config
from loka_jax.train.config import Config, EmbeddingConfig, LoopConfig

_ROWS = (50, 20, 10, 5, 4, 3, 30, 40, 8, 9, 10, 11, 12)
# What is smaller in each model.
_DLRM = {"bottom_mlp": (32,), "top_mlp": (32, 16)}
_MODELS = {
    "fp8_dlrm": _DLRM,
    "bf16_dlrm": _DLRM,
    "csv_dlrm": _DLRM,
    "fp8_dcnv2": {"num_cross_layers": 1, "deep_mlp": (32, 16)},
    "criteo_dcnv2": {"deep_mlp": (32, 16)},
    "frappe_wukong": {"fmb_mlp": (16,), "top_mlp": (16,)},
    "fp8_mmoe": {
        "bottom_mlp": (32,),
        "num_experts": 2,
        "expert_mlp": (32, 16),
        "tower_mlp": (16,),
    },
}


def tiny(name: str) -> Config:
    """Returns the small form of a configuration, `NAME_tiny`."""
    config = get_config(name)
    loop = LoopConfig(batch_size=128, max_steps=8, log_every=2)
    if config.data.kind == "generated":
        loop = LoopConfig(batch_size=128, eval_every=8, log_every=2)
        sizes = {"examples": 2048, "eval_examples": 512, "rows": _ROWS}
        config = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, **sizes),
            embedding=EmbeddingConfig(),
            optim=dataclasses.replace(config.optim, warmup_steps=0),
        )
    model = config.model.clone(**_MODELS[name])
    return dataclasses.replace(config, name=f"{name}_tiny", model=model, loop=loop)


def tiny_config(name: str) -> str:
    """Returns the value of `--config` that names a small form."""
    return f"{__file__}:{name}"


def fp8_dlrm() -> Config:
    """Returns the small form for a command line."""
    return tiny("fp8_dlrm")


def bf16_dlrm() -> Config:
    """Returns the small form for a command line."""
    return tiny("bf16_dlrm")


def csv_dlrm() -> Config:
    """Returns the small form for a command line."""
    return tiny("csv_dlrm")
