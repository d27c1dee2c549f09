"""What comes between two lines of Python: signal handlers, and threads that hold a lock."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def handler(call: Callable[[], object], limit_s: float = 30) -> Iterator[None]:
    """Inside, SIGUSR1 makes the call; what waits for longer than the limit raises TimeoutError."""

    def end(*_: object) -> None:
        raise TimeoutError("it waits for a lock that its own thread holds")

    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    alarm = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    """Inside, another thread holds the lock."""
    holds, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()
