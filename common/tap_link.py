"""The line between the process that commits samples and those that compute and write them: small messages only.

    committing process:   Links(ranks, writers)             one listener, made before the engine, for its whole life
    scheduler process:    Line(rank, on_message)            one connection, made before the model loads
    its writer processes: Line(rank, on_message, writer)    one connection each

Messages are (kind, content): `begin` and `end` go to a scheduler, `samples` to a writer; `hello`, `begun`, `proof`,
`written`, `set_aside`, `failed`, `ended` and `lost` (a writer has died) come back. Hidden states never travel here. A
Unix socket without a file on one node, TCP where a replica spans nodes. A connection that breaks is how the committing
process learns at once that a process has died. It waits for none of them: whoever connects is asked for the key in a
thread of its own, and a process that stands still keeps only its own messages back.
"""

import contextlib
import faulthandler
import os
import queue
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

ENVIRONMENT = "CAPTURE_LINE"  # "address|key|writers a rank", inherited by the scheduler processes and their writers


RUN = 16  # samples of a rank that go to the same writer


class Links:
    """Connections to all ranks of one engine and to the writers of each. `on_message(rank, kind, content)` is called
    from threads; a broken connection arrives as kind "lost"."""

    def __init__(self, ranks: int, writers: int = 0, over_nodes: bool = False):
        self.ranks, self.writers = ranks, writers
        self.processes = ranks * (1 + writers)
        self.key = secrets.token_bytes(16)
        name = f"capture-{os.getpid()}-{secrets.token_hex(4)}"
        self.listener = socket.socket(socket.AF_INET if over_nodes else socket.AF_UNIX)
        self.listener.bind(("", 0) if over_nodes else f"\0{name}")
        self.listener.listen(self.processes)
        where = f"{socket.gethostname()}:{self.listener.getsockname()[1]}" if over_nodes else f"@{name}"
        self.where = f"{where}|{self.key.hex()}|{writers}"
        self.connections: dict[tuple[int, int | None], Connection] = {}  # (rank, its writer or None for the scheduler)
        self.outboxes: dict[tuple[int, int | None], queue.SimpleQueue] = {}  # messages on their way to each
        self.lost = False  # a process that was connected is gone
        self.on_message: Callable[[int, str, dict], None] = lambda rank, kind, content: None
        threading.Thread(target=self._accept, daemon=True, name="links-accept").start()

    def connected(self) -> bool:
        return len(self.connections) == self.processes

    def send(self, kind: str, rank: int, writer: int | None = None, **content) -> None:
        """To the scheduler of a rank, or to one of its writers; never waits. One that is gone is said to be "lost"."""
        self.outboxes[rank, writer].put((kind, content))

    def close(self) -> None:
        for who, connection in list(self.connections.items()):
            self.outboxes[who].put(None)
            shut(connection)
        shut(self.listener)

    def _accept(self):
        while self.listener.fileno() != -1:
            try:
                connection = Connection(self.listener.accept()[0].detach())
            except OSError:  # closed, or no descriptor is free just now
                time.sleep(0.1)
                continue
            threading.Thread(target=self._receive, args=(connection,), daemon=True, name="links-receive").start()

    def _receive(self, connection: Connection):
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            _, content = connection.recv()  # hello
        except (EOFError, OSError, AuthenticationError):
            return connection.close()  # a stranger, or one that died on the way: whoever started it says so
        who = rank, _ = content["rank"], content["writer"]
        outbox = self.outboxes[who] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, args=(connection, outbox), daemon=True, name="links-send").start()
        self.connections[who] = connection
        self.on_message(rank, "hello", content)
        try:
            while True:
                kind, content = connection.recv()
                if kind == "lost":
                    self.lost = True
                self.on_message(rank, kind, content)
        except (EOFError, OSError):
            self.lost = True
            self.outboxes[who].put(None)
            self.on_message(rank, "lost", {})

    @staticmethod
    def _deliver(connection: Connection, outbox: queue.SimpleQueue):
        with contextlib.suppress(OSError, TypeError):  # gone, as `_receive` sees, or closed half-way
            while (message := outbox.get()) is not None:
                connection.send(message)


class Line:
    """The connection of one scheduler (writer None) or writer. `on_message(kind, content)` runs in a thread of its own,
    one message after the other; what it raises is printed and sent as `failed`."""

    def __init__(self, rank: int, on_message: Callable[[str, dict], None], writer: int | None = None):
        address, key, _ = os.environ[ENVIRONMENT].rsplit("|", 2)
        if address.startswith("@"):
            address = "\0" + address[1:]
        else:
            host, port = address.rsplit(":", 1)
            address = (host, int(port))
        self.rank, self.on_message = rank, on_message
        self.lock = threading.Lock()
        self.connection = Client(address, authkey=bytes.fromhex(key))
        self.send("hello", rank=rank, writer=writer)
        threading.Thread(target=self._receive, daemon=True, name="line-receive").start()

    def send(self, kind: str, **content) -> None:
        with self.lock:
            self.connection.send((kind, content))

    def _receive(self):
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, content = self.connection.recv()
                try:
                    self.on_message(kind, content)
                except Exception as error:
                    traceback.print_exc()
                    self.send("failed", reason=f"{type(error).__name__}: {error}", known=False, session=None)


def leave_signals_to_the_main_process() -> None:
    """For every process of the engine. Ctrl-C and SIGTERM, sent to the whole group, are for the main process, which
    lets samples in flight finish; it asks for the stacks, by SIGUSR2, when nothing comes back."""
    for deaf in (signal.SIGINT, signal.SIGTERM):
        signal.signal(deaf, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def writers_a_rank() -> int:
    """How many writer processes the committing process expects of this rank."""
    return int(os.environ[ENVIRONMENT].rsplit("|", 1)[1])


def writer_of(index: int, ranks: int, writers: int) -> tuple[int, int]:
    """(rank, writer): who writes sample `index`. Hidden states are complete on every rank, so this shares them out; a
    writer takes a run of samples, so that what one forward pass completes concerns few of them."""
    return index % ranks, index // ranks // RUN % writers


def shut(connection: Connection | socket.socket) -> None:
    """Close what a thread may be waiting in: closing alone would leave it open until that thread wakes."""
    with contextlib.suppress(OSError):
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)
        connection.close()
