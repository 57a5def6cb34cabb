"""One of two processes that end, watched as XLA's client of GPUs watches them.

python .../processes/leaver.py 0     both succeed, the first later than the second
python .../processes/leaver.py 1     the second fails, and the first waits for it
"""

import os
import socket
import sys
import threading
import time

from loka_jax.train.processes.group import leave, start


def watch() -> None:
    """Writes to stderr once the coordinator is gone, as XLA does on GPUs only."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(address) as coordinator:
        while coordinator.recv(1 << 10):
            pass
    os.write(2, b"the coordinator is gone\n")


def main() -> int:
    processes = start()
    processes.same("here")  # makes JAX's client
    threading.Thread(target=watch, daemon=True).start()
    print(f"rank {processes.index} is done", flush=True)
    if processes.index == 1:
        return int(sys.argv[1])
    time.sleep(2.0)
    return 0


if __name__ == "__main__":
    leave(main)
