"""Names the device that a run uses, or says why it cannot."""

import os

import jax


def device_notice(require_gpu: bool) -> str:
    """Returns a sentence that names the device.

    Raises:
        ValueError: if a GPU is required and there is none, or it has no FP8 units, or
            JAX_PLATFORMS names a platform that is not available.
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
        capability = getattr(device, "compute_capability", "0")
        if float(capability) < 8.9:
            raise ValueError(
                f"{device.device_kind} has compute capability {capability}, and FP8 "
                "needs 8.9: run with JAX_PLATFORMS=cpu to emulate it."
            )
        return f"Running on {device.device_kind}."
    if require_gpu:
        raise ValueError(
            f"--require-gpu was given, but JAX found only a {device.platform}: install "
            "the extra cuda13 (uv run --extra cuda13 ...) or leave the option out."
        )
    return "No GPU found: running on the CPU, where FP8 is emulated."
