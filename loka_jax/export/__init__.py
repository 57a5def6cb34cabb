"""A trained model as a folder that needs jax alone."""

from loka_jax.export.folder import Exported, export_run

__all__ = ["Exported", "export_run"]
