"""HTML pages, each a single file that loads nothing from a server.

The pages of a training run (`run_page`), of a survey (`survey_page`) and of several
runs (`compare_page`) turn plain data into views for their templates; `render` escapes
every value, `charts` draws.
"""
