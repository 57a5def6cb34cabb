"""Times what you would pick instead: PyTorch, compiled, in bfloat16 and with torchao.

    python experiments/bench/torch_baseline.py --models mlperf_dcnv2 --out torch.json

The same models, shapes, loss and optimizer as `wide_models.py`, as PyTorch users write
them: the dense part of MLPerf's DLRM-DCNv2, without Mods, and of Wukong M, with all
three. A training step goes from gathered embeddings to new parameters: forward in
bfloat16, gradients of float32 parameters and of embeddings, clipping, and Adam in one
kernel. Inference has weights prepared once. Arms:

    bf16            torch.compile
    tensorwise      torchao's float8 training, and its dynamic quantization to serve
    rowwise         likewise
    ... filtered    the same training, at the layers that torchao's filter lets through

FP8 is everywhere but in the head, which is float32, and in layers whose sizes are no
multiples of 16. Times are those of the kernels, from the profiler, and of the whole
queue, which is longer where the host cannot keep up. Needs torch and torchao, no JAX,
and the root of this repository in PYTHONPATH.
To compile several arms at once, run them beside each other with --compile-only first.
"""

# Neither torch nor torchao is a part of this project's environment.
# pyright: reportMissingImports=false

import argparse
import gc
import importlib.metadata
import json
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.bench.origin import origin

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        PerTensor,
        quantize_,
    )
except ImportError as error:
    sys.exit(f"{error}: install torch 2.11 and torchao 0.17, which fits it.")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE, FIELDS = 13, 26
SETS = 2  # of inputs; one alone exceeds the L2
ROUNDS = 3
BLOCK = 256


def block_norm(x: Tensor) -> Tensor:
    """Returns x [..., n] with each block of up to 256 features at unit mean square."""
    blocks = x.float().unflatten(-1, (-1, min(BLOCK, x.shape[-1])))
    mean_square = blocks.square().mean(-1, keepdim=True)
    return (blocks * torch.rsqrt(mean_square + 1e-6)).flatten(-2).to(x.dtype)


def hard_swish(x: Tensor) -> Tensor:
    """Returns `x * relu6(x + 3) / 6`."""
    return functional.hardswish(x)


class Mlp(nn.Module):
    """Dense layers: with all Mods, or with biases and relu and without a norm."""

    def __init__(self, widths: list[int], *, mods: bool, ends_linear: bool = False):
        """Takes the widths, that of the input first."""
        super().__init__()
        self.mods, self.ends_linear = mods, ends_linear
        pairs = zip(widths, widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=not mods) for k, n in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the last layer's activations."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if not (self.ends_linear and i == len(self.layers) - 1):
                x = hard_swish(block_norm(x)) if self.mods else torch.relu(x)
        return x


class Ranking(nn.Module):
    """Base of the models: a head in float32, the only layer that is never FP8."""

    def __init__(self, features: int):
        """Takes the number of features that the head reads."""
        super().__init__()
        self.head = nn.Linear(features, 1)

    def logits(self, x: Tensor) -> Tensor:
        """Returns float32 logits."""
        with torch.autocast(DEVICE, enabled=False):
            head = self.head
            return functional.linear(x.float(), head.weight, head.bias)[:, 0]


class Dcnv2(Ranking):
    """The dense part of MLPerf's DLRM-DCNv2: `fp8_mlperf_dcnv2`."""

    dim, rank, num_cross_layers = 128, 512, 3

    def __init__(self):
        """Draws parameters."""
        super().__init__(256)
        width = (1 + FIELDS) * self.dim
        self.bottom = Mlp([DENSE, 512, 256, self.dim], mods=False)
        self.v = nn.ModuleList(
            nn.Linear(width, self.rank, bias=False)
            for _ in range(self.num_cross_layers)
        )
        self.u = nn.ModuleList(
            nn.Linear(self.rank, width) for _ in range(self.num_cross_layers)
        )
        self.deep = Mlp([width, 1024, 1024, 512, 256], mods=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Returns logits [B], of dense features [B, 13] and embeddings [B, 26, 128]."""
        x0 = torch.cat([self.bottom(dense), embeddings.flatten(1)], 1)
        x = x0
        for v, u in zip(self.v, self.u, strict=True):
            x = x0 * u(v(x)) + x
        return self.logits(self.deep(x))


class Wukong(Ranking):
    """The dense part of Wukong M with all Mods: `fp8_wukong_m`."""

    dim, num_layers, k, num_fm, num_lcb, dense_embeddings = 2 * 128, 4, 32, 32, 32, 12

    def __init__(self):
        """Draws parameters."""
        super().__init__(1024)
        self.d = self.dim // 2
        n = self.dense_embeddings + 2 * FIELDS  # = num_fm + num_lcb
        bottom = [DENSE, 512, 256, self.dense_embeddings * self.d]
        fmb = [n * self.k, 2048, 2048, 2048, self.num_fm * self.d]
        self.bottom = Mlp(bottom, mods=True)
        self.y_w = nn.ParameterList(  # [Y | W_L] of each layer
            torch.randn(n, self.k + self.num_lcb) / n**0.5
            for _ in range(self.num_layers)
        )
        self.fmb = nn.ModuleList(
            Mlp(fmb, mods=True, ends_linear=True) for _ in range(self.num_layers)
        )
        self.top = Mlp([n * self.d, 2048, 1024], mods=True)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Returns logits [B], of dense features [B, 13] and embeddings [B, 26, 256]."""
        first = self.bottom(dense).unflatten(1, (-1, self.d))
        x = torch.cat([first, embeddings.reshape(len(dense), -1, self.d)], 1)
        for y_w, fmb in zip(self.y_w, self.fmb, strict=True):
            p = torch.matmul(y_w.t().to(x.dtype), x)  # [B, k + num_lcb, d]
            fm = torch.matmul(x, p[:, : self.k].transpose(1, 2))  # [B, n, k]
            f = fmb(block_norm(fm.flatten(1))).unflatten(1, (-1, self.d))
            x = block_norm(torch.cat([f, p[:, self.k :]], 1) + x)
        return self.logits(self.top(x.flatten(1)))


MODELS = {"mlperf_dcnv2": Dcnv2, "wukong_m": Wukong}


def in_fp8(module: nn.Module, name: str) -> bool:
    """Returns whether torchao converts a layer: not the head, sizes of 16."""
    if not isinstance(module, nn.Linear) or name.endswith("head"):
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def make_inputs(model: Ranking, batch: int, dtype: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns sets of normal inputs."""
    torch.manual_seed(0)
    shapes = (batch, DENSE), (batch, FIELDS, model.dim)
    return [
        tuple(torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
        for _ in range(SETS)
    ]


def training(name: str, batch: int, arm: str) -> Callable[[int], Any]:
    """Returns a function that queues a number of training steps."""
    model = MODELS[name]().to(DEVICE)
    recipe, _, filtered = arm.partition(" ")
    if recipe != "bf16":
        config = Float8LinearConfig.from_recipe_name(recipe)
        chosen = _auto_filter_for_recipe(recipe, ["head"]) if filtered else in_fp8
        model = convert_to_float8_training(
            model, config=config, module_filter_fn=chosen
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    sets = make_inputs(model, batch, torch.bfloat16)
    for inputs in sets:
        for x in inputs:
            x.requires_grad_()
    labels = (torch.arange(batch, device=DEVICE) % 2).float()

    def loss_of(dense, embeddings):
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(dense, embeddings)
        return functional.binary_cross_entropy_with_logits(logits, labels)

    compiled = torch.compile(loss_of, dynamic=False)

    def run(count: int):
        loss = None
        for i in range(count):
            inputs = sets[i % SETS]
            loss = compiled(*inputs)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            for x in inputs:
                x.grad = None
        return loss

    return run


def inference(name: str, batch: int, arm: str) -> Callable[[int], Any]:
    """Returns a function that queues a number of forward passes."""
    model = MODELS[name]().to(DEVICE, torch.bfloat16).eval()
    model.head.float()
    if arm != "bf16":
        granularity = {"tensorwise": PerTensor, "rowwise": PerRow}[arm]()
        config = Float8DynamicActivationFloat8WeightConfig(granularity=granularity)
        quantize_(model, config, filter_fn=in_fp8)
    sets = make_inputs(model, batch, torch.bfloat16)
    compiled = torch.compile(model, dynamic=False)

    def run(count: int):
        with torch.no_grad():
            return [compiled(*sets[i % SETS]) for i in range(count)][-1]

    return run


def timed(run: Callable[[int], Any], calls: int) -> dict[str, Any]:
    """Returns the kernel time and the wall clock of a call, and the peak memory."""
    if DEVICE == "cpu":
        return {"wall_us": _wall_us(run, calls), "us": None, "memory_bytes": None}
    wall = [_wall_us(run, calls) for _ in range(ROUNDS)]
    torch.cuda.reset_peak_memory_stats()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(calls)
        torch.cuda.synchronize()
    kernels = [
        (event.key, event.self_device_time_total / calls, event.count / calls)
        for event in profile.key_averages()
        if event.self_device_time_total
    ]
    kernels.sort(key=lambda kernel: -kernel[1])
    return {
        "us": sum(us for _, us, _ in kernels),
        "wall_us": statistics.median(wall),
        "kernels": sum(count for _, _, count in kernels),
        "longest": kernels[:12],
        "memory_bytes": torch.cuda.max_memory_allocated(),
    }


def _wall_us(run: Callable[[int], Any], calls: int) -> float:
    _wait()
    start = time.perf_counter()
    run(calls)
    _wait()
    return (time.perf_counter() - start) / calls * 1e6


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(name: str, batch: int, key: str, options: Any) -> dict[str, Any]:
    """Returns the record of an arm: its times, or why it failed."""
    kind, _, arm = key.partition(" ")
    torch._dynamo.reset()
    start = time.perf_counter()
    try:
        run = {"training": training, "inference": inference}[kind](name, batch, arm)
        run(SETS)
        _wait()
        record = {"compile_s": time.perf_counter() - start}
        return record if options.compile_only else record | timed(run, options.calls)
    except Exception as error:  # an arm may not compile, or fit, here
        return {"failed": str(error)[:500]}
    finally:
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    """Measures, prints and writes after every arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[16384])
    parser.add_argument("--arms", nargs="+", default=["bf16", "tensorwise", "rowwise"])
    kinds = ["training", "inference"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--budget-s", type=float, help="begin no arm after that many s")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    packages = ("torch", "torchao", "triton")
    result: dict[str, Any] = {
        "benchmark": "torch_baseline",
        "command": shlex.join(["python", *sys.argv]),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        **origin(),
        "runs": [],
    }
    start = time.perf_counter()
    for name in options.models:
        for batch in options.batches:
            run = {"model": name, "batch": batch, "programs": {}}
            result["runs"].append(run)
            for key in _keys(options.kinds, options.arms):
                seconds = time.perf_counter() - start
                if options.budget_s is not None and seconds > options.budget_s:
                    return print(f"stopped before {name} {batch} {key}")
                record = measure(name, batch, key, options)
                run["programs"][key] = record
                brief = {k: v for k, v in record.items() if k != "longest"}
                print(f"{name} {batch} {key} [{seconds:.0f} s]: {brief}", flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


def _keys(kinds: list[str], arms: list[str]) -> list[str]:
    """Returns the programs of a model: the filter is one of training."""
    pairs = [(kind, arm) for kind in kinds for arm in arms]
    return [f"{k} {a}" for k, a in pairs if k == "training" or "filtered" not in a]


if __name__ == "__main__":
    main()
