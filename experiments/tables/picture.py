"""The picture of README: what a whole training step takes by XLA and by loka_jax."""

from experiments.tables import cells

FILE = "whole_steps_h100"
BARS = {
    "Wukong M, batch 16,384": "wukong_m 16384",
    "DHEN L, batch 16,384": "dhen_l 16384",
    "DLRM-DCNv2, batch 65,536": "mlperf_dcnv2 65536",
    "DLRM-DCNv2, batch 8,192": "mlperf_dcnv2 8192",
}
WIDTH, LEFT, LONGEST, STEP = 720, 205, 390, 52
# Text and colors are readable on white and on GitHub's dark background.
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"
 font-family="sans-serif" font-size="13">
<style>
text {{ fill: #24292f }}
.xla {{ fill: #9aa4b0 }}
.loka {{ fill: #2f81f7 }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #d0d7de }} }}
</style>
<title>A whole training step on one H100, milliseconds</title>
"""


def svg() -> str:
    """Returns the picture: two bars for each model, as long as their times."""
    pairs = {label: _times(key) for label, key in BARS.items()}
    parts = [HEAD.format(width=WIDTH, height=STEP * len(pairs) + 30)]
    parts.append(_legend())
    for i, (label, (xla, loka)) in enumerate(pairs.items()):
        top = 30 + STEP * i
        parts.append(f'<text x="{LEFT - 10}" y="{top + 22}" text-anchor="end">')
        parts.append(f"{label}</text>\n")
        parts.append(_bar("xla", top, 1.0, f"{xla / 1000:.1f} ms"))
        gain = f"{loka / 1000:.1f} ms, {xla / loka:.2f}x as fast"
        parts.append(_bar("loka", top + 18, loka / xla, gain))
    return "".join([*parts, "</svg>\n"])


def _times(key: str) -> tuple[float, float]:
    row = cells.Row(FILE, (key,))
    path = "runs.{0}.%s.step.median_us"
    return row(path % "xla bf16"), row(path % "auto fp8*")


def _bar(kind: str, top: int, share: float, text: str) -> str:
    length = round(LONGEST * share)
    return (
        f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{length}" height="16"/>'
        f'<text x="{LEFT + length + 6}" y="{top + 13}">{text}</text>\n'
    )


def _legend() -> str:
    return (
        f'<rect class="xla" x="{LEFT}" y="6" width="12" height="12"/>'
        f'<text x="{LEFT + 18}" y="17">XLA, bf16</text>'
        f'<rect class="loka" x="{LEFT + 110}" y="6" width="12" height="12"/>'
        f'<text x="{LEFT + 128}" y="17">loka_jax, FP8</text>\n'
    )
