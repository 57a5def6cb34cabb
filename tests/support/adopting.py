"""Stands in for a GPU in `dispatch.adopt`: times of sites, and of whole steps."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import pytest

from loka_jax.dispatch import adopt as adopt_lib
from loka_jax.dispatch.local import Local
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.table import Table
from loka_jax.measure.timing import Timing
from loka_jax.site import BF16
from tests.support.dispatch import HEADER, EverySite

DELAYED = "xla fp8_tensorwise_delayed"
FAST = {BF16.name: 2.0, DELAYED: 1.0}


class Gpu(NamedTuple):
    """The times of any site by candidate, and of whole steps, in microseconds."""

    times: Mapping[str, float] = FAST
    bf16_us: float = 300.0
    plan_us: float = 200.0


@contextlib.contextmanager
def stood_in(gpu: Gpu) -> Iterator[None]:
    """Lets `adopt` find these times; kernels run on the CPU, where FP8 is emulated."""
    found = Local(PerformanceModel.of(Table(HEADER, EverySite(gpu.times))))

    def time_chains(chains, **options):
        for chain in chains.values():
            jax.block_until_ready(chain(1))
        us = {"bf16": gpu.bf16_us, "plan": gpu.plan_us}
        return {name: Timing.of([us[name]]) for name in chains}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopt_lib, "local_performance", lambda: found)
        patch.setattr(adopt_lib, "time_chains", time_chains)
        yield
