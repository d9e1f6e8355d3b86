"""Calls a function in processes, one for each argument."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


def called(function: Callable[[Any], Any], arguments: Sequence[Any]) -> Iterator[Any]:
    """Yields what the function returns for each argument, in any order.

    As many processes run at once as there are cores. They are forks of this one, which has loaded
    what they need, and they are started by the thread that calls this.

    Raises:
        RuntimeError: The function raised an error in a process, or a process ended without a
            result. Processes that still run are ended.
    """
    context = multiprocessing.get_context("fork")
    left = list(arguments)
    running: dict[Connection, tuple[BaseProcess, Any]] = {}
    try:
        while left or running:
            while left and len(running) < len(os.sched_getaffinity(0)):
                argument = left.pop(0)
                own, given = context.Pipe(duplex=False)
                process: BaseProcess
                process = context.Process(target=_call, args=(function, argument, given))
                process.start()
                # Only the process has it now, so that its end is seen here.
                given.close()
                running[own] = process, argument
            ready = set(wait(list(running)))
            for own in [each for each in running if each in ready]:
                process, argument = running.pop(own)
                try:
                    failed, result = own.recv()
                except EOFError:
                    process.join()
                    raise RuntimeError(f"{argument} ended with {process.exitcode}") from None
                process.join()
                if failed:
                    raise RuntimeError(f"{argument}: {result}")
                yield result
    finally:
        for process, _ in running.values():
            process.terminate()
            process.join()


def _call(function: Callable[[Any], Any], argument: Any, answer: Connection) -> None:
    # A handler in Python would run only after what the process waits for.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = function(argument)
    except Exception as error:
        answer.send((True, f"{type(error).__name__}: {error}"))
    else:
        answer.send((False, result))
