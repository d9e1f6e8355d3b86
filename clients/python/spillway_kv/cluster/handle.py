"""Calls to the directory's actor."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

import spillway_kv

DIRECTORY = "spillway-directory"

# How long a killed directory may take to restart.
_DIRECTORY_SECONDS = 30.0
_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 0.1


class DirectoryHandle:
    """Calls the directory, and repeats calls while Ray restarts it. Thread-safe."""

    def __init__(self, namespace: str) -> None:
        """Finds the directory's actor.

        Raises:
            Unavailable: There is no cluster in the namespace.
        """
        self._namespace = namespace
        self._actor = self._found()

    def _found(self) -> Any:
        try:
            return ray.get_actor(DIRECTORY, self._namespace)
        except ValueError:
            raise spillway_kv.Unavailable(
                f"there is no Spillway cluster in Ray's namespace {self._namespace!r}; "
                "spillway-cluster up starts one"
            ) from None

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of `Directory`.

        Raises:
            SpillwayError: The error that the method raised; UNAVAILABLE if the directory does not
                answer.
        """
        end = time.monotonic() + _DIRECTORY_SECONDS
        while True:
            try:
                reference = self._actor.call.remote(method, arguments, named)
                return ray.get(reference, timeout=_ANSWER_SECONDS)
            except RayTaskError as error:
                raise error.cause from None
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > end:
                    raise spillway_kv.Unavailable(
                        f"the cluster's directory has not answered {method} for "
                        f"{_DIRECTORY_SECONDS:g} s: {error}"
                    ) from None
            time.sleep(_PAUSE_SECONDS)
