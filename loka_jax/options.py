"""A check of an option's value, with a message that names option and remedy."""


def require(holds: bool, option: str, value, requirement: str):
    """Raises ValueError "option value must be requirement." unless `holds`."""
    if not holds:
        raise ValueError(f"{option} {value} must be {requirement}.")
