"""Times stacks of wide dense layers: Wukong's FMB, the tower of MLPerf's DLRM-DCNv2.

    python experiments/bench/wide_stack.py --out wide_stack.json

Kernel time of a training pass (forward, and gradients of parameters and inputs) and of
inference with weights prepared once, with peak temporary memory and the SQNR of results
and gradients against XLA's in bfloat16. Cases, `--cases NAME@ROWS`:

    wukong_m    2048-2048-2048-2048-4096, block norm and hard_swish, linear at the end,
                the input normalized, too
    wukong_l    4608-4096-4096-4096-7680, the same
    wukong_xl   18432-8192-8192-8192-15360, the same
    mlperf      3456-1024-1024-512-256, bias and relu
    fp8_dlrm    384-4096-4096-1024, the same: the top MLP of that configuration on a GPU

Arms:

    xla bf16          XLA alone
    xla fp8           XLA alone, one site after another in FP8 with delayed scaling
    sites bf16        one site after another, by kernels where they serve it
    sites fp8         the same in FP8
    tails bf16        one operation with tails, in bfloat16
    tails fp8         one operation with tails, in FP8
    tails bf16 drhs   the same, weight gradients in bfloat16

`--norm layer` puts norms of whole rows in place of the cases' own.

Without a GPU times are wall clock: `--cases mlperf@64 --shrink 16`.
"""

import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

import tyro

from experiments.bench import result as results
from experiments.bench.arms import measure_arms, print_records
from loka_jax import nn
from loka_jax.normed import ActivationName, NormName

ARMS = ("xla bf16", "xla fp8", "tails bf16", "tails fp8")


class Stack(NamedTuple):
    """A stack of layers.

    Attributes:
        inputs: features of the rows.
        features: widths of the layers.
        norm, activation: of every layer, but of the last if `ends_linear`.
        use_bias: layers have a bias.
        ends_linear: the last layer is a product alone.
    """

    inputs: int
    features: tuple[int, ...]
    norm: NormName = "block"
    activation: ActivationName = "hard_swish"
    use_bias: bool = False
    ends_linear: bool = True

    def model(self, shrink: int) -> nn.Mlp:
        """Returns the layers in bfloat16, with widths divided by `shrink`."""
        return nn.Mlp(
            tuple(width // shrink for width in self.features),
            recipe="bf16",
            norm=self.norm,
            activation=self.activation,
            use_bias=self.use_bias,
            ends_linear=self.ends_linear,
            input_norm="none" if self.norm == "none" else "rms",
        )


STACKS = {
    "wukong_m": Stack(2048, (2048, 2048, 2048, 4096)),
    "wukong_l": Stack(4608, (4096, 4096, 4096, 7680)),
    "wukong_xl": Stack(18432, (8192, 8192, 8192, 15360)),
    "mlperf": Stack(3456, (1024, 1024, 512, 256), "none", "relu", True, False),
    "fp8_dlrm": Stack(384, (4096, 4096, 1024), "none", "relu", True, False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every case; printed only if None.
        cases: stacks and their rows.
        arms: of those above; the first is compared with.
        recipe: of FP8, with delayed scaling.
        norm: of every layer, in place of the case's own.
        shrink: divides all widths.
        budget_s: begin no case after that many seconds.
    """

    out: pathlib.Path | None = None
    cases: tuple[str, ...] = (
        "wukong_l@16384",
        "wukong_m@16384",
        "mlperf@65536",
        "mlperf@8192",
    )
    arms: tuple[str, ...] = ARMS
    recipe: str = "fp8_tensorwise_delayed"
    norm: NormName | None = None
    shrink: int = 1
    budget_s: float | None = None


def main(arguments: Arguments) -> dict[str, Any]:
    """Measures, prints, writes and returns the result."""
    start = time.perf_counter()
    result = results.head("wide_stack", arguments) | {"inputs": "N(0, 1)", "runs": []}
    for case in arguments.cases:
        seconds = time.perf_counter() - start
        if arguments.budget_s is not None and seconds > arguments.budget_s:
            print(f"stopped before {case}: {seconds:.0f} s are over")
            return result
        run = measure(case, arguments)
        result["runs"].append(run)
        result["seconds"] = time.perf_counter() - start
        print(f"{case} [{result['seconds']:.0f} s]")
        print_records(run["programs"])
        results.write(arguments.out, result)
    return result


def measure(case: str, arguments: Arguments) -> dict[str, Any]:
    """Returns the times of all arms of a case, and what they have in TFLOP/s."""
    name, _, rows = case.partition("@")
    stack, shrink, batch = STACKS[name], arguments.shrink, int(rows)
    if arguments.norm is not None:
        stack = stack._replace(norm=arguments.norm)
    inputs = stack.inputs // shrink
    model = stack.model(shrink)
    arms = _arms(model, arguments)
    records = measure_arms(model, arms, lambda m: ((m, inputs),), batch)
    sizes = zip((inputs, *model.features), model.features, strict=False)
    flops = 2.0 * batch * sum(k * n for k, n in sizes)
    for key, record in records.items():
        passes = 3 if key.startswith("training") else 1
        if "median_us" in record:
            record["tflop_per_s"] = passes * flops / record["median_us"] / 1e6
    return {"case": name, "batch": batch, "flops": flops, "programs": records}


def _arms(model: nn.Mlp, arguments: Arguments) -> dict[str, nn.Planned]:
    recipe, by_xla = arguments.recipe, model.clone(implementation="xla")
    arms = {
        "xla bf16": by_xla,
        "xla fp8": by_xla.clone(recipe=recipe),
        "sites bf16": model,
        "sites fp8": model.clone(recipe=recipe),
        "tails bf16": model.clone(fused=True),
        "tails fp8": model.clone(fused=True, recipe=recipe),
        "tails bf16 drhs": model.clone(fused=True, recipe=f"{recipe}_bf16_drhs"),
    }
    return {name: nn.Planned(arms[name]) for name in arguments.arms}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
