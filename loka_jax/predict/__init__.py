"""Scores of new rows, and the quality of labelled ones, from the folder of a run."""

from loka_jax.predict.evaluate import Evaluated, evaluate_files
from loka_jax.predict.files import Scored, score_file
from loka_jax.predict.predictor import Predictor, load

__all__ = [
    "Evaluated",
    "Predictor",
    "Scored",
    "evaluate_files",
    "load",
    "score_file",
]
