"""What the fused kernels are to reach in `dense_norm.py`, and what they reached."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

XLA_BF16 = ("xla_bf16", "xla_bf16_f32_gemm")
XLA_FP8 = ("xla_fp8_to_bf16", "xla_fp8_to_fp8")
XLA_BACKWARD = ("xla_bwd_of_z", "xla_bwd_of_xhat")
FP8_IO = ("fp8_to_fp8", "fp8_to_fp8_tensor")
BF16_IO = ("bf16_twin", "bf16_quantized")
LIBRARY = ("library_to_fp8", "library_to_fp8_tensor")
BACKWARD = ("bwd_fp8", "bwd_bf16", "bwd_bf16_of_fp8")
FUSED = (*FP8_IO, "fp8_to_bf16", *BF16_IO)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One thing to reach.

    Attributes:
        sentence: what is asked.
        measure: of a form's record: times faster than XLA's bfloat16 form, the same
            inside a command buffer, times faster than the better of XLA's forms for
            the same inputs, or the share of the floor.
        least: that it must be.
        forms: of which the best counts, or each one.
        where: whether it concerns a shape.
        each: whether every form must reach it.
    """

    sentence: str
    measure: Literal["vs_xla", "captured_vs_xla", "vs_best_xla", "of_floor"]
    least: float
    forms: tuple[str, ...]
    where: Callable[[int, int, int], bool]
    each: bool = False


def _is_small(k: int, n: int) -> bool:
    return max(k, n) <= 256


_FP8_IO = "K,N <= 256, M >= 32768: FP8 in and out at least 3.5x XLA bf16"
_BF16_IO = "K,N <= 256: bf16 in and out at least 2.5x XLA bf16"
_FEW_ROWS = "K,N <= 256, M = 2048 and 8192: at least 1.3x XLA bf16"

TARGETS = (
    Target(
        sentence=_FP8_IO,
        measure="vs_xla",
        least=3.5,
        forms=FP8_IO,
        where=lambda m, k, n: m >= 32768 and _is_small(k, n),
    ),
    Target(
        sentence=f"{_FP8_IO} and 60 % of its floor",
        measure="of_floor",
        least=0.6,
        forms=FP8_IO,
        where=lambda m, k, n: m >= 32768 and _is_small(k, n),
    ),
    Target(
        sentence=_BF16_IO,
        measure="vs_xla",
        least=2.5,
        forms=BF16_IO,
        where=lambda m, k, n: m >= 32768 and _is_small(k, n),
    ),
    Target(
        sentence=f"{_BF16_IO} and 75 % of its floor at M = 131072",
        measure="of_floor",
        least=0.75,
        forms=BF16_IO,
        where=lambda m, k, n: m == 131072 and _is_small(k, n),
    ),
    Target(
        sentence="512x512, M >= 32768: at least 2.2x XLA bf16",
        measure="vs_xla",
        least=2.2,
        forms=(*FP8_IO, *LIBRARY),
        where=lambda m, k, n: m >= 32768 and k == n == 512,
    ),
    Target(
        sentence="1024x1024, M >= 32768: at least 1.8x XLA bf16 (fused or library)",
        measure="vs_xla",
        least=1.8,
        forms=(*FP8_IO, *LIBRARY),
        where=lambda m, k, n: m >= 32768 and k == n == 1024,
    ),
    Target(
        sentence="never slower than 0.97x of the better of XLA's forms",
        measure="vs_best_xla",
        least=0.97,
        forms=FUSED,
        where=lambda m, k, n: True,
        each=True,
    ),
    Target(
        sentence="backward, K,N <= 512, M >= 32768: at least 1.8x XLA bf16",
        measure="vs_xla",
        least=1.8,
        forms=BACKWARD,
        where=lambda m, k, n: m >= 32768 and max(k, n) <= 512,
    ),
    Target(
        sentence=_FEW_ROWS,
        measure="vs_xla",
        least=1.3,
        forms=FP8_IO,
        where=lambda m, k, n: m in (2048, 8192) and _is_small(k, n),
    ),
    Target(
        sentence=f"{_FEW_ROWS}, inside a captured command buffer as well",
        measure="captured_vs_xla",
        least=1.3,
        forms=FP8_IO,
        where=lambda m, k, n: m in (2048, 8192) and _is_small(k, n),
    ),
)


def compare(records: dict[str, dict[str, Any]]) -> None:
    """Adds to each of our records how many times faster it is than XLA's forms.

    Args:
        records: of one shape, by form; those that were timed have `us`.
    """
    bf16 = _fastest(records, XLA_BF16, "us")
    fp8 = _fastest(records, XLA_FP8, "us")
    captured = _fastest(records, XLA_BF16, "captured_us")
    backward = _fastest(records, XLA_BACKWARD, "us")
    for name, record in records.items():
        if "us" not in record or name in (*XLA_BF16, *XLA_BACKWARD):
            continue
        base = backward if name in BACKWARD else bf16
        if base is not None:
            record["vs_xla"] = base / record["us"]
        # With bfloat16 inputs XLA's FP8 form would have to quantize them first.
        rivals = [bf16] if name in BF16_IO else [bf16, fp8]
        if name in FUSED and None not in rivals:
            record["vs_best_xla"] = min(filter(None, rivals)) / record["us"]
        if captured is not None and "captured_us" in record:
            record["captured_vs_xla"] = captured / record["captured_us"]


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a verdict for every target and shape that was measured.

    `is_met` is None where no form of the target was timed; `why` then says why.
    """
    verdicts = []
    for target in TARGETS:
        for row in rows:
            if not target.where(row["m"], row["k"], row["n"]):
                continue
            shape = {name: row[name] for name in ("m", "k", "n")}
            for verdict in _judge(target, row["forms"]):
                verdicts.append({"target": target.sentence} | shape | verdict)
    return verdicts


def _judge(target: Target, records: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    reached = {
        name: records[name][target.measure]
        for name in target.forms
        if target.measure in records.get(name, {})
    }
    if not reached:
        known = [records[name] for name in target.forms if name in records]
        reasons = [r[key] for r in known for key in NOT_TIMED if key in r]
        why = "; ".join(dict.fromkeys(reasons)) or "not measured"
        return [{"is_met": None, "least": target.least, "why": why}]
    if not target.each:
        best = max(reached, key=lambda name: reached[name])
        reached = {best: reached[best]}
    return [
        {
            "is_met": value >= target.least,
            "least": target.least,
            "reached": value,
            "form": name,
        }
        for name, value in reached.items()
    ]


NOT_TIMED = ("why_not", "wrong", "failed")  # what a record has instead of a time


def _fastest(records, names, measure: str) -> float | None:
    found = [records[n][measure] for n in names if measure in records.get(n, {})]
    return min(found, default=None)
