"""Where FP8 is safe and fast in a trained model: errors, times, effect on the loss."""

from loka_jax.survey.survey import SurveyConfig, survey

__all__ = ["SurveyConfig", "survey"]
