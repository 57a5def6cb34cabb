"""Trains a ranking model.

    python experiments/train.py --config fp8_dlrm

Options override the configuration: `--optim.lr 3e-4`, `--recipe fp8_rowwise`,
`--seed 3`, `--data.path DIR`. `--config NAME --help` lists all of them with the
defaults of that configuration.

Exit codes: 0 done; 2 an error that the user can mend, explained in one sentence; 1 the
training itself failed; 130 or 143 stopped by Ctrl-C or SIGTERM after saving.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()


from experiments.cli import parse, run_cli


def main(arguments: list[str]) -> int:
    """Trains as the command line asks and returns the exit code."""

    def command() -> int:
        config = parse(arguments)  # answers --help
        from loka_jax.train.session import train  # half a second of imports

        return train(config, arguments).exit_code

    return run_cli(command)


if __name__ == "__main__":
    from loka_jax.train.processes.group import leave

    leave(lambda: main(sys.argv[1:]))
