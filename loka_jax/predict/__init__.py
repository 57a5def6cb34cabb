"""Scores of new rows from the folder of a run."""

from loka_jax.predict.files import Scored, score_file
from loka_jax.predict.predictor import Predictor, load

__all__ = ["Predictor", "Scored", "load", "score_file"]
