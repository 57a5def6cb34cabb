"""FP8 for a model of your own, where it pays: one call before training, or while it.

    adopted = adopt(model, variables, loss, batches)
    model, variables = adopted.model, adopted.variables       # train these

    sites       listed from the traced loss
    errors      of FP8 products, on the operands of the batches and their gradients
    kernels     that may be the fastest, checked and timed: `first_use`
    plan        the fastest within the limits: `plan`
    scales      set by these batches, so that the first step runs as all later ones
    step        the gradients of a batch by the plan and in bfloat16, timed as a whole:
                the plan is dropped if it is not the faster one

It is asked again as it was asked before, with the variables as they are then. What was
checked and timed is kept in the user's cache.
"""

import dataclasses
import functools
import io
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from loka_jax import jsonfile
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.attention import in_bf16 as bf16_of
from loka_jax.dispatch.candidates import why_not_runnable
from loka_jax.dispatch.first_use import Budget, CheckedPlan, check_plan
from loka_jax.dispatch.header import Header, header_here
from loka_jax.dispatch.local import local_performance
from loka_jax.dispatch.model_loss import RECIPES, ModelLoss, loss_of
from loka_jax.dispatch.outlook import Remedies, last_line, with_rows
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, is_open
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Decision, Limits
from loka_jax.dispatch.printing import print_plan
from loka_jax.dispatch.processes import same_text
from loka_jax.dispatch.review import LEAST_STEPS, live_intervals
from loka_jax.dispatch.table import RoleErrors
from loka_jax.measure.timing import time_chains
from loka_jax.nn import Site
from loka_jax.scaling import DelayedScaling
from loka_jax.site import BF16

_LEAST_GAIN = 1.02  # of a step by the plan, below which it stays in bfloat16
_ROUND_US = 1e5  # of calls that are timed together
_REMEDIES = Remedies(
    errors="give adopt() batches of which the loss's gradients are finite",
    seconds="adopt(..., seconds=...) allows more",
    recipe="convert the model with another, nn.convert(model, recipe='fp8_tensorwise')",
)


@dataclasses.dataclass(frozen=True)
class Adopted:
    """A model with its plan, ready to train.

    Attributes:
        model: used as the one that was given.
        variables: those that were given, with scales; None of an NNX model, which has
            its own.
        plan: its choices, with their reasons.
        sentence: what is gained; or what would change it, if FP8 is not used.
        identity: of the model, its rows, the device and the kernels.
    """

    model: Any
    variables: Any
    plan: DispatchPlan
    sentence: str
    identity: "Identity"

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan to a file, for `adopt(..., plan=path)`."""
        saved = _Saved(self.identity, plans.as_json(self.plan))
        jsonfile.write(pathlib.Path(path), dataclasses.asdict(saved))


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a plan is of.

    Attributes:
        header: the device, versions and kernels.
        sites: by path, the sizes and surroundings of a site, and its recipe.
    """

    header: Header
    sites: dict[str, str]


@dataclasses.dataclass
class _Saved:
    identity: Identity
    plan: dict[str, Any]


def adopt(
    model: Any,
    variables: Any,
    loss: Callable[..., Any],
    batches: Sequence[Any],
    *,
    seconds: float = 180.0,
    limits: Limits = DEFAULT_LIMITS,
    plan: str | os.PathLike | None = None,
    say: Callable[[str], None] = print,
) -> Adopted:
    """Returns a model that runs FP8 where that is accurate enough and pays.

    All processes of a run call it alike, and get the first one's plan.

    Args:
        model: a Linen model with sites, such as `nn.convert` returns; or an NNX model
            of `nn.convert`, of which a copy is returned.
        variables: of the Linen model; None of an NNX model.
        loss: `loss(model, variables, batch)`, of an NNX model `loss(model, batch)`:
            the loss of a batch as the training step computes it, or a tuple of which
            it is the first. It calls `model.apply`, and is traced under `jax.jit`.
        batches: at least 3, each a tree of arrays, placed as the training step's are.
        seconds: the budget, which checks and times of kernels keep to. The gradients
            are compiled beside: for errors, for scales and, if time is left, to be
            timed as a whole. With 0 nothing is measured: sites keep the recipes that
            they have, and their scales are set.
        plan: a file of `Adopted.save`, whose plan is followed; nothing is measured.
        say: takes each sentence, and the table.

    Raises:
        ValueError: for fewer batches; for sites whose delayed scales are not set and
            that the loss does not run; for a file that is no plan, or one of another
            model, other rows, or another device.
    """
    if len(batches) < LEAST_STEPS:
        raise ValueError(
            f"adopt() was given {len(batches)} batches, and errors of FP8 are known "
            f"from {LEAST_STEPS:.0f} on: give it more."
        )
    of_loss = loss_of(model, variables, loss)
    share = 1 / _devices(batches[0])  # of the rows that one device has
    sites = of_loss.sites(batches[0])
    _check_all_run(of_loss, sites)
    sites = [site if site.is_local else with_rows(site, share) for site in sites]
    if plan is not None:
        followed = _read(pathlib.Path(plan), sites)
        sentence = f"The plan of {plan} is followed."
        return _adopted(of_loss, followed, batches, sites, sentence)
    if not seconds:
        sentence = "With 0 seconds sites keep their recipes; their scales are set."
        say(sentence)
        return _adopted(of_loss, DispatchPlan(), batches, sites, sentence)
    performance, notes = local_performance()
    if performance is None:
        make_plan = functools.partial(plans.make_plan, limits=limits)
        sentence = last_line(DispatchPlan(), sites, None, make_plan, _REMEDIES)
        say(sentence)
        own = plans.make_plan(sites, None)
        return _adopted(of_loss, own, batches, sites, sentence)
    chosen = _Choosing(of_loss, sites, batches, limits, seconds, say)
    planned, sentence, more = chosen.choose(performance)
    say(f"{_table(planned.plan, (*notes, *more), sites)}\n{sentence}")
    return dataclasses.replace(planned, sentence=sentence)


class _Timed(NamedTuple):
    """Microseconds of a step in bfloat16 and by the plan."""

    bf16_us: float
    plan_us: float


@dataclasses.dataclass
class _Choosing:
    """Chooses the plan of a model within a budget."""

    of_loss: ModelLoss
    sites: list[Site]
    batches: Sequence[Any]
    limits: Limits
    seconds: float
    say: Callable[[str], None]

    def __post_init__(self):
        self._start = time.monotonic()

    def choose(
        self, performance: PerformanceModel
    ) -> tuple[Adopted, str, tuple[str, ...]]:
        """Returns the model with its plan, the last sentence, and notes."""
        bf16 = {site.path: BF16 for site in self.sites if is_open(site)}
        self.say(
            f"Looking for FP8 at {len(bf16)} sites, for {self.seconds:g} seconds at "
            f"most: errors of {len(self.batches)} batches, kernels, the whole step."
        )
        seen = self.of_loss.errors(bf16, self.batches) if bf16 else {}
        live = {path: live_intervals(x, RECIPES) for path, x in seen.items()}
        errors = {path: x for path, x in live.items() if any(x.values())}

        def make_plan(
            sites: Sequence[Site],
            known: PerformanceModel,
            errors: Mapping[str, RoleErrors] = errors,
        ) -> DispatchPlan:
            return plans.make_plan(sites, known, limits=self.limits, errors=errors)

        plan, performance, notes = self._checked(make_plan, performance)
        sentence = last_line(plan, self.sites, performance, make_plan, _REMEDIES)
        planned = self._planned(plan, sentence)
        slower = "the whole step is faster in it"
        of_sites = {x.path: Decision(bf16_of(x), slower) for x in self.sites}
        in_bf16 = plan.changed({path: of_sites[path] for path, _ in plan.choices})
        if plan.choices == in_bf16.choices:
            return planned, sentence, notes
        in_bf16 = self._planned(in_bf16, "")
        times = self._times(in_bf16, planned)
        if times is None:
            more = f"{sentence} The whole step was not timed: {_REMEDIES.seconds}."
            return planned, more, notes
        gain = times.bf16_us / times.plan_us
        measured = f"{times.plan_us:,.0f} us against {times.bf16_us:,.0f}"
        if gain < _LEAST_GAIN:
            lost = (
                "No site runs in FP8: the gradients of a batch would not be computed "
                f"faster than in XLA's bfloat16 ({measured}); a larger batch may "
                "change that."
            )
            return in_bf16, lost, notes
        gained = (
            f"the gradients of a batch are computed {gain - 1:.0%} faster than in "
            f"XLA's bfloat16 ({measured})"
        )
        in_fp8 = sum(choice.is_fp8 for _, choice in plan.choices)
        if in_fp8:
            sentence = f"{in_fp8} of {len(self.sites)} sites run in FP8: {gained}."
            return planned, sentence, notes
        return planned, f"{sentence} By our kernels {gained}.", notes

    def _checked(
        self, make_plan: Callable[..., DispatchPlan], performance: PerformanceModel
    ) -> CheckedPlan:
        """Returns the plan of candidates that were checked; the first process's."""
        if jax.process_index():
            value = json.loads(same_text(""))
            plan = plans.from_json(value, self.sites, "the first process")
            return CheckedPlan(plan, performance)
        checked = check_plan(
            functools.partial(make_plan, self.sites),
            self.sites,
            performance,
            Budget(max(self._left() / 2, 1.0), "adopt(..., seconds=...)"),
            self.say,
        )
        if jax.process_count() > 1:
            same_text(jsonfile.dumps(plans.as_json(checked.plan)))
        return checked

    def _planned(self, plan: DispatchPlan, sentence: str) -> Adopted:
        return _adopted(self.of_loss, plan, self.batches, self.sites, sentence)

    def _times(self, in_bf16: Adopted, planned: Adopted) -> _Timed | None:
        """Returns the times of two steps, if there is time to compile the second."""
        batch, left = self.batches[0], self._left()
        first = self.of_loss.step((in_bf16.model, in_bf16.variables), batch)
        jax.block_until_ready(first())
        took = left - self._left()
        if self._agreed(self._left() < took):
            return None
        second = self.of_loss.step((planned.model, planned.variables), batch)
        jax.block_until_ready(second())
        start = time.perf_counter()
        jax.block_until_ready(second())
        us = (time.perf_counter() - start) * 1e6
        calls = int(self._agreed(max(2, min(50, int(_ROUND_US / us)))))
        steps = {"bf16": first, "plan": second}
        chains = {name: functools.partial(_queue, step) for name, step in steps.items()}
        times = time_chains(chains, calls=calls, rounds=5)
        return _Timed(*self._agreed([times[name].median_us for name in steps]))

    def _left(self) -> float:
        return self.seconds - (time.monotonic() - self._start)

    @staticmethod
    def _agreed(value: Any) -> Any:
        """Returns the first process's JSON value."""
        if jax.process_count() == 1:
            return value
        return json.loads(same_text(json.dumps(value)))


def _queue(step: Callable[[], Any], calls: int) -> Any:
    out = None
    for _ in range(calls):
        out = step()
    return out


def _adopted(
    of_loss: ModelLoss,
    plan: DispatchPlan,
    batches: Sequence[Any],
    sites: Sequence[Site],
    sentence: str,
) -> Adopted:
    model, variables = of_loss.planned(dict(plan.choices), batches)
    return Adopted(model, variables, plan, sentence, _identity(sites))


def _check_all_run(of_loss: ModelLoss, sites: Sequence[Site]) -> None:
    """Refuses delayed scales that no batch would set: their sites would return zeros.

    Raises:
        ValueError: naming the sites.
    """
    run = {site.path for site in sites}
    others = {path: x for path, x in of_loss.tables.items() if path not in run}
    unset = [
        path
        for path, table in others.items()
        if not jnp.all(jnp.any(DelayedScaling(table).factors > 0, axis=-1))
    ]
    if unset:
        names = ", ".join(sorted(unset))
        raise ValueError(
            f"the loss does not run the sites {names}, whose delayed scales would stay "
            "unset: run them in the loss, or convert without them, by `skip`."
        )


def _identity(sites: Sequence[Site]) -> Identity:
    texts = {site.path: f"{site.spec}, {site.recipe}" for site in sites}
    return Identity(header_here(), texts)


def _read(path: pathlib.Path, sites: Sequence[Site]) -> DispatchPlan:
    """Returns the plan in a file.

    Raises:
        ValueError: if it is no file of `Adopted.save`, or one of something else.
    """
    remedy = "leave `plan` out, so that another is made"
    try:
        saved = jsonfile.typed(jsonfile.read(path), _Saved)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a plan of adopt(): {error}") from None
    here = _identity(sites)
    if reason := saved.identity.header.why_not(here.header):
        raise ValueError(
            f"the plan of {path} does not hold here, as {reason}: {remedy}."
        )
    if reason := _difference(saved.identity.sites, here.sites):
        raise ValueError(f"the plan of {path} is of another model, {reason}: {remedy}.")
    plan = plans.from_json(saved.plan, sites, str(path))
    if reason := why_not_runnable(dict(plan.choices), sites):
        raise ValueError(f"{path}: {reason}: {remedy}.")
    return plan


def _difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    for path in saved.keys() | here.keys():
        then, now = saved.get(path, "no site"), here.get(path, "no site")
        if then != now:
            return f"in which {path} was {then}, and here is {now}"
    return None


def _devices(batch: Any) -> int:
    """Returns the number of devices over which the rows of a batch are spread."""
    counts = [1]
    for x in jax.tree.leaves(batch):
        if isinstance(x, jax.Array) and x.ndim and x.shape[0]:
            counts.append(x.shape[0] // max(1, x.sharding.shard_shape(x.shape)[0]))
    return max(counts)


def _table(plan: DispatchPlan, notes: Sequence[str], sites: Sequence[Site]) -> str:
    out = io.StringIO()
    print_plan(Console(file=out, width=100), plan, notes, sites)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
