"""What the sites of a trained model can bear: errors, times, effect on the loss."""

from loka_jax.survey.config import Limits, SurveyConfig
from loka_jax.survey.survey import survey

__all__ = ["Limits", "SurveyConfig", "survey"]
