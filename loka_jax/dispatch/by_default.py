"""What runs at the sites of a converted model for which nobody chose.

    bfloat16      of operands in float32 by XLA; by kernels and in groups where both
                  training and inference are predicted to be faster
    as written    on a CPU; where operands are in bfloat16 and XLA's product is the
                  fastest; and where they are float32 and so small that casts cost more
                  than bfloat16 saves
    FP8           never: nobody knows its errors in this model

A conversion is decided when it is traced, and a trace does not tell whether it will be
differentiated. So both passes count.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures

from loka_jax.chosen import Chosen
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import is_open, make_plan
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.work import roles_of
from loka_jax.measure.roofline import Roofline
from loka_jax.nn import Site
from loka_jax.recipe import ROLES
from loka_jax.site import BF16, SiteSpec

_FP8 = "FP8 needs a recipe, or a plan that knows its errors"
# A product of float32 is at half the rate of bfloat16 (TF32).
_F32_OVER_BF16 = 2.0


def choose(sites: Sequence[Site], in_float32: Collection[str]) -> Mapping[str, Chosen]:
    """Returns what runs at the open sites of a model on this machine, by path.

    Args:
        in_float32: the paths of sites whose operands are float32.
    """
    paths = [site.path for site in sites if is_open(site)]
    if sites and sites[0].plan.device.platform != "gpu":
        return dict.fromkeys(paths, Chosen(None, "there is no GPU"))
    performance = _known_here()
    if performance is None:
        reason = f"no times are known of this device; {_FP8}"
        return {x: Chosen(BF16 if x in in_float32 else None, reason) for x in paths}
    return chosen_by(performance, sites, in_float32)


def chosen_by(
    performance: PerformanceModel, sites: Sequence[Site], in_float32: Collection[str]
) -> Mapping[str, Chosen]:
    """Returns what runs at the open sites of a model by these times, by path."""
    training, inference = (
        dict(make_plan(sites, performance, roles=roles).decisions)
        for roles in (ROLES, roles_of("inference"))
    )
    specs = {site.path: site.spec for site in sites}
    roofline = performance.roofline
    chosen: dict[str, Chosen] = {}
    for path, decision in training.items():
        own = _chosen(decision, inference[path])
        if own.choice == BF16 and path not in in_float32:
            own = own._replace(choice=None)  # which is the product as written
        elif own.choice == BF16 and roofline is not None:
            if gain_of_bf16_us(specs[path], roofline) <= 0:
                reason = "casts would cost more than bfloat16 saves: so it was written"
                own = Chosen(None, f"{reason}; {_FP8}")
        chosen[path] = own
    return chosen


@functools.cache
def _known_here() -> PerformanceModel | None:
    """Returns the times in bfloat16 on this machine, read once.

    In a thread: the caller traces a program, of which measuring is no part.
    """
    with futures.ThreadPoolExecutor(1) as pool:
        known = pool.submit(local_performance).result().performance
    return None if known is None else known.in_bf16()


def _chosen(training: Decision, inference: Decision) -> Chosen:
    choice = training.choice
    if choice != inference.choice:
        names = f"{choice.name} in training, {inference.choice.name} in inference"
        return Chosen(BF16, f"the fastest are {names}; {_FP8}")
    if training.speedup is None or choice == BF16:
        return Chosen(choice, f"no kernels are known to be faster; {_FP8}")
    how = "measured" if training.spread is None else "predicted"
    if choice.provider == "group":
        return Chosen(choice, f"{training.reason}, as {how}; {_FP8}")
    speed = f"{training.speedup:.2f} times XLA's bfloat16"
    return Chosen(choice, f"{speed}, as {how}; {_FP8}")


def gain_of_bf16_us(spec: SiteSpec, roofline: Roofline) -> float:
    """Returns the microseconds by which bfloat16 beats float32 in a training step.

    Products take half the time, rows are read and written in half the bytes; the cast
    of the weight is a kernel of its own, those of rows are part of others.
    """
    m, k, n = spec.m, spec.k, spec.n
    roles = len(ROLES)
    flops = 2.0 * roles * m * k * n
    saved = flops * (_F32_OVER_BF16 - 1) / roofline.bf16_flops_per_us
    saved += 2 * roles * m * (k + n) / roofline.bytes_per_us
    return saved - roofline.launch_us - 6 * k * n / roofline.bytes_per_us
