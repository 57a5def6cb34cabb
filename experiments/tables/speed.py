"""The tables of times of models and of their sites."""

import itertools

from experiments.tables.cells import (
    Row,
    Table,
    gains,
    number,
    numbers,
    percent,
    times,
)

_WUKONG = "Wukong M, 16,384 = wukong_m 16384; "
_L = "Wukong L, 16,384 = wukong_l 16384; "
_XL = "Wukong XL, 4,096 = wukong_xl 4096; "
_REST = (
    "DHEN L, 16,384 = dhen_l 16384; DLRM-DCNv2, 65,536 = mlperf_dcnv2 65536; "
    "DLRM-DCNv2, 8,192 = mlperf_dcnv2 8192"
)
_RECIPES = (
    "bf16 = xla bf16; `fp8_tensorwise` = xla fp8_tensorwise; "
    "`fp8_tensorwise_delayed` = xla fp8_tensorwise_delayed; "
    "`fp8_rowwise` = xla fp8_rowwise; "
    "`fp8_tensorwise` by torchao's filter = torchao fp8_tensorwise; "
    "`fp8_rowwise` by torchao's filter = torchao fp8_rowwise; "
    "our kernels, `fp8_tensorwise_delayed` = ours fp8; Dispatch = dispatch"
)


def _whole_steps(gpu: str, rows: str) -> Table:
    xla, ours = "runs.{0}.xla bf16.", "runs.{0}.auto fp8*."
    columns = {
        "XLA bf16, us": number(f"{xla}step.median_us"),
        "loka_jax FP8, us": number(f"{ours}step.median_us"),
        "gain": times(f"{xla}step.median_us", f"{ours}step.median_us"),
        "XLA bf16, GB": number(f"{xla}memory_bytes", 1, 1e9),
        "loka_jax FP8, GB": number(f"{ours}memory_bytes", 1, 1e9),
    }
    file = f"whole_steps_{gpu}"
    return Table(file=file, first="model, batch", rows=rows, columns=columns)


def _wide_models(phase: str) -> Table:
    at = f"runs.model={{0}},batch={{1}}.programs.{phase} $.us"
    xla, bf16, fp8 = (at.replace("$", x) for x in ("xla bf16", "ours bf16", "ours fp8"))
    columns = numbers(at, "XLA bf16, us = xla bf16; kernels bf16, us = ours bf16")
    columns |= numbers(at, "kernels FP8, us = ours fp8")
    columns |= {"gain by kernels": times(xla, bf16), "by FP8": times(bf16, fp8)}
    return Table(
        file="wide_models_unmodified_h200",
        first=phase,
        rows="Wukong M, 16,384 = wukong_m plain | 16384; "
        "Wukong L, 16,384 = wukong_l plain | 16384; "
        "Wukong XL, 4,096 = wukong_xl | 4096; "
        "DHEN L, 16,384 = dhen_l | 16384; "
        "DLRM-DCNv2, 65,536 = mlperf_dcnv2 | 65536; "
        "DLRM-DCNv2, 8,192 = mlperf_dcnv2 | 8192",
        columns=columns | {"both": times(xla, fp8)},
    )


def _widths() -> Table:
    at = "runs.model=tower layer {0},batch={1}.programs."
    xla, bf16, fp8 = (
        f"{at}training {x}.us" for x in ("xla bf16", "ours bf16", "ours fp8")
    )
    least = "runs.model=tower layer {0},batch={1}.least_us.training $"
    columns = numbers(f"{at}training $.us", "XLA bf16, us = xla bf16")
    columns |= numbers(f"{at}training $.us", "kernels bf16, us = ours bf16")
    columns |= numbers(f"{at}training $.us", "kernels FP8, us = ours fp8")
    columns |= numbers(least, "products alone, bf16 = bf16; products alone, FP8 = fp8")
    columns |= {"gain by kernels": times(xla, bf16), "by FP8": times(bf16, fp8)}
    scored = (f"{at}inference {x}.us" for x in ("ours bf16", "ours fp8"))
    sizes = itertools.product((8192, 65536), (256, 512, 768, 1024))
    rows = (f"{width:,}, {rows:,} = {width} | {rows}" for rows, width in sizes)
    return Table(
        file="widths_h200",
        first="width, rows",
        rows="; ".join(rows),
        columns=columns | {"by FP8, inference": times(*scored)},
    )


def _fp8_at_best(row: Row) -> str:
    """Returns the gain if all three products took the rate of FP8, the rest as now."""
    m, k, n = (row(f"sites.{{0}}.site.{size}") for size in "mkn")
    bf16, fp8 = (row(f"roofline.{x}_flops_per_us") for x in ("bf16", "fp8"))
    saved = 6 * m * k * n * (1 / bf16 - 1 / fp8)
    us = row("sites.{0}.times.training.* bf16") - saved
    return f"{row('sites.{0}.times.training.xla bf16') / us:.2f}x"


def _recipes(file: str, *runs: str) -> Table:
    columns = {}
    for i, rows in enumerate(runs):
        at = f"runs.{i}.programs.training "
        columns[f"{rows} rows, us"] = number(f"{at}{{0}}.us")
        columns[f"over bf16, {rows}"] = times(f"{at}xla bf16.us", f"{at}{{0}}.us")
    return Table(file=file, first="training", rows=_RECIPES, columns=columns)


SPEED = {
    "whole_steps_h100": _whole_steps("h100", _WUKONG + _L + _REST),
    "whole_steps_h200": _whole_steps("h200", _WUKONG + _XL + _REST),
    "wide_training": _wide_models("training"),
    "wide_inference": _wide_models("inference"),
    "towers": Table(
        file="towers_h200",
        first="3072-3072-1536, swish, 8,192 rows",
        rows="LayerNorm, training = tower layer | training; "
        "LayerNorm, inference = tower layer | inference; "
        "RMSNorm, training = tower rms | training; "
        "RMSNorm, inference = tower rms | inference; "
        "no norm, training = tower none | training; "
        "no norm, inference = tower none | inference",
        columns=numbers(
            "runs.model={0}.programs.{1} $.us",
            "XLA bf16, us = xla bf16; kernels bf16, us = ours bf16; "
            "kernels FP8, us = ours fp8",
        )
        | gains(
            "runs.model={0}.programs.{1} xla bf16.us",
            "runs.model={0}.programs.{1} ours fp8.us",
            "FP8 over XLA bf16",
        ),
    ),
    "widths": _widths(),
    "recipes_wukong_xl": _recipes("recipes_wukong_xl_h200", "4,096"),
    "recipes_dcnv2": _recipes("recipes_mlperf_dcnv2_h100", "65,536", "8,192"),
    "torch": Table(
        file="torch_{0}_h200",
        first="training by PyTorch, us",
        rows="DLRM-DCNv2, 65,536 = mlperf_dcnv2; Wukong M, 16,384 = wukong_m",
        columns=numbers(
            "runs.0.programs.training $.us",
            "bf16; torchao, tensorwise = tensorwise; torchao, rowwise = rowwise",
        ),
    ),
    "mods_times": Table(
        file="mods_wukong_{0}_h100",
        first="training, 16,384 rows",
        rows="M, no Mod = m | plain; M, no bias = m | no_bias; M, BlockNorm = m | block"
        "; M, HardSwish = m | hard_swish; M, all three = m | all; "
        "L, no Mod = l | plain; L, all three = l | all",
        columns=numbers(
            "programs.{1} training $.us", "XLA bf16, us = xla bf16; ours FP8 = ours fp8"
        )
        | gains(
            "programs.plain training xla bf16.us",
            "programs.{1} training ours fp8.us",
            "over XLA bf16 without Mods",
        ),
    ),
    "unseen": Table(
        file="unseen_{0}_h200",
        first="dense part",
        rows="tower, training = tower | training; tower, inference = tower | inference"
        "; block tower, training = block | training; "
        "block tower, inference = block | inference; DLRM, training = dlrm | training"
        "; DLRM, inference = dlrm | inference; "
        "wide layers, training = wide | training; "
        "wide layers, inference = wide | inference",
        columns=numbers(
            "models.*.times.{1} $.median_us",
            "XLA bf16, us = xla bf16; kernels bf16 = auto bf16; "
            "kernels FP8 = auto fp8_tensorwise_delayed_bf16_drhs; "
            "Dispatch = checked; all candidates measured = best",
        ),
    ),
    "wide_dlrm": Table(
        file="step_split_fp8_dlrm_wide_{0}",
        first="whole step",
        rows="H200 = h200; H100 = h100",
        columns=numbers(
            "arms.$.step.median_us",
            "XLA bf16, us = xla bf16; XLA, its FP8 recipe = xla fp8*; "
            "kernels bf16 = auto bf16; Dispatch = dispatch",
        )
        | gains(
            "arms.auto bf16.step.median_us",
            "arms.dispatch.step.median_us",
            "over kernels bf16",
        ),
    ),
    "sites": Table(
        file="nvidia_h200",
        first="site at 65,536 rows",
        rows="256 x 128, bias, relu = 28; 384 x 256, bias, relu = 30; "
        "256 x 256, LayerNorm, swish = 29; 512 x 256, LayerNorm, swish = 34; "
        "512 x 512, LayerNorm, swish = 35; 512 x 1,024, LayerNorm, relu = 36; "
        "1,024 x 512, LayerNorm, relu = 37; 1,024 x 1,024, LayerNorm, relu = 38",
        columns=numbers("sites.{0}.times.training.$", "XLA bf16, us = xla bf16")
        | gains(
            "sites.{0}.times.training.xla bf16",
            "sites.{0}.times.$",
            "bf16 kernel = training.pallas bf16; FP8 kernel = training.pallas fp8*; "
            "FP8 in and out = training in out.pallas fp8*",
        )
        | {"FP8 at best": _fp8_at_best},
    ),
    "fused_kernels": Table(
        file="dense_norm_h200",
        first="M x K x N",
        rows="131,072 x 128 x 128 = 131072 | 128 | 128; "
        "2,048 x 128 x 128 = 2048 | 128 | 128; "
        "131,072 x 256 x 256 = 131072 | 256 | 256; "
        "2,048 x 256 x 256 = 2048 | 256 | 256; "
        "131,072 x 512 x 512 = 131072 | 512 | 512; "
        "2,048 x 512 x 512 = 2048 | 512 | 512",
        columns=numbers(
            "rows.m={0},k={1},n={2}.forms.$.us",
            "XLA bf16, us = xla_bf16*; XLA FP8 = xla_fp8_to_*; "
            "kernel, FP8 in and out = fp8_to_fp8_tensor; "
            "XLA's backward = xla_bwd*; kernel's backward = bwd_bf16_of_fp8",
            digits=1,
        ),
    ),
    "fm_lcb": Table(
        file="{0}",
        first="16,384 examples",
        rows="Wukong M = fm_lcb_h200 | forms.pallas 4* | forms.backward pallas 3*; "
        "Wukong L = fm_lcb_l_h200 | forms.pallas 3 1 1* | forms.backward pallas 1*",
        columns={
            "forward, XLA bf16, us": number("rows.0.forms.xla_gram.us"),
            "kernel": number("rows.0.{1}.us"),
            "backward, XLA bf16, us": number("rows.0.forms.backward xla_broadcast.us"),
            "kernel ": number("rows.0.{2}.us"),
        },
    ),
    "jagged_attention": Table(
        file="{2}_h200",
        first="size of heads, rows of sequences",
        rows="128, 8 of 4,096, forward = m | forward | jagged_attention; "
        "both ways = m | both | jagged_attention; "
        "128, 32 of differing lengths, forward = "
        "m_log_normal | forward | jagged_attention; "
        "both ways  = m_log_normal | both | jagged_attention; "
        "256, 8 of 4,096, forward = h256 | forward | jagged_attention_heads; "
        "both ways   = h256 | both | jagged_attention_heads; "
        "64, 64 of 512, forward = h64 | forward | jagged_attention_heads; "
        "both ways    = h64 | both | jagged_attention_heads; "
        "64, 64 of differing lengths, forward = "
        "h64_log_normal | forward | jagged_attention_heads; "
        "both ways     = h64_log_normal | both | jagged_attention_heads; "
        "64, 37 of 0 to 777, forward = h64_odd | forward | jagged_attention_heads; "
        "both ways      = h64_odd | both | jagged_attention_heads",
        columns=numbers(
            "rows.case={0}.forms.$ {1}.us",
            "XLA, dense, us = xla dense; XLA, in blocks = xla jagged; "
            "cuDNN's softmax = cudnn softmax; kernel = pallas",
        )
        | {"kernel, TFLOP/s": number("rows.case={0}.forms.pallas {1}.tflops")},
    ),
    "attention_fp8": Table(
        file="attention_tanh_h200",
        first="forward",
        rows="bf16, heads of 128, 4,096 rows = m bf16 | tanh; "
        "FP8 = m fp8 | tanh; "
        "FP8, 3/8 of tanh a polynomial = m fp8 | poly 3/8; "
        "bf16, heads of 64, 512 rows = h64 bf16 | tanh; "
        "FP8  = h64 fp8 | tanh; "
        "FP8, heads of 256, 4,096 rows = h256 fp8 | tanh",
        columns=numbers(
            "rows.case={0},tanh={1}.$",
            "kernel, us = us; TFLOP/s = tflops; with rows in FP8's order, us = all_us",
        ),
    ),
    "attention_choice": Table(
        file="attention_choice_h200",
        first="forward, casts and layouts included, heads of",
        rows="64; 128; 256",
        columns=numbers("heads.{0}.$", "bf16, us = bf16_us; FP8, us = fp8_us")
        | {"gain": times("heads.{0}.bf16_us", "heads.{0}.fp8_us")},
    ),
    "hstu": Table(
        file="hstu_h200",
        first="HSTU, training, sequences of 4,096 rows",
        rows="M, 8 of them, XLA, dense, bf16 = m | dense bf16; "
        "our kernels, bf16 = m | ours bf16; "
        "the same, products in FP8 = m | ours fp8; "
        "L, 4 of them, our kernels, bf16 = l | ours bf16; "
        "the same, products in FP8  = l | ours fp8",
        columns=numbers(
            "rows.case={0},arm={1}.$", "samples a second = samples_per_s; us = us"
        )
        | {
            "share of the bf16 peak": percent("rows.case={0},arm={1}.mfu"),
            "memory, GB": number("rows.case={0},arm={1}.memory_bytes", 1, 1e9),
        },
    ),
    "jagged_softmax": Table(
        file="jagged_softmax_h200",
        first="rows of sequences, heads of",
        rows="8 of 4,096, 128, forward = m | forward; both ways = m | both; "
        "128 of 256, 128, forward = t256 | forward; both ways  = t256 | both; "
        "64 of up to 512, 64, forward = h64_log_normal | forward; "
        "both ways   = h64_log_normal | both",
        columns=numbers(
            "rows.case={0}.forms.$ {1}.us",
            "XLA, in blocks, us = xla jagged; cuDNN, padded = cudnn; kernel = pallas",
        )
        | {
            "over cuDNN": times(
                "rows.case={0}.forms.cudnn {1}.us", "rows.case={0}.forms.pallas {1}.us"
            )
        },
    ),
    "embedding_update": Table(
        file="embedding_update_h200",
        first="rows",
        rows="100,000; 1,000,000; 10,000,000; 100,000,000",
        columns=numbers(
            "cases.rows={0}.us.$.median",
            "row-wise AdaGrad, XLA, us = rowwise_adagrad; "
            "by Triton = rowwise_adagrad_triton; scatter-add SGD = scatter_add",
        ),
    ),
}
