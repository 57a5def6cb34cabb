"""Trains models of several sizes on the generated log: quality against cost.

    python experiments/bench/size_curve.py --jobs 4 --out size_curve.json

For each size the GFLOP of training an example (three times forward, from shapes) and
the share of the reachable gap that is closed, (1 - NE) / (1 - best NE): DLRM and DCN V2
that grow in width, and Wukong from a few megaflop to M. All see the same examples once,
in the same recipe and batches. Each is trained at several rates of the embedding rows,
whose best one depends on their width; that with the lowest NE on the validation
examples counts, by its NE on the test examples.
`--sizes dlrm "wukong S"` selects some; with `--gpus 2` the runs are dealt to two GPUs.

References:
    Wukong, arXiv 2403.02545, figure 1: quality against GFLOP an example.
"""

import concurrent.futures
import dataclasses
import operator
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.paired_seeds import Dealer
from experiments.cli import parse
from loka_jax import nn
from loka_jax.data.planted import NUM_DENSE
from loka_jax.train.config import Config

_ROWS = 16
_VALID_NE = operator.itemgetter("valid_ne")
_LOWER = ("--optim.lr", "1e-3")
_WUKONG_S = (
    *("--num-layers 3 --dense-embeddings 14 --embeddings-per-field 1".split()),
    *("--embedding.dim 64 --k 24 --fm-embeddings 16 --lcb-embeddings 16".split()),
    *("--fmb-mlp 512 512 --top-mlp 512 256".split()),
)
# Options over a configuration.
SIZES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dlrm": ("fp8_dlrm_small", ()),
    "dlrm 1024": ("fp8_dlrm_small", ("--top-mlp", "1024", "1024", "512", *_LOWER)),
    "dlrm 4096": ("fp8_dlrm_wide", ()),
    "dcnv2": ("fp8_dcnv2", ()),
    "dcnv2 1024": ("fp8_dcnv2", ("--deep-mlp", "1024", "1024", "512", *_LOWER)),
    "dcnv2 mlperf": ("fp8_mlperf_dcnv2", ()),
    "wukong": ("fp8_wukong", ()),
    "wukong S": ("fp8_wukong_m", _WUKONG_S),
    "wukong M": ("fp8_wukong_m", ()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every run; printed only if None.
        sizes: of those above.
        rows_lr: rates of the embedding rows at which each size is trained.
        recipe: of all runs.
        examples: of training.
        batch_size: of training.
        seed: of all runs.
        jobs: runs at a time.
        gpus: that the runs are dealt to; None leaves the environment as it is.
    """

    out: pathlib.Path | None = None
    sizes: tuple[str, ...] = tuple(SIZES)
    rows_lr: tuple[float, ...] = (0.3, 0.1, 0.03)
    recipe: str = "bf16"
    examples: int = 25_165_824
    batch_size: int = 4096
    seed: int = 0
    jobs: int = 1
    gpus: int | None = None


def main(arguments: Arguments) -> dict[str, Any]:
    """Trains, prints, writes and returns the result."""
    jax.config.update("jax_platforms", "cpu")  # the GPU's memory is for the runs
    result = results.head("size_curve", arguments)
    sizes: dict[str, dict] = {n: costs(n) | {"runs": {}} for n in arguments.sizes}
    result["sizes"] = sizes
    pairs = [(name, rate) for rate in arguments.rows_lr for name in arguments.sizes]
    dealer = Dealer(arguments.jobs, arguments.gpus)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = {pool.submit(_train, *pair, dealer, arguments): pair for pair in pairs}
        failed = []
        for job in concurrent.futures.as_completed(jobs):
            name, rate = jobs[job]
            if error := job.exception():  # the other runs are kept
                failed.append(str(error))
                continue
            record, run = sizes[name], job.result()
            result["versions"] = run.pop("versions")
            record["runs"][str(rate)] = run
            record["best"] = best = min(record["runs"].values(), key=_VALID_NE)
            print(
                f"{name:14} {record['gflop']:8.4f} GFLOP "
                f"{record['parameters'] / 1e6:7.2f} M  rate {rate:g}: "
                f"{run['share_of_gap']:.2%}, best {best['share_of_gap']:.2%}",
                flush=True,
            )
            results.write(arguments.out, result)
    if failed:
        raise RuntimeError("\n".join(failed))
    return result


def config_of(name: str) -> Config:
    """Returns the configuration of a size."""
    base, options = SIZES[name]
    return parse(["--config", base, *options])


def _train(
    name: str, rate: float, dealer: Dealer, arguments: Arguments
) -> dict[str, Any]:
    """Returns what a run reached, trained in a process of its own."""
    base, options = SIZES[name]
    extra = [*options, "--data.examples", str(arguments.examples)]
    extra += ["--loop.batch-size", str(arguments.batch_size)]
    extra += ["--loop.eval-every", "4096"]  # and at the end
    extra += ["--optim.rows-lr", str(rate)]
    summary = dealer.train_once(base, arguments.recipe, arguments.seed, extra)
    ne, best = summary["final_eval"]["ne"], summary["best_possible_ne"]
    return {
        "ne": ne,
        "valid_ne": list(summary["valid_ne"].values())[-1],
        "best_possible_ne": best,
        "share_of_gap": (1 - ne) / (1 - best),
        "auc": summary["final_eval"]["auc"],
        "steps": summary["steps"],
        "skipped_steps": summary["skipped_steps"],
        "seconds": summary["seconds"],
        "versions": summary["versions"],
    }


def costs(name: str) -> dict[str, Any]:
    """Returns the GFLOP of training an example, and the dense parameters."""
    config = config_of(name)
    shapes = (_ROWS, NUM_DENSE), (_ROWS, len(config.data.rows), config.embedding.dim)
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sites = nn.list_sites(config.model, *inputs)
    flop = sum(6 * s.spec.m * s.spec.k * s.spec.n * (s.batch or 1) for s in sites)
    variables = jax.eval_shape(config.model.init, jax.random.key(0), *inputs)
    count = sum(p.size for p in jax.tree.leaves(variables["params"]))
    return {"gflop": flop / _ROWS / 1e9, "parameters": count}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
