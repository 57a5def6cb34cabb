"""The tables of the quality of trained models."""

from experiments.tables.cells import (
    Table,
    change,
    difference,
    gains,
    number,
    numbers,
    pair,
    percent,
    spread,
    times,
)

_LAYER, _BLOCK = "bf16 --norm layer --activation", "bf16 --norm block --activation"
_ALL = "--norm block --activation hard_swish --no-bias"
QUALITY = {
    "quality": Table(
        file="generated_50m_{0}",
        first="model",
        rows="Wukong M = wukong_m_seeds_h200 | fp8*; "
        "Wukong M as published, by Dispatch = wukong_m_own_plan_seeds_h200 | dispatch; "
        "DHEN M = dhen_m_seeds | fp8*; "
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
    "assistments": Table(
        file="assistments_2017_seeds_h200",
        first="test fold 1",
        rows="bfloat16 = bf16; FP8 = fp8*",
        columns={
            "AUC": spread("arms.{0}.auc", 4),
            "NE": spread("arms.{0}.ne", 4),
            "AUC over bfloat16's": difference("arms.{0}.auc.minus_first", 4),
            "NE over bfloat16's": difference("arms.{0}.ne.minus_first", 4),
        },
    ),
    "assistments_2015": Table(
        file="assistments_2015_folds_h200",
        first="AUC on fold",
        rows="0; 1; 2; 3; 4",
        columns=numbers(
            "folds.{0}.arms.$.auc.mean", "bfloat16 = bf16; FP8 = fp8*", digits=4
        ),
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
    "against_regression": Table(
        file="against_regression_cpu",
        first="NE on test rows",
        rows="2,000 rows = small; rare clicks = rare_clicks; "
        "new ids every day = new_ids; numbers alone = only_dense; "
        "categories alone = only_categorical; "
        "lists = tastes; Criteo's sample = criteo; Criteo's attribution = attribution; "
        "MovieLens = movielens; ASSISTments 2017 = assistments; Frappe = frappe",
        columns={"regression with crosses": number("logs.{0}.regression_ne", 4)}
        | {
            f"{title}{unit}": number(f"logs.{{0}}.arms.{arm}.ne.{name}", 4)
            for title, arm in (("FP8", "fp8*"), ("bf16", "bf16"))
            for unit, name in ((", mean of seeds", "mean"), (", their spread", "std"))
        },
    ),
    "public": Table(
        file="public_models_h200",
        first="us",
        rows="ViT-B/16, training = vit | training; "
        "ViT-B/16, inference = vit | inference; "
        "ViT-B/16, `scan`, training = vit scan | training; "
        "ViT-B/16, `scan`, inference = vit scan | inference; "
        "DLRM, training = dlrm | training; "
        "DLRM, inference = dlrm | inference; "
        "DLRM, LayerNorm, training = dlrm norm | training; "
        "DLRM, LayerNorm, inference = dlrm norm | inference; "
        "DLRMResNet, training = dlrm resnet | training; "
        "DLRMResNet, inference = dlrm resnet | inference; "
        "DLRM-DCNv2, 8,192, training = recml | training; "
        "DLRM-DCNv2, 8,192, inference = recml | inference; "
        "DLRM-DCNv2, 65,536, training = recml 65536 | training; "
        "DLRM-DCNv2, 65,536, inference = recml 65536 | inference; "
        "five layers, 5,120, training = five 5120 | training; "
        "five layers, 5,120, inference = five 5120 | inference; "
        "five layers, 7,168, training = five 7168 | training; "
        "five layers, 7,168, inference = five 7168 | inference; "
        "five layers, 9,216, training = five 9216 | training; "
        "five layers, 9,216, inference = five 9216 | inference; "
        "pre-norm, 6,144, training = prenorm 6144 | training; "
        "pre-norm, 6,144, inference = prenorm 6144 | inference; "
        "pre-norm, 8,192, training = prenorm 8192 | training; "
        "pre-norm, 8,192, inference = prenorm 8192 | inference; "
        "pre-norm, 10,240, training = prenorm 10240 | training; "
        "pre-norm, 10,240, inference = prenorm 10240 | inference; "
        "pre-norm, 24,576, training = prenorm 24576 | training; "
        "pre-norm, 24,576, inference = prenorm 24576 | inference; "
        "two layers, training = tower | training; "
        "two layers, inference = tower | inference",
        columns=numbers(
            "models.{0}.us.{1} $.us",
            "as written = written; no option = default; FP8 everywhere = fp8",
        )
        | gains(
            "models.{0}.us.{1} written.us",
            "models.{0}.us.{1} default.us",
            "no option over as written",
        )
        | gains(
            "models.{0}.us.{1} written.us",
            "models.{0}.us.{1} fp8.us",
            "FP8 over as written",
        ),
    ),
    "adopted": Table(
        file="adopt_h200",
        first="training step, us",
        rows="DLRM-DCNv2, 8,192 = recml; five layers, 5,120 = five 5120",
        columns={
            "converted, bf16": number("models.{0}.bf16_us"),
            "after `adopt`": number("models.{0}.step_us"),
            "gain": times("models.{0}.bf16_us", "models.{0}.step_us"),
            "seconds of `adopt`": number("models.{0}.seconds"),
        },
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
