"""The DLRM of `loka_jax.models` in PyTorch, compiled, for comparisons of time."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np


def is_installed() -> bool:
    """Returns whether PyTorch is there and sees a GPU."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return torch.cuda.is_available()


def compiled(
    model: Any, fields: int, dim: int, rows: int | None
) -> Callable[..., Callable[[], Any]]:
    """Returns a function from inputs to a call that waits for its result.

    Weights are random and in bfloat16, but for the head's, as in `loka_jax.models`.
    Programs are captured as CUDA graphs.

    Args:
        model: a `Dlrm` without norms.
        fields: embeddings of an example.
        dim: their dim.
        rows: of all tables together, which ids select from; None if the embeddings
            themselves are inputs.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    # jax-triton empties it at import, and PyTorch's compiler then finds no cache.
    if os.environ.get("TRITON_CACHE_DIR") == "":
        del os.environ["TRITON_CACHE_DIR"]

    def mlp(first: int, widths: tuple[int, ...]):
        layers: list[Any] = []
        for k, n in zip((first, *widths), widths, strict=False):
            layers += [nn.Linear(k, n), nn.ReLU()]
        return nn.Sequential(*layers).to(torch.bfloat16)

    class Dlrm(nn.Module):
        def __init__(self):
            super().__init__()
            self.bottom = mlp(13, (*model.bottom_mlp, dim))
            pairs = (fields + 1) * fields // 2
            self.top = mlp(dim + pairs, model.top_mlp)
            self.head = nn.Linear(model.top_mlp[-1], 1)
            low = torch.tril_indices(fields + 1, fields + 1, -1)
            self.register_buffer("at", low[0] * (fields + 1) + low[1])
            if rows is not None:
                self.table = nn.Embedding(rows, dim)

        def forward(self, dense, x):
            if rows is not None:
                x = self.table(x).to(torch.bfloat16)
            bottom = self.bottom(dense.to(torch.bfloat16))
            z = torch.cat([bottom[:, None], x], 1)
            pairs = torch.bmm(z, z.transpose(1, 2)).flatten(1)[:, self.at]
            top = self.top(torch.cat([bottom, pairs], 1))
            return self.head(top.float())[:, 0]

    network = Dlrm().cuda().eval()
    run = torch.compile(network, mode="reduce-overhead", dynamic=False)

    def call_of(*inputs: np.ndarray) -> Callable[[], Any]:
        """Returns a call: of the dense part on the device, else from the host."""
        on_host = [torch.from_numpy(np.asarray(x)) for x in inputs]
        on_device = [x.cuda() for x in on_host]
        on_device[1] = on_device[1].to(torch.int64 if rows else torch.bfloat16)

        def dense_part():
            with torch.inference_mode():
                run(*on_device)
                torch.cuda.synchronize()

        def whole():
            with torch.inference_mode():
                dense, ids = (x.cuda(non_blocking=True) for x in on_host)
                return run(dense, ids.to(torch.int64)).cpu().numpy()

        return dense_part if rows is None else whole

    return call_of
