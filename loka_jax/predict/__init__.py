"""Scores of new rows, and the quality of labelled ones, from the folder of a run."""

from loka_jax.predict.evaluate import Evaluated, evaluate_files, judged_rows
from loka_jax.predict.files import Scored, as_texts, score_file
from loka_jax.predict.importance import Importance, importance_of
from loka_jax.predict.predictor import Predictor, load

__all__ = [
    "Evaluated",
    "Importance",
    "Predictor",
    "Scored",
    "as_texts",
    "evaluate_files",
    "importance_of",
    "judged_rows",
    "load",
    "score_file",
]
