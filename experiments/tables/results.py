"""The tables of results in README and docs: file, rows and columns of each."""

from experiments.tables.cells import (
    Table,
    difference,
    gains,
    number,
    numbers,
    pair,
    percent,
    share,
    times,
)
from experiments.tables.quality import QUALITY
from experiments.tables.speed import SPEED

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
    "starts": Table(
        file="starts_wukong_m_h200",
        first="Wukong M, seconds since the process began",
        rows="empty cache; in FP8 from its start = in FP8",
        columns=numbers(
            "runs.{0}.$",
            "plan = planned_s; step 64 = step_64_s; FP8 is ready = fp8_steps_ready_s",
        ),
    ),
}

SERVING = {
    "candidates": Table(
        file="candidates_{0}",
        first="candidates",
        rows="1, `fp8_hstu`, 64 events, two CPU cores = cpu | 1; 64 = cpu | 64; "
        "512 = cpu | 512; "
        "1, `fp8_hstu_m`, 256 events, H200 = h200 | 1; 64  = h200 | 64; "
        "512  = h200 | 512",
        columns={
            "p50, ms": number("rows.candidates={1}.p50_us", 1, 1e3),
            "p99, ms": number("rows.candidates={1}.p99_us", 1, 1e3),
            "single passes over it": number(
                "rows.candidates={1}.over_single_passes", 0
            ),
        },
    ),
    "many_files": Table(
        file="many_files_cpu",
        first="what reads the rows",
        rows="pyarrow alone, every column = pyarrow alone; "
        "a first run: vocabularies, shards = vocabularies and shards; "
        "each epoch, in shuffled batches = an epoch of batches",
        columns=numbers(
            "cases.files=$,way={0}.rows_per_second",
            "rows a second of 15 files = 15; of 60 files = 60",
        )
        | {
            f"largest memory, GB, {files}": number(
                f"cases.files={files},way={{0}}.memory_bytes", 2, 1e9
            )
            for files in (15, 60)
        },
    ),
    "load": Table(
        file="load_cpu",
        first="requests a second",
        rows="100 = 0; 200 = 1; 400 = 2; 600 = 3; 800 = 4",
        columns=numbers("loads.{0}.$", "answered a second = answered_per_s")
        | numbers("loads.{0}.latency_ms.$", "p50, ms = p50; p99, ms = p99", digits=1),
    ),
    "clients": Table(
        file="clients_cpu",
        first="clients",
        rows="200 = 0",
        columns=numbers(
            "loads.{0}.$", "requests = requests; answered a second = answered_per_s"
        )
        | numbers("loads.{0}.latency_ms.$", "p50, ms = p50; p99, ms = p99", digits=1)
        | numbers("loads.{0}.$", "lost = lost; wrong = wrong")
        | numbers("load_before.$", "load before = 0", digits=1),
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
