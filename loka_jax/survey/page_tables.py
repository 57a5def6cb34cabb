"""The tables of probe.html."""

from collections.abc import Iterable
from typing import Any

from loka_jax.recipe import OPERANDS, ROLES
from loka_jax.site import BF16
from loka_jax.survey.sensitivity import ALL
from loka_jax.train.report_html import (
    Html,
    details,
    join,
    number,
    section,
    sparkline,
    table,
    tag,
)


def overview_section(found: dict[str, Any]) -> Html:
    """Returns the best candidate of each role of each site, and why."""
    rows = []
    for site in found["sites"]:
        effect = found["sensitivity"].get(site["path"])
        moved = None if effect is None else 100 * effect["moved"] / effect["loss"]
        rows.append(
            [
                tag("code", site["path"]),
                _shape(site),
                *(_best(site["roles"][role]) for role in ROLES),
                number(moved, 2),
            ]
        )
    rows += [
        [tag("code", site["path"]), _shape(site), tag("span", site["why"]), "", "", ""]
        for site in found["not_surveyed"]
    ]
    heads = ["site", "m × k × n", *ROLES, "loss moved, %"]
    lead = (
        "The fastest safe candidate of each role, or without times the one with the "
        "least error. A site has three products: fwd, the gradient of its input (dlhs) "
        "and that of its weight (drhs). Loss moved: by how much the forward product in "
        "FP8 changes an example's loss, in the mean."
    )
    return section(
        "Where FP8 is safe and fast", table(heads, rows, numeric=" n   n"), lead=lead
    )


def _best(candidates: dict[str, dict[str, Any]]) -> Html:
    fp8 = {name: one for name, one in candidates.items() if name != BF16.name}
    safe = {name: one for name, one in fp8.items() if one["is_safe"]}
    if not fp8:
        return tag("span", "–", class_="muted")
    if not safe:
        name, one = min(fp8.items(), key=lambda item: _error(item[1]))
        return join((_chip("unsafe", is_good=False), _words(name, one["reason"])))
    timed = {name: one for name, one in safe.items() if one["us"] is not None}
    if timed:
        name, one = min(timed.items(), key=lambda item: item[1]["us"])
    else:
        name, one = min(safe.items(), key=lambda item: _error(item[1]))
    chips = [_chip("safe", is_good=True)]
    if one["is_fast"] is not None:
        word = "fast" if one["is_fast"] else "slow"
        chips.append(_chip(word, is_good=one["is_fast"]))
    return join((*chips, _words(name, one["reason"])))


def _error(candidate: dict[str, Any]) -> float:
    return candidate["errors"]["learned"]["relative_l2"]["mean"]


def _chip(text: str, *, is_good: bool) -> Html:
    return tag("span", text, class_=f"chip {'is-good' if is_good else 'is-bad'}")


def _words(name: str, reason: str) -> Html:
    return join((tag("div", name), tag("div", reason, class_="muted")))


def _shape(site: dict[str, Any]) -> Html:
    return tag("span", " × ".join(number(site[name]) for name in ("m", "k", "n")))


def loss_section(effects: dict[str, dict[str, float]], recipe: str) -> Html:
    """Returns how far FP8 in each site's forward product moves the loss."""
    if not effects:
        return section("Effect on the loss", tag("p", "No site can be in FP8."))
    most = max(effect["moved"] for effect in effects.values())
    rows = [
        (
            tag("code", path) if path != ALL else tag("b", path),
            f"{100 * effect['moved'] / effect['loss']:.3f} %",
            _bar(effect["moved"] / most),
            f"{100 * effect['relative']:+.4f} %",
            f"{100 * effect['low'] / effect['loss']:+.4f} … "
            f"{100 * effect['high'] / effect['loss']:+.4f} %",
        )
        for path, effect in effects.items()
    ]
    lead = (
        f"One site at a time in {recipe}, the others in bfloat16, on held-out batches. "
        "Moved is the mean of the examples' absolute changes; change is that of the "
        "mean loss, with its 95 % interval over examples."
    )
    heads = ("site", "moved", "", "change", "interval")
    return section("Effect on the loss", table(heads, rows, numeric=" n nn"), lead=lead)


def _bar(share: float) -> Html:
    width = f"width:{100 * share:.1f}%;"
    return tag("span", tag("span", style=width), class_="bar", style="min-width:8rem")


def candidates_section(sites: list[dict[str, Any]]) -> Html:
    """Returns every candidate's errors, times and verdict, a part for each site."""
    heads = (
        "role",
        "candidate",
        "relative L2",
        "N(0, 1)",
        "real",
        "MERE",
        "median",
        "worst row",
        "underflow",
        "saturation",
        "µs",
        "× bf16",
        "verdict",
    )
    parts = []
    for i, site in enumerate(sites):
        rows = [
            _candidate_row(role, name, one)
            for role, candidates in site["roles"].items()
            for name, one in candidates.items()
        ]
        body = table(heads, rows, numeric="  nnnnnnnnnn ")
        parts.append(details(site["path"], body, _training(site), is_open=i == 0))
    lead = (
        "Errors on operands drawn from what was learned, with half the 95 % interval "
        "of their mean; relative L2 on N(0, 1) and on real operands beside it."
    )
    return section("Every candidate", *parts, lead=lead)


def _candidate_row(role: str, name: str, one: dict[str, Any]) -> tuple:
    errors = one["errors"]
    learned, real = errors["learned"], errors.get("real")
    return (
        role,
        name,
        _with_interval(learned["relative_l2"]),
        number(errors["normal"]["relative_l2"]["mean"], 4),
        "n/a" if real is None else number(real["relative_l2"]["mean"], 4),
        number(learned["mere"]["mean"], 2),
        number(learned["median"]["mean"], 4),
        number(learned["worst_row"]["mean"], 3),
        _percent(learned["underflow"]["mean"]),
        _percent(learned["saturation"]["mean"]),
        number(one["us"], 1),
        number(one["speedup"], 2),
        "" if name == BF16.name else _verdict(one),
    )


def _with_interval(estimate: dict[str, float]) -> str:
    half = (estimate["high"] - estimate["low"]) / 2
    return f"{number(estimate['mean'], 4)} ± {number(half, 4)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _verdict(one: dict[str, Any]) -> Html:
    chips = [_chip("safe" if one["is_safe"] else "unsafe", is_good=one["is_safe"])]
    if one["is_fast"] is not None:
        word = "fast" if one["is_fast"] else "slow"
        chips.append(_chip(word, is_good=one["is_fast"]))
    return tag("div", *chips, tag("div", one["reason"], class_="why"))


def _training(site: dict[str, Any]) -> Html:
    times = site["training_us"]
    if not times:
        return Html("")
    base = times.get(BF16.name)
    rows = [
        (name, number(us, 1), "" if base is None else number(base / us, 2))
        for name, us in sorted(times.items(), key=lambda item: item[1])
    ]
    head = tag("h3", "The whole site, forward and backward")
    return join((head, table(("candidate", "µs", "× bf16"), rows, numeric=" nn")))


def distributions_section(
    sites: list[dict[str, Any]], amaxes: list[dict[str, Any]]
) -> Html:
    """Returns what was learned of each operand, with its spectrum and its amaxes."""
    heads = (
        "site",
        "operand",
        "mean",
        "deviation",
        "kurtosis",
        "amax",
        "now / used",
        "underflow",
        "saturation",
        "rank",
        "spectrum",
        "amax over time",
    )
    rows = [
        _distribution_row(site["path"], operand, site["statistics"][operand], amaxes)
        for site in sites
        for operand in OPERANDS
    ]
    lead = (
        "Kurtosis is 3 for a Gaussian. Now / used: the last amax over the one that its "
        "scale was made for. Rank: how many directions carry the variance. Spectrum: "
        "eigenvalues of the covariance, for a weight of its rows, logarithmic."
    )
    return section("Distributions", table(heads, rows, numeric="  nnnnnnnn"), lead=lead)


def _distribution_row(
    path: str, operand: str, known: dict[str, Any], amaxes: list[dict[str, Any]]
) -> tuple:
    name = f"{path}/{operand}"
    return (
        tag("code", path) if operand == OPERANDS[0] else "",
        operand,
        _short(known["mean"]),
        _short(known["deviation"]),
        number(known["kurtosis"], 1),
        _short(known["amax"]),
        number(known["amax_ratio"], 2),
        _percent(known["underflow"]),
        _percent(known["saturation"]),
        number(known.get("effective_rank"), 1),
        _curve(known["spectrum"], f"spectrum of {name}"),
        _curve([line.get(name) for line in amaxes], f"amax of {name}"),
    )


def _short(value: float) -> str:
    return f"{value:.3g}"


def _curve(values: Iterable[float | None], title: str) -> Html:
    return sparkline(list(values), title=title)
