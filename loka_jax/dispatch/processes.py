"""What several processes must do alike, which the first of them decides."""

import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all


def same_text(text: str) -> str:
    """Returns the first process's text in all of them; all must call it."""
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(broadcast_one_to_all(np.int32(content.size)))
    if not size:
        return ""
    padded = np.resize(content, size) if content.size else np.zeros(size, np.uint8)
    return np.asarray(broadcast_one_to_all(padded)).tobytes().decode()
