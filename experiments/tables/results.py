"""The tables of results in README and docs: file, rows and columns of each."""

from experiments.tables.cells import (
    Table,
    change,
    difference,
    gains,
    number,
    numbers,
    pair,
    percent,
    share,
    spread,
    times,
)

_WUKONG = "Wukong M, 16,384 = wukong_m 16384; "
_L = "Wukong L, 16,384 = wukong_l 16384; "
_XL = "Wukong XL, 4,096 = wukong_xl 4096; "
_REST = (
    "DHEN L, 16,384 = dhen_l 16384; DLRM-DCNv2, 65,536 = mlperf_dcnv2 65536; "
    "DLRM-DCNv2, 8,192 = mlperf_dcnv2 8192"
)
_DCNV2 = "; small DCN V2, 65,536 = dcnv2 plain 65536; "
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
    at = f"runs.{{0}}.{phase} $.us"
    xla, bf16, fp8 = (at.replace("$", x) for x in ("xla bf16", "ours bf16", "ours fp8"))
    columns = numbers(at, "XLA bf16, us = xla bf16; kernels bf16, us = ours bf16")
    columns |= numbers(at, "kernels FP8, us = ours fp8")
    columns |= {"gain by kernels": times(xla, bf16), "by FP8": times(bf16, fp8)}
    return Table(
        file="wide_models_h100",
        first=phase,
        rows=f"{_WUKONG}{_L}{_REST}{_DCNV2}small DCN V2, 8,192 = dcnv2 plain 8192",
        columns=columns | {"both": times(xla, fp8)},
    )


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
        rows="384 x 256, bias, relu = 30; 256 x 128, bias, relu = 28; "
        "512 x 512, LayerNorm, swish = 35; 512 x 256, LayerNorm, swish = 34; "
        "256 x 256, LayerNorm, swish = 29",
        columns=numbers("sites.{0}.times.training.$", "XLA bf16, us = xla bf16")
        | gains(
            "sites.{0}.times.training.xla bf16",
            "sites.{0}.times.$",
            "bf16 kernel = training.pallas bf16; FP8 kernel = training.pallas fp8*; "
            "FP8 in and out = training in out.pallas fp8*",
        ),
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

_LAYER, _BLOCK = "bf16 --norm layer --activation", "bf16 --norm block --activation"
_ALL = "--norm block --activation hard_swish --no-bias"
QUALITY = {
    "quality": Table(
        file="generated_50m_{0}",
        first="model",
        rows="Wukong M = wukong_m_seeds_h200 | fp8*; DHEN M = dhen_m_seeds | fp8*; "
        "Wukong L = wukong_l_seeds_h100 | fp8*; "
        "DLRM-DCNv2 = mlperf_dcnv2_65536_h100 | fp8*; "
        "DLRM-DCNv2 = mlperf_dcnv2_seeds_h100 | fp8*; "
        "with its bottom MLP in FP8 = mlperf_dcnv2_recipe_h200 | fp8*; "
        "small DCN V2 = dcnv2_65536_h100 | fp8*; "
        "small DCN V2 = dcnv2_seeds_h100 | fp8*; "
        "wide DLRM by Dispatch = wide_dispatch_seeds_h100 | dispatch; "
        "small DLRM, all in FP8 = dlrm_seeds_h200 | fp8_tensorwise",
        columns={
            "batch": number("config.loop.batch_size"),
            "sites in FP8": pair("fp8_sites.{1}.fp8", "fp8_sites.{1}.total", " of "),
            "pairs": lambda row: str(row.count("arms.bf16.ne.values")),
            "NE against bfloat16's": change("{1}", "bf16"),
        },
    ),
    "quality_of_options": Table(
        file="generated_50m_{0}",
        first="option",
        rows="tables in bfloat16 = bf16_tables_seeds_h200 | *dtype bf16 | *dtype f32; "
        "int8 gradients, two GPUs = int8_gradients_seeds_2xh100 | *int8 | *f32; "
        "int8 gradients, four GPUs = int8_gradients_seeds_4xh100 | *int8 | *f32",
        columns={
            "pairs": lambda row: str(row.count("arms.{2}.ne.values")),
            "NE against float32's": change("{1}", "{2}"),
        },
    ),
    "e5m2": Table(
        file="generated_50m_wide_e5m2_seeds_h200",
        first="test NE, by seed",
        rows="bf16; FP8, gradients in E5M2 = dispatch",
        columns=numbers("arms.{0}.ne.values.$", "0; 1; 2; 3; 4", digits=3),
    ),
    "diverged": Table(
        file="divergence_mlperf_dcnv2_h200",
        first="in bfloat16",
        rows="nothing = fp8; drhs = bf16 drhs; fwd = bf16 fwd; "
        "the cross network = bf16 cross; dlhs of two other layers = bf16 dlhs of 12",
        columns={"diverged at step": number("arms.{0}.diverged_at")},
    ),
    "not_diverged": Table(
        file="divergence_mlperf_dcnv2_h200",
        first="in bfloat16",
        rows="everything = bf16; the deep network = bf16 deep; dlhs = bf16 dlhs; "
        "dlhs of the last two layers = bf16 dlhs of 23",
        columns={"NE at the end": number("arms.{0}.valid_ne.6144", 5)},
    ),
    "public_logs": Table(
        file="{0}_seeds_h200",
        first="data, model",
        rows="Frappe, DLRM = frappe_dlrm; Frappe, DCN V2 = frappe_dcnv2; "
        "Criteo sample, DLRM = criteo_dlrm; Criteo sample, DCN V2 = criteo_dcnv2",
        columns={
            "test AUC, bf16": spread("arms.bf16.auc", 5),
            "delayed FP8 - bf16": difference(
                "arms.fp8_tensorwise_delayed_bf16_drhs.auc.minus_first", 5
            ),
            "FP8 by rows - bf16": difference("arms.fp8_rowwise.auc.minus_first", 5),
        },
    ),
    "tasks": Table(
        file="tasks_movielens_cpu",
        first="NE minus that of a model for the label",
        rows="shared bottom; MMoE = mmoe",
        columns={
            label: difference(f"arms.{{0}}.{label}.minus_alone", 4)
            for label in ("like", "love")
        },
    ),
    "mods_quality": Table(
        file="generated_41m_mods_wukong_m{0}_h100",
        first="NE of Wukong M",
        rows=f"no Mod =  | {_LAYER} swish; no bias =  | {_LAYER} swish --no-bias; "
        f"HardSwish =  | {_LAYER} hard_swish; "
        f"BlockNorm, of FM too =  | {_BLOCK} swish; "
        f"all three = _whole_rows | bf16 {_ALL}; "
        f"all three, FP8 = _whole_rows | fp8_tensorwise_delayed {_ALL}",
        columns=numbers(
            "runs.{1}.0.$",
            "at 4,000 steps = valid_ne.4000; at 20,000 steps = valid_ne.20000; "
            "on test examples = final_eval.ne",
            digits=5,
        ),
    ),
    "public": Table(
        file="public_models_h200",
        first="us",
        rows="DLRM, LayerNorm, training = dlrm norm | training; "
        "DLRM, LayerNorm, inference = dlrm norm | inference; "
        "DLRMResNet, training = dlrm resnet | training; "
        "DLRMResNet, inference = dlrm resnet | inference; "
        "DLRM-DCNv2, training = recml | training; "
        "DLRM-DCNv2, inference = recml | inference; "
        "five layers, training = five 3000 | training; "
        "five layers, inference = five 3000 | inference",
        columns=numbers(
            "models.{0}.us.{1} $.us",
            "as written = written; converted, no option = default; "
            "converted, bf16 = bf16; converted, FP8 everywhere = fp8",
        )
        | gains(
            "models.{0}.us.{1} written.us",
            "models.{0}.us.{1} default.us",
            "no option over as written",
        ),
    ),
    "converted": Table(
        file="converted_cpu",
        first="last loss",
        rows="`CfDnn` of jax-recommenders = ranker; "
        "`TransformerLM` of Flax's lm1b = transformer; `TwoTower` of nectarine = "
        "retriever",
        columns=numbers(
            "models.{0}.arms.$.last",
            "float32 = as written; bf16; delayed FP8 = fp8_tensorwise_delayed; "
            "FP8 by rows = fp8_rowwise",
            digits=4,
        )
        | {
            "delayed over bf16": percent(
                "models.{0}.arms.fp8_tensorwise_delayed.over_bf16.mean", 2
            )
        },
    ),
}

DISPATCH = {
    "draws": Table(
        file="survey_{0}",
        first="rank correlation with real errors",
        rows="Frappe, DLRM = frappe_dlrm_h200; Frappe, DCN V2 = frappe_dcnv2_cpu; "
        "Criteo sample, DLRM = criteo_dlrm_h200; "
        "Criteo sample, DCN V2 = criteo_dcnv2_h200; generated, DLRM = fp8_dlrm_h200",
        columns=numbers("prediction.learned.$", "errors = count")
        | numbers(
            "prediction.$.rank_correlation",
            "learned distribution = learned; N(0, 1) = normal",
            digits=2,
        ),
    ),
    "live_errors": Table(
        file="error_coverage_cpu",
        first="intervals",
        rows="of eight models",
        columns={
            "count": number("count"),
            "inside (95 % stated)": percent("inside", 1),
            "below the upper end (97.5 %)": percent("below", 1),
        },
    ),
    "predictions": Table(
        file="predictions_{0}",
        first="GPU, pass",
        rows="H200, training = h200 | training; H200, inference = h200 | inference; "
        "H100 from tables of the H200, training = h100_from_h200 | training; "
        "H100 from tables of the H200, inference = h100_from_h200 | inference",
        columns={
            "median error": percent("{1}.median_error", 1),
            "mean cost of its choice": percent("{1}.mean_regret", 1),
            "largest": percent("{1}.largest_regret"),
            "mean cost of XLA's bf16": percent("{1}.mean_regret_by_xla"),
        },
    ),
    "checked_plans": Table(
        file="predictions_h200",
        first="plan",
        rows="`auto`, training = training.auto; `tune`, training = training.tune; "
        "`auto`, inference = inference.auto",
        columns={
            "mean cost": percent("{0}.by_time.mean_regret", 1),
            "largest": percent("{0}.by_time.largest_regret", 1),
            "candidates timed a site": number("{0}.by_time.mean_measured", 1),
        },
    ),
    "looks": Table(
        file="looks_h200",
        first="model, batch",
        rows="Wukong M, 16,384 = fp8_wukong_m 16384; "
        "small DLRM, 65,536 = fp8_dlrm_small 65536",
        columns=numbers("runs.{0}.$.median_us", "step, us = step; look, us = look")
        | {"share of the time": percent("runs.{0}.cost", 1)},
    ),
    "observed": Table(
        file="observed_wukong_m_h100",
        first="model, step",
        rows="Wukong M, 650 = 650",
        columns={
            "sites in FP8": pair("fp8_sites.after", "sites", " of "),
            "examples a second": number("examples_per_second.{0}"),
            "over bf16": times(
                "examples_per_second.{0}", "bf16_examples_per_second.{0}"
            ),
        },
    ),
}

SERVING = {
    "load": Table(
        file="load_cpu",
        first="requests a second",
        rows="100 = 0; 200 = 1; 400 = 2; 600 = 3; 800 = 4",
        columns=numbers("loads.{0}.$", "answered a second = answered_per_s")
        | numbers("loads.{0}.latency_ms.$", "p50, ms = p50; p99, ms = p99", digits=1),
    ),
    "latency": Table(
        file="latency_h200",
        first="rows: p50 / p99, us",
        rows="1; 16; 128; 1,024; 8,192",
        columns={
            f"{kind}: {arm}": pair(f"{at}.p50_us", f"{at}.p99_us", " / ")
            for kind in ("dense", "whole")
            for arm in ("xla bf16", "torch bf16", "ours fp8")
            for at in [f"models.fp8_dlrm.kind={kind},batch={{0}},arm={arm}"]
        },
    ),
}

_SUM = "rows.mib={0}.forms.$.median_us"
SEVERAL = {
    f"collectives_{devices}": Table(
        file=f"collectives_{devices}",
        first="MiB",
        rows="1; 4; 16; 64; 256",
        columns=numbers(_SUM, "f32, us = f32; bf16; int8, kernels = int8 triton b128")
        | gains(_SUM.replace("$", "f32"), _SUM, "int8 over f32 = int8 triton b128"),
    )
    for devices in ("4xh100", "4xh200")
}
SEVERAL |= {
    "exchange": Table(
        file="exchange_4xh100",
        first="on the wire",
        rows="f32, XLA = f32 xla; bf16, XLA = bf16 xla; bf16, kernels = bf16 triton; "
        "int8, kernels = int8 triton",
        columns=numbers(
            "cases.dim=$.median_us",
            "D 16: fetch, us = 16.forms.{0}.fetch; "
            "D 16: give back = 16.forms.{0}.give_back; "
            "D 128: fetch = 128.forms.{0}.fetch; "
            "D 128: give back = 128.forms.{0}.give_back",
        ),
    ),
    "two_dimensions": Table(
        file="two_dimensions_cpu",
        first="groups: NE, %",
        rows="2 = 2 | 1?41; 4 = 4 | 2; 8 = 8 | 2?83",
        columns={
            title: difference(f"arms.{arm}.relative_difference", 2, 100)
            for title, arm in {
                "exact": "gradients {0}",
                "alone, c = 1": "weights {0} c=1",
                "c = M": "weights {0} c={0}",
                "c = M, k = 4": "weights {0} c={0} k=4",
                "c = M, k = 16": "weights {0} c={0} k=16",
            }.items()
        },
    ),
    "scaling": Table(
        file="scaling_{0}",
        first="configuration, processes",
        rows="`fp8_dlrm`, wide, 1 = wide_4xh200 | 1; "
        "`fp8_dlrm`, wide, in bf16, 1 = wide_4xh100 | 1; "
        "`fp8_wukong_m`, 1 = wukong_m_4xh100 | 1; "
        "`fp8_dlrm_small`, 4 = each_4xh200 | 1; "
        "`fp8_dlrm_small`, 4 on H100 = each_4xh100 | 1; "
        "`fp8_dlrm_small`, 1 = 4xh200 | 2; "
        "one step a call, 1 = 1_a_call_4xh200 | 1; "
        "one step a call, 4 = 1_a_call_4xh200 | 2; "
        "1e8 rows, 4 = 1e8_4xh200 | 1",
        columns=numbers(
            "rows.$", "GPUs = {1}.gpus; one GPU, us = 0.step_us; these = {1}.step_us"
        )
        | {
            "of linear": percent("rows.{1}.of_linear"),
            "with input": share("rows.0.with_input_us", "rows.{1}.with_input_us"),
        },
    ),
    "planner": Table(
        file="plan_simulated_fp8_wukong_l",
        first="GPUs (mesh)",
        rows="256 (1 x 256) = 8; 1,024 (4 x 256) = 10; 4,096 (16 x 256) = 12",
        columns={
            "us a step": number("meshes.{0}.step_us"),
            "of linear from 256": share("meshes.8.step_us", "meshes.{0}.step_us"),
        },
    ),
}
TABLES = SPEED | QUALITY | DISPATCH | SERVING | SEVERAL
