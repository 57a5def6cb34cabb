"""Single arguments of a command line, read before anything heavy is imported."""


def asks_for_help(arguments: list[str]) -> bool:
    """Returns whether a command line asks for help."""
    return "--help" in arguments or "-h" in arguments


def take(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """Returns the value of an option, or None, and the other arguments."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], arguments[:i] + arguments[i + 1 :]
        if argument == option:
            values = arguments[i + 1 : i + 2]
            if not values or values[0].startswith("-"):
                return None, arguments[:i] + arguments[i + 1 :]
            return values[0], arguments[:i] + arguments[i + 2 :]
    return None, arguments
