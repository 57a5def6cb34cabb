"""Checks of options, with messages that name the option and the remedy."""


def require(holds: bool, option: str, value, what: str):
    """Raises ValueError, that an option's value must be something, unless it holds."""
    if not holds:
        raise ValueError(f"{option} {value} must be {what}.")
