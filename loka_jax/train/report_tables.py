"""The report's tables: what ran at each site, scales over time, what the data held.

What comes in was read from files, so that nothing is taken for granted about it: a
value of another kind than expected is shown as absent.
"""

from typing import Any

from loka_jax.train.report_html import (
    Html,
    definitions,
    details,
    join,
    number,
    power_of_two,
    section,
    sparkline,
    table,
    tag,
)

_OPERANDS = ("lhs", "rhs", "g")
_KINDS = ("missing", "nan", "inf", "negative", "huge", "oov")
_MAX_COLUMNS = 100  # of a data set, shown by name


def sites_section(sites: list[dict]) -> Html:
    """Returns what ran at each site, per role, and why not FP8."""
    title = "What ran at each site"
    if not sites:
        return section(title, tag("p", "There is no sites.json."))
    recipes = dict.fromkeys(str(site.get("recipe")) for site in sites)
    heads = ["site", "m × k × n", "fwd", "dlhs", "drhs", "FP8, or why not"]
    rows = [
        [
            tag("code", site.get("path")),
            _shape(site),
            *(_role(site.get(role)) for role in ("fwd", "dlhs", "drhs")),
            _verdict(site.get("why_not"), site.get("why_not_fused")),
        ]
        for site in sites
    ]
    fp8 = sum(not site.get("why_not") for site in sites)
    lead = f"{fp8} of {len(sites)} sites run in FP8."
    lead += (
        f" Recipes: {', '.join(recipes)}."
        " A site has three products: fwd, the gradient of its input (dlhs) and that of "
        "its weight (drhs)."
    )
    return section(title, table(heads, rows, numeric=" n"), lead=lead)


def dispatch_section(plan: object, demotions: object) -> Html:
    """Returns what was chosen for each site and why; nothing without a plan."""
    if not isinstance(plan, list) or not plan:
        return Html("")
    heads = ["site", "choice", "speed", "error", "why", "runner-up"]
    rows = [
        [
            tag("code", one.get("path")),
            tag("span", one.get("choice"), class_="chip"),
            number(one.get("speedup"), 2),
            number(one.get("error"), 3),
            one.get("reason") or "",
            one.get("runner_up") or "",
        ]
        for one in map(as_dict, plan)
    ]
    lead = (
        "Speed: of the whole site over XLA's bfloat16. Error: relative L2 of the worst "
        "FP8 product. Both as they were measured before."
    )
    notes = demotions if isinstance(demotions, list) else []
    said = [tag("p", note, class_="why") for note in notes]
    return section("Dispatch", table(heads, rows, numeric="  nn"), *said, lead=lead)


def _shape(site: dict) -> Html:
    sizes = [number(site.get(name)) for name in ("m", "k", "n")]
    return tag("span", " × ".join(sizes))


def _role(text: object) -> Html:
    is_fp8 = any(name in str(text).lower() for name in ("fp8", "e4m3", "e5m2"))
    return tag("span", text, class_="chip is-accent" if is_fp8 else "chip")


def _verdict(why_not: object, why_not_fused: object) -> Html:
    fused = f"not fused: {why_not_fused}" if why_not_fused else ""
    if why_not:
        return tag("div", why_not, class_="why")
    return tag("div", tag("span", "FP8", class_="chip is-good"), tag("div", fused))


def scales_section(lines: list[dict]) -> Html:
    """Returns the scales of each site and operand over time; nothing without any."""
    if not lines:
        return Html("")
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    parts = [(name.rpartition("/")[0], name.rpartition("/")[2]) for name in names]
    operands = [o for o in _OPERANDS if any(o == part[1] for part in parts)]
    operands += [
        o for o in dict.fromkeys(part[1] for part in parts) if o not in operands
    ]
    rows = []
    for site in dict.fromkeys(part[0] for part in parts):
        cells = [
            _scale_cell(lines, f"{site}/{operand}" if site else operand)
            for operand in operands
        ]
        rows.append((tag("code", site), *cells))
    first, last = lines[0].get("step"), lines[-1].get("step")
    return section(
        "Scales over time",
        table(("site", *operands), rows),
        lead=f"Each curve runs from step {number(first)} to {number(last)} on a "
        "logarithmic axis of its own, four octaves high at least; below it the first "
        "and the last value.",
    )


def _scale_cell(lines: list[dict], name: str) -> Html:
    values = [real(line.get(name)) for line in lines]
    known = [value for value in values if value is not None and value > 0]
    if not known:
        return tag("span", "–", class_="muted")
    change = join((power_of_two(known[0]), " → ", power_of_two(known[-1])))
    return join((sparkline(values, title=name), tag("span", change, class_="range")))


def data_section(report: object) -> Html:
    """Returns examples, split rule, values met by a policy, and bad rows."""
    data = as_dict(report)
    if not data:
        return Html("")
    parts: list[object] = []
    if examples := as_dict(data.get("examples")):
        parts.append(
            definitions((f"{name} examples", number(n)) for name, n in examples.items())
        )
    splits = {k: as_dict(v) for k, v in as_dict(data.get("splits")).items()}
    for name, split in splits.items() or {"": data}.items():
        parts.append(_column_counts(name, as_dict(split.get("columns"))))
    parts.append(_bad_rows(data.get("bad_rows")))
    known = {"examples", "splits", "totals", "columns", "bad_rows", "split_rule"}
    rest = {name: value for name, value in data.items() if name not in known}
    if rest:
        parts.append(details("Policies and sources", definitions(flat(rest))))
    lead = data.get("split_rule")
    return section("Data", *parts, lead=lead and f"Split rule: {lead}.")


def _column_counts(split: str, columns: dict[str, Any]) -> Html:
    """Returns how many values of each kind a policy met, by column."""
    columns = {name: as_dict(counts) for name, counts in columns.items()}
    totals = {k: sum(real(c.get(k)) or 0 for c in columns.values()) for k in _KINDS}
    totals = {kind: total for kind, total in totals.items() if total}
    if not totals:
        return Html("")
    rows = [
        (tag("code", name), *(_count(counts.get(kind)) for kind in totals))
        for name, counts in list(columns.items())[:_MAX_COLUMNS]
    ]
    hidden = len(columns) - len(rows)
    words = ", ".join(f"{number(total)} {kind}" for kind, total in totals.items())
    return details(
        f"Values met by a policy{f', {split}' if split else ''}: {words}",
        table(("column", *totals), rows, numeric=" " + "n" * len(totals)),
        tag("p", f"and {hidden} more columns", class_="muted") if hidden else "",
        is_open=len(rows) <= 8,
    )


def _count(value: object) -> Html:
    return (
        tag("span", number(value), class_=None)
        if value
        else tag("span", "0", class_="zero")
    )


def _bad_rows(bad_rows: object) -> Html:
    if bad_rows is None:
        return Html("")
    found = as_dict(bad_rows) or {"count": bad_rows}
    count = real(found.get("count"))
    if not count:
        return tag("p", "No bad rows.", class_="muted")
    words = "row was" if count == 1 else "rows were"
    samples = [as_dict(sample) for sample in _list(found.get("samples"))]
    heads = tuple(dict.fromkeys(name for sample in samples for name in sample))
    rows = [tuple(sample.get(head) for head in heads) for sample in samples]
    return join(
        (
            tag("h3", f"{number(count)} bad {words} left out"),
            table(heads, rows) if heads else "",
        )
    )


def flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    """Returns nested values by dotted name, lists in one line."""
    pairs: list[tuple[str, object]] = []
    for name, item in value.items():
        if isinstance(item, dict) and item:
            pairs += flat(item, f"{prefix}{name}.")
        elif isinstance(item, list):
            pairs.append((f"{prefix}{name}", " ".join(map(str, item)) or None))
        else:
            pairs.append((f"{prefix}{name}", item))
    return pairs


def real(value: object) -> float | None:
    """Returns a number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def as_dict(value: object) -> dict[str, Any]:
    """Returns a dict as it is, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
