"""The time of a step and its memory, as the mesh planner and Dispatch predict them.

    dense     the sites by Dispatch's times, where it has any; else by their sizes
    update    of the dense parameters, by their bytes
    rows ...  lookups, updates, exchanges and sums, by the mesh planner
    host      what a step waits for the host, by its share of a call

Real steps differ: what is learned of measured ones is their factor.
"""

import dataclasses
import json
import math
from collections.abc import Sequence

import jax

from loka_jax.data import Schema
from loka_jax.dispatch.first_use import bf16_us, sites_us
from loka_jax.dispatch.group_times import group_us
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, make_plan
from loka_jax.nn import Site
from loka_jax.search.history import Case
from loka_jax.search.space import Point
from loka_jax.train.config import Config
from loka_jax.train.mesh.devices import shape_of
from loka_jax.train.model import model_of
from loka_jax.train.plan_files import OFF
from loka_jax.train.planner.mesh_plan import GB, Estimate, Mesh, Rates, estimate
from loka_jax.train.planner.workload import Workload, workload_of

_FLOPS_US = 400e6  # of a site's three products, where no times are known
# The dense part of a step, without the update, over its sites: Wukong M's on an H200.
_DENSE_OVER_SITES = 1.3


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Predicts points; what they have in common is worked out once.

    Attributes:
        performance: what Dispatch knows of times here; None without a GPU.
    """

    schema: Schema
    performance: PerformanceModel | None
    rates: Rates
    workloads: dict[str, Workload | float] = dataclasses.field(default_factory=dict)

    @classmethod
    def here(cls, schema: Schema) -> "Predictor":
        """Returns the predictor for this machine."""
        is_gpu = jax.default_backend() == "gpu"
        performance = local_performance().performance if is_gpu else None
        return cls(schema, performance, _rates())

    def __call__(self, point: Point) -> Case:
        """Returns a point with its prediction."""
        config, share = point.config, 0.0
        key = _structure(config)
        if key not in self.workloads:
            self.workloads[key] = _workload(config, self.schema, self.performance)
        workload, steps = self.workloads[key], config.loop.steps_per_call
        if isinstance(workload, Workload):
            workload = dataclasses.replace(workload, steps_per_call=steps)
            found = estimate(workload, Mesh(*shape_of(config.mesh)), self.rates)
            update = _update_us(workload, self.rates)
            host = found.us["host"] - update  # which waits for the device meanwhile
            us = found.us | {"update": update, "host": host}
            share = _share(found, self.rates)
        else:
            us = {"dense": workload, "host": 0.0}
        host = us.pop("host")
        us["host"] = max(host, self.rates.call_us / steps - sum(us.values()))
        return Case(
            choices=point.choices,
            batch_size=config.loop.batch_size,
            us={name: part for name, part in us.items() if part > 0},
            memory_share=share,
        )


def _share(found: Estimate, rates: Rates) -> float:
    return found.memory_bytes / (GB * rates.memory_gb * rates.memory_share)


def _update_us(workload: Workload, rates: Rates) -> float:
    """Returns the time in which gradients are read, and the rest read and written."""
    num_bytes = 2 * workload.state_bytes - workload.gradient_bytes
    return num_bytes / (1e3 * rates.gather_gb_s)


def _structure(config: Config) -> str:
    """Returns what decides a step's work, as a key."""
    identity = config.identity()
    parts = {name: identity[name] for name in ("model", "embedding", "optim", "plan")}
    loop, mesh = config.loop, config.mesh
    sizes = loop.batch_size, loop.microbatches, shape_of(mesh), mesh.sync
    return json.dumps([parts, sizes, mesh.sync_every], sort_keys=True)


def _workload(
    config: Config, schema: Schema, performance: PerformanceModel | None
) -> Workload | float:
    """Returns the work of a step; of an event log, the time of its sites alone."""
    gpus = math.prod(shape_of(config.mesh))
    dense_us = None
    if performance is not None or config.data.is_log:
        sites = model_of(config, schema, gpus).list_sites(DispatchPlan())
        once = _DENSE_OVER_SITES * _sites_us(config, sites, performance)
        dense_us = once * config.loop.microbatches
    if config.data.is_log:
        assert dense_us is not None
        return dense_us
    return workload_of(config, schema, config.loop.batch_size // gpus, dense_us)


def _sites_us(
    config: Config, sites: Sequence[Site], performance: PerformanceModel | None
) -> float:
    """Returns the microseconds of a short run's sites in a step."""
    if performance is None:
        return 3 * sum(site.flops for site in sites) / _FLOPS_US
    if config.plan == OFF:
        return _by_recipe_us(sites, performance)
    options = config.dispatch
    rules, limits = options.by_pattern, options.limits
    plan = make_plan(sites, performance, limits=limits, rules=rules)
    return sites_us(plan, sites, performance)


def _by_recipe_us(sites: Sequence[Site], performance: PerformanceModel) -> float:
    """Returns the microseconds of sites in their own recipes, and of their groups."""
    us, roofline = 0.0, performance.roofline
    apart = [site for site in sites if roofline is None or not site.in_group]
    if roofline is not None:
        recipes = {site.path: site.plan.choice.recipe for site in sites}
        groups = {site.group for site in sites if site.in_group and site.group}
        us = sum(group_us(x, recipes, "training", roofline) for x in groups)
    return us + sum(_site_us(site, performance) for site in apart)


def _site_us(site: Site, performance: PerformanceModel) -> float:
    """Returns the microseconds of a site in its own recipe."""
    if site.attention is not None:
        return bf16_us(site, performance)
    times = performance.estimates(site.spec).entry.times.get("training", {})
    names = site.plan.choice.name, f"xla {site.recipe}"
    known = [times[name] for name in names if name in times]
    return known[0] if known else bf16_us(site, performance)


def _rates() -> Rates:
    """Returns the planner's rates, with the memory of this device if it is known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return Rates() if limit is None else Rates(memory_gb=limit / GB, memory_share=1.0)
