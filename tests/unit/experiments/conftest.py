"""Commands in this process."""

import pytest


@pytest.fixture
def run(capsys):
    """Returns a function from a command to its exit code and both outputs."""

    def run(command, *arguments):
        try:
            code = command.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run
