"""Names the device that a run uses, or says why it cannot."""

import os

import jax


def device_notice(require_gpu: bool) -> str:
    """Returns a sentence that names the device.

    Raises:
        ValueError: if a GPU is required and there is none, or JAX_PLATFORMS names a
            platform that is not available.
    """
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError):  # the latter if a plugin is not installed
        platforms = os.environ.get("JAX_PLATFORMS")
        raise ValueError(
            f"JAX cannot run on JAX_PLATFORMS={platforms}: install the extra cuda13 "
            "(uv run --extra cuda13 ...) or unset JAX_PLATFORMS."
        ) from None
    if device.platform == "gpu":
        return f"Running on {device.device_kind}."
    if require_gpu:
        raise ValueError(
            f"--require-gpu was given, but JAX found only a {device.platform}: install "
            "the extra cuda13 (uv run --extra cuda13 ...) or leave the option out."
        )
    return "No GPU found: running on the CPU, where FP8 is emulated."
