"""Opens the data named on its standard input, one by one, and says what came of it.

A process of its own, so that a crash, a hang or too much memory is seen from outside.
Each line in is a JSON object with the options of the data; each line out has the
`outcome` (`rows` of each split, `refusal`, or `crash`), `seconds`, and the `peak` of
memory so far, in bytes.
"""

import faulthandler
import json
import pathlib
import sys
import time
import traceback

from loka_jax.data import DataConfig, Position, open_data
from loka_jax.data.manifest import Unusable

HANG_SECONDS = 60


def try_to_open(options: dict) -> dict:
    try:
        splits = open_data(DataConfig(**options), seed=0)
        found = {"train": splits.train, "valid": splits.valid, "test": splits.test}
        rows = {name: read(split) for name, split in found.items() if split is not None}
        json.dumps(splits.identity, allow_nan=False)
        bad = splits.report["bad_rows"]["count"]
        return {"rows": rows, "bad_rows": bad, "schema": splits.identity["schema"]}
    except ValueError as error:
        if type(error) in (ValueError, Unusable):  # not what json or a codec raises
            return {"refusal": str(error)}
        return {"crash": traceback.format_exc()}
    except BaseException:  # what is raised here is what the drill looks for
        return {"crash": traceback.format_exc()}


def read(split) -> int:
    """Returns the number of rows, after reading each of them."""
    count = split.num_examples
    batch = split.batch(Position(0, 0, 0), min(count, 100_000), shuffle=False)
    assert batch.labels.min() >= 0 and batch.labels.max() <= 1
    return count


def peak_bytes() -> int:
    """Returns the peak of this process; that of getrusage begins with its parent's."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    for line in sys.stdin:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        start = time.monotonic()
        result = try_to_open(json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        result["seconds"] = time.monotonic() - start
        result["peak"] = peak_bytes()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
