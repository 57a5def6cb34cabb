"""Where FP8 is safe and fast in a trained model: errors, times, effect on the loss."""

from loka_jax.survey.config import Limits, SurveyConfig
from loka_jax.survey.survey import survey

__all__ = ["Limits", "SurveyConfig", "survey"]
