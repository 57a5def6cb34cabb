"""Workers that share a listening socket, so that a restart loses no connection.

    SIGHUP          a new worker starts; once it is ready the old one is told to end
    SIGTERM, ^C     the worker is told to end, and waited for
    a worker ends   by itself: another one starts
    SIGTERM, ^C     while a worker starts: it is killed, as it has accepted nothing

The socket stays open all the while: connections that a worker which ends has not
accepted wait for the next one. A worker that is told to end (SIGTERM) stops accepting
and finishes what it has accepted.
"""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

_ENDS = {signal.SIGTERM, signal.SIGINT}
_SIGNALS = {signal.SIGHUP, signal.SIGCHLD, *_ENDS}
_LOOK_S = 0.1  # between looks for a signal while a worker starts


def supervise(
    command: Sequence[str], host: str, port: int, *, say: Callable[[str], None] = print
) -> int:
    """Runs workers until SIGTERM, and returns the exit code.

    If one ends before it is ready and no other runs, that is its exit code.

    Args:
        command: of a worker. It gets two more arguments, the numbers of open files: of
            the listening socket, and of a pipe that it writes to once it is ready.
        port: to listen at; 0 for a free one, which `say` names.

    Raises:
        ValueError: if it cannot listen there.
    """
    with _listen(host, port) as listening:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        worker = _start_worker(command, listening)
        if worker.returncode is not None:
            return 0 if signal.sigpending() & _ENDS else worker.returncode or 1
        port = listening.getsockname()[1]
        say(f"listening at http://{host}:{port}, worker {worker.pid}")
        ending: list[subprocess.Popen] = []
        while (got := signal.sigwait(_SIGNALS)) in (signal.SIGHUP, signal.SIGCHLD):
            ending = [old for old in ending if old.poll() is None]
            if got == signal.SIGCHLD and worker.poll() is None:
                continue
            new = _start_worker(command, listening)
            if new.returncode is not None:
                say("the new worker ended before it was ready")
                if worker.poll() is not None:
                    return new.returncode or 1
                continue
            worker.terminate()
            ending, worker = [*ending, worker], new
            say(f"worker {new.pid} is ready")
        worker.terminate()
        for process in (*ending, worker):
            process.wait()
    return 0


def listen_to_parent() -> None:
    """Lets a worker have SIGTERM, which its parent blocks, and leaves ^C to that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} is none: ports are 0 to {2**16 - 1}.")
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        why, _, _ = (error.strerror or str(error)).partition(" (")
        raise ValueError(
            f"nothing can listen at {host}, port {port} ({why}): choose another "
            "--host or --port."
        ) from None


def _start_worker(command: Sequence[str], listening: socket.socket) -> subprocess.Popen:
    """Returns a worker once it is ready, or has ended, with its return code."""
    reading, writing = os.pipe()
    files = listening.fileno(), writing
    process = subprocess.Popen([*command, *map(str, files)], pass_fds=files)
    os.close(writing)
    while not select.select([reading], [], [], _LOOK_S)[0]:
        if signal.sigpending() & _ENDS:
            process.kill()
    is_ready = os.read(reading, 1)  # nothing if it ends
    os.close(reading)
    if not is_ready:
        process.wait()
    return process
