"""HTML pages, each a single file that loads nothing from a server.

The page of a training run (`run_page`) and that of a survey (`survey_page`) turn plain
data into views for their templates; `render` escapes every value, `charts` draws.
"""

from loka_jax.report.run_page import RunFiles, gap_closed, write_run_page
from loka_jax.report.survey_page import write_survey_page

__all__ = ["RunFiles", "gap_closed", "write_run_page", "write_survey_page"]
