"""Opens the data named on its standard input, one by one, and says what came of it.

A process of its own, so that a crash, a hang or too much memory is seen from outside.
Each line in is a JSON object with the options of the data; each line out has `rows`, a
`refusal` or a `crash`, with `seconds`, and the `peak` of memory so far, in bytes.
"""

import faulthandler
import json
import pathlib
import sys
import time
import traceback

import msgspec

from loka_jax.data import DataConfig, Position, open_data
from loka_jax.data.shards import Unusable


def try_to_open(options: dict) -> dict:
    try:
        splits = open_data(msgspec.convert(options, DataConfig), seed=0)
        found = (splits.train, splits.valid, splits.test)
        json.dumps(splits.identity, allow_nan=False)
        bad = splits.report["bad_rows"]["count"]
        return {"rows": bad + sum(read(split) for split in found if split is not None)}
    except BaseException as error:  # what is raised here is what the drill looks for
        if type(error) in (ValueError, Unusable):  # not what json or a codec raises
            return {"refusal": str(error)}
        return {"crash": traceback.format_exc()}


def read(split) -> int:
    """Returns the number of rows, after reading each of them."""
    count = split.num_examples
    batch = split.batch(Position(0, 0, 0), min(count, 100_000), shuffle=False)
    assert batch.labels.min() >= 0 and batch.labels.max() <= 1
    return count


if __name__ == "__main__":
    for line in sys.stdin:
        faulthandler.dump_traceback_later(60, exit=True)
        start = time.monotonic()
        result = try_to_open(json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        # That of getrusage begins with the peak of the parent.
        status = pathlib.Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        result |= {"seconds": time.monotonic() - start, "peak": peak}
        print(json.dumps(result), flush=True)
