"""Which of Wukong's shapes the kernels of FM and LCB serve, and how launches lie."""

import dataclasses

import pytest

from loka_jax.pallas import fm_lcb_backward_layout as backward
from loka_jax.pallas import fm_lcb_layout as forward
from loka_jax.pallas.fm_lcb_backward_layout import BackwardConfig, BackwardLayout
from loka_jax.pallas.fm_lcb_layout import LaunchLayout, Problem, TuningConfig
from tests.support.pallas import WUKONG


def problem_of(**sizes):
    """Returns a problem, by default a small one."""
    return Problem(**(dict(batch=8, n=64, d=64, k=32, m=64) | sizes))


SIZES = [problem_of(n=n, d=d, k=k, m=m) for n, d, k, m in WUKONG.values()]
XL = problem_of(n=192, d=160, k=96, m=192)
FM = problem_of(n=128, d=128, k=96, m=128)  # of two slabs
WIDE = problem_of(m=256)


@pytest.mark.parametrize(
    "layout, problem, config, reason",
    [
        (forward, problem_of(batch=0), None, "there are no examples"),
        (forward, problem_of(k=30), None, "k=30 is not a positive multiple of 8"),
        (forward, problem_of(m=32), None, "l=0 is not a positive multiple of 8"),
        (forward, problem_of(d=72), None, "d=72 is not a positive multiple of 16"),
        (forward, problem_of(n=264), None, "n=264 is more than 256"),
        (forward, problem_of(n=256, m=256, d=208), None, "do not fit"),
        # Only teams of warpgroups have the registers for it.
        (forward, XL, None, "do not fit one warpgroup's"),
        (forward, problem_of(n=8, k=8, m=16, d=16), None, None),
        *((forward, problem, None, None) for problem in SIZES),
        (forward, problem_of(), TuningConfig(chunks=3), "3 chunks of multiples of 16"),
        (forward, problem_of(), TuningConfig(fm_parts=8), "8 parts of multiples of 8"),
        (forward, problem_of(), TuningConfig(warpgroups=3, team=2), "among teams"),
        (forward, problem_of(), TuningConfig(pipeline_stages=17), "at most 32 stages"),
        (forward, problem_of(), TuningConfig(pipeline_stages=16), "of shared memory"),
        # Registers: of FM's two slabs, of a chunk of P, and spare ones.
        (forward, FM, TuningConfig(2, 1, 1, 1, 1), None),
        (forward, FM, TuningConfig(4, 1, 2, 1, 1), "takes 152 registers"),
        (forward, FM, TuningConfig(2, 1, 2, 1, 1), None),
        (backward, problem_of(k=24), None, "k=24 is not a positive multiple of 16"),
        (backward, problem_of(m=56), None, "l=24 is not a positive multiple of 16"),
        (backward, problem_of(n=256, d=32, k=16, m=32), None, "the backward's"),
        *((backward, problem, None, None) for problem in SIZES[1:]),
        (backward, problem_of(), BackwardConfig(teams=5), "5 warpgroups are more than"),
        (backward, problem_of(), BackwardConfig(2, 9), "of shared memory of 232448"),
        # 128 + 64 + 32 registers: of four consumers' 112.
        (backward, WIDE, BackwardConfig(4, 1), "takes 224 registers"),
        (backward, WIDE, BackwardConfig(1, 1), None),
    ],
)
def test_what_is_not_served_has_a_reason(layout, problem, config, reason):
    has_config = config is not None
    found = layout.misfit(problem, config) if has_config else layout.why_not(problem)
    assert found is None if reason is None else reason in found


def test_sides_are_padded_and_covered_by_slabs_that_may_overlap():
    padded = [forward.padded(size) for size in (8, 64, 72, 80, 96)]
    assert padded == [64, 64, 80, 80, 96]
    starts = [forward.slab_starts(size) for size in (64, 80, 192)]
    assert starts == [[0], [0, 16], [0, 64, 128]]
    layout = LaunchLayout(problem_of(n=128, m=256), TuningConfig(4, 2))
    assert layout.slabs(128, member=1) == [64]
    assert layout.slabs(256, member=0) == [0, 128]
    assert layout.slabs(256, member=1) == [64, 192]


def test_what_is_added_lies_once_in_the_rows_that_slabs_store():
    problem = Problem(batch=5, n=72, d=32, k=16, m=48)
    layout = BackwardLayout(problem, BackwardConfig(1, 1), (8, 40, 24))
    # The second slab begins at 16 and stores what the first does not: from 64 on.
    assert layout.slabs == [0, 16] and layout.most_pieces == 3
    assert [layout.skipped(slab) for slab in layout.slabs] == [0, 48]
    # Number of the array, first row there and in the slab, rows.
    assert layout.pieces(0) == [(0, 0, 0, 8), (1, 0, 8, 40), (2, 0, 48, 16)]
    assert layout.pieces(16) == [(2, 16, 48, 8)]


# In the last problem larger teams would fit.
@pytest.mark.parametrize("problem", [*SIZES, problem_of(n=128, m=128)])
def test_the_search_space_fits_and_has_no_teams_of_warpgroups(problem):
    space = forward.search_space(problem)
    assert len(space) > 1 and len(set(space)) == len(space)
    for config in space:
        assert forward.misfit(problem, config) is None
        # On a GPU larger teams stop at an illegal instruction.
        assert config.team == 1 and config.warpgroups >= 2
        stages = config.pipeline_stages
        deeper = dataclasses.replace(config, pipeline_stages=stages + 1)
        assert stages == 6 or forward.misfit(problem, deeper)
    # One stage overlaps nothing, and chunks make products small: these come last.
    keys = [(c.pipeline_stages < 2, c.chunks) for c in space]
    assert keys == sorted(keys)
