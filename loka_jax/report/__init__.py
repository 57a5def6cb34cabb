"""HTML pages, each a single file that loads nothing from a server.

The pages of a training run (`run_page`), of a survey (`survey_page`) and of several
runs (`compare_page`) turn plain data into views for their templates; `render` escapes
every value, `charts` draws.
"""

from loka_jax.report.compare_page import write_compare_page
from loka_jax.report.comparison import ComparedRun, Scored
from loka_jax.report.run_files import RunFiles
from loka_jax.report.run_page import gap_closed, write_run_page
from loka_jax.report.survey_page import write_survey_page

__all__ = [
    "ComparedRun",
    "RunFiles",
    "Scored",
    "gap_closed",
    "write_compare_page",
    "write_run_page",
    "write_survey_page",
]
