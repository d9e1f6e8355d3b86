"""The daemon of one Ray node: starts, watches, restarts and drains it.

Plain Python, without Ray: `actors.NodeActor` serves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import spillway_kv
from spillway_kv.cluster.model_parts import ensure_part
from spillway_kv.cluster.moving import Copied, Ledger, move
from spillway_kv.cluster.placement import CLAIM_SECONDS, Dealt, Moved, whole_of
from spillway_kv.cluster.process import DaemonProcess
from spillway_kv.cluster.records import DaemonRecord, State
from spillway_kv.errors import NotFound, SpillwayError, Unavailable

_log = logging.getLogger(__name__)

_START_SECONDS = 120.0
_GRACE_SECONDS = 30.0
# Interval of the reports about how full the daemon is.
_REPORT_SECONDS = 1.0
# Interval of the checks which names have expired.
_EXPIRE_SECONDS = 60.0
# Pause before a daemon that ended is started again. It doubles if the daemon ends quickly.
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 0.05, 10.0
_STEADY_SECONDS = 30.0


class NodeDirectory(Ledger, Protocol):
    """The methods of the directory that a node calls; see `Directory`."""

    def register(self, record: DaemonRecord) -> str: ...

    def report(self, name: str, **told: int) -> None: ...

    def set_state(self, name: str, state: State, reason: str = "") -> None: ...

    def ended(self, name: str, boot_id: str) -> None: ...

    def daemons(self) -> list[DaemonRecord]: ...

    def first_parts(self, daemon: str, older_than: float) -> dict[str, str]: ...

    def expire(self, names: SequenceABC[str], daemon: str, older_than: float) -> None: ...

    def daemon(self, name: str) -> DaemonRecord: ...

    def model(self, name: str) -> Dealt | None: ...

    def moves_from(self, source: str) -> dict[str, Moved]: ...

    def choose_target(self, source: str, part: str, byte_count: int) -> str: ...


@dataclass(frozen=True)
class Drained:
    """The result of a drain.

    Attributes:
        moves: For each part that was moved: the target daemon, and what was copied.
        gone: Parts that were deleted or expired during the drain.
    """

    moves: dict[str, tuple[str, Copied]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


class Node:
    """A daemon and the thread that watches it. Thread-safe."""

    def __init__(
        self,
        process: DaemonProcess,
        directory: NodeDirectory,
        record: DaemonRecord,
        connect: Callable[[DaemonRecord], spillway_kv.Client],
        *,
        has_token: bool = False,
    ) -> None:
        """Does not start the daemon yet.

        Args:
            process: Process of the daemon.
            directory: Directory where the daemon is registered.
            record: Record with what is known of the daemon before it runs.
            connect: Creates a client of a daemon.
            has_token: Whether these clients have a token, and so see only its own sequences.
        """
        self._process = process
        self._directory = directory
        self._record = record
        self._connect = connect
        self._has_token = has_token
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._draining = threading.Lock()
        self._client: spillway_kv.Client | None = None
        self._restart_count = 0
        # boot_id of the process that is registered.
        self._boot_id = ""
        self._expire_at = 0.0
        self.name = ""

    def start(self) -> str:
        """Returns the daemon's name when it serves. A second call changes nothing.

        A daemon that was drained and has ended is not started again.

        Raises:
            RuntimeError: The daemon does not serve. The message has the end of the log.
            Unavailable: The daemon does not serve yet, after `keep_starting`.
        """
        if self._watcher is None and not self._was_drained():
            self._process.start(_START_SECONDS)
            self._register()
            self._start_watcher(registered=True)
        if not self.name:
            raise Unavailable("the daemon does not serve yet")
        return self.name

    def keep_starting(self) -> None:
        """After a failed `start`: starts the daemon in the background, until it serves."""
        if self._watcher is None:
            self._start_watcher(registered=False)

    def _start_watcher(self, *, registered: bool) -> None:
        self._watcher = threading.Thread(
            target=self._watch, args=(registered,), name="spillway-node", daemon=True
        )
        self._watcher.start()

    def _was_drained(self) -> bool:
        """Whether an earlier node has drained and ended the daemon. If it still runs, it drains."""
        mine = [each for each in self._directory.daemons() if each.slot == self._record.slot]
        drained = [each.name for each in mine if each.state == "drained"]
        if not drained or any(each.state not in ("lost", "drained") for each in mine):
            return False
        self.name = drained[-1]
        if self._process.pid is not None:
            self._directory.set_state(self.name, "draining")
            return False
        self._stopping.set()
        self._process.clear()
        return True

    def _register(self) -> None:
        # Over a new connection, because the old one may take a second to reconnect.
        fresh = self._connect(self._record)
        info = fresh.server_info
        self._boot_id = info.boot_id
        try:
            self.name = self._directory.register(
                dataclasses.replace(
                    self._record,
                    version=info.version,
                    boot_id=info.boot_id,
                    store_id=info.store_id,
                    memory_limit_bytes=info.limits.memory_bytes_max,
                    restart_count=self._restart_count,
                )
            )
        except BaseException:
            fresh.close()
            raise
        if self._client is None:
            fresh.connection.restarts.given_up = self._given_up
            # Set last, because from now on the daemon can be drained.
            self._client = fresh
        else:
            fresh.close()
        # A drain in progress does this itself.
        if self._draining.acquire(blocking=False):
            try:
                for part, moved in self._directory.moves_from(self.name).items():
                    self._settle(part, moved)
            finally:
                self._draining.release()

    def _settle(self, part: str, moved: Moved) -> None:
        """Ends a move that was interrupted. It is final if the daemon no longer has the part.

        Otherwise clients go on here, and the copy will soon lack what they append.
        """
        assert self._client is not None
        try:
            self._client.get_sequence(part).unseal()
        except NotFound:
            self._directory.end_move(part, done=True)
            return
        self._directory.end_move(part, done=False)
        # If its daemon does not answer, the copy stays until its ttl, or until the next drain.
        with contextlib.suppress(SpillwayError):
            with contextlib.closing(self._connect(self._directory.daemon(moved.daemon))) as other:
                other.get_sequence(part).delete()

    def _watch(self, registered: bool) -> None:
        pause = _PAUSE_SECONDS_MIN
        started = time.monotonic()
        while not self._stopping.is_set():
            try:
                if not self.name and self._was_drained():
                    return
                if not self._process.wait(_REPORT_SECONDS):
                    if not registered:
                        self._register()
                        registered = True
                    self._report()
                    continue
                if self._stopping.is_set():
                    return
                # In a thread, because the directory may be down too, and the restart must not wait
                # for it.
                if self._boot_id:
                    threading.Thread(
                        target=self._tell_end, args=(self._boot_id,), daemon=True
                    ).start()
                if time.monotonic() - started > _STEADY_SECONDS:
                    pause = _PAUSE_SECONDS_MIN
                _log.warning("%s has ended; it is started again in %.2f s", self.name, pause)
                self._stopping.wait(pause)
                pause = min(2 * pause, _PAUSE_SECONDS_MAX)
                started = time.monotonic()
                self._restart_count += 1
                registered = False
                self._process.start(_START_SECONDS)
                if self._stopping.is_set():
                    return
                self._register()
                registered = True
            except Exception:
                if self._stopping.is_set():
                    return
                # The directory may be restarting too, and a daemon that cannot start may do so
                # later.
                _log.exception("%s", self.name)
                self._stopping.wait(_REPORT_SECONDS)

    def _given_up(self) -> SpillwayError | None:
        if self._stopping.is_set():
            return Unavailable(f"{self.name} is stopped")
        # The watcher must not wait for a restart, because it is what starts the daemon again.
        if threading.current_thread() is self._watcher and self._process.pid is None:
            return Unavailable(f"{self.name} has ended")
        return None

    def _tell_end(self, boot_id: str) -> None:
        try:
            self._directory.ended(self.name, boot_id)
        except SpillwayError:
            _log.exception("%s has ended, which the directory was not told", self.name)

    def _report(self) -> None:
        assert self._client is not None
        if not self._has_token and time.monotonic() > self._expire_at:
            self._expire()
            self._expire_at = time.monotonic() + _EXPIRE_SECONDS
        statistics = self._client.statistics()
        self._directory.report(
            self.name,
            memory_used_bytes=statistics.memory.used_bytes,
            sequence_count=sum(model.sequence_count for model in statistics.models),
        )

    def _expire(self) -> None:
        """Drops the names of sequences that have expired."""
        assert self._client is not None
        first_parts = self._directory.first_parts(self.name, CLAIM_SECONDS)
        if not first_parts:
            return
        there = {info.name for info in self._client.list_sequences()}
        gone = [name for name, part in first_parts.items() if part not in there]
        if gone:
            self._directory.expire(gone, self.name, CLAIM_SECONDS)

    @property
    def pid(self) -> int | None:
        """Process id of the daemon. None if it does not run."""
        return self._process.pid

    def drain(self, *, own_only: bool = False) -> Drained:
        """Moves all sequences of the daemon to other daemons, and ends it.

        From the start of the drain, new sequences are placed on other daemons. After a failure,
        another call continues where this one stopped.

        Args:
            own_only: If the daemon requires tokens: allow that sequences of other tokens are lost.

        Raises:
            FailedPrecondition: The daemon requires tokens, and `own_only` is not set.
            Unavailable: No other daemon takes sequences, or the daemon was already drained or
                stopped, also by a call that was in progress when this one came.
            SpillwayError: A part could not be moved. It and the parts after it stay, and the daemon
                continues to serve, without new sequences.
        """
        if self._has_token and not own_only:
            raise spillway_kv.FailedPrecondition(
                f"{self.name} requires tokens, and this node's token sees only its own sequences: "
                "those of other tokens would be lost with the daemon (own_only allows it)"
            )
        with self._draining:
            if self._stopping.is_set():
                raise Unavailable(f"{self.name} was drained or stopped, and has ended")
            if self._client is None:
                raise Unavailable("the daemon does not serve yet")
            drained = Drained()
            others: dict[str, spillway_kv.Client] = {}
            try:
                while not self._is_drained(others, drained):
                    pass
            finally:
                for client in others.values():
                    client.close()
            self.stop()
            return drained

    def _is_drained(self, others: dict[str, spillway_kv.Client], drained: Drained) -> bool:
        """Moves all sequences. Returns whether no more can come."""
        self._directory.set_state(self.name, "draining")
        assert self._client is not None
        while infos := list(self._client.list_sequences()):
            # Large ones last, because they take longest, and the others are safe by then.
            for info in sorted(infos, key=lambda each: each.row_bytes):
                self._move(info, others, drained)
        # Set before the daemon ends, so that no client waits for it to come back. Set also before
        # the last list: a client that creates a sequence checks afterwards whether the daemon is
        # drained. So either the client or this list notices the other.
        self._directory.set_state(self.name, "drained")
        try:
            if not list(self._client.list_sequences()):
                return True
        except SpillwayError:
            self._directory.set_state(self.name, "draining")
            raise
        return False

    def _move(
        self,
        info: spillway_kv.SequenceInfo,
        others: dict[str, spillway_kv.Client],
        drained: Drained,
    ) -> None:
        target = self._directory.choose_target(self.name, info.name, info.row_bytes)
        if target not in others:
            others[target] = self._connect(self._directory.daemon(target))
        assert self._client is not None
        copied = move(
            self._client,
            others[target],
            info.name,
            self._directory,
            source_name=self.name,
            target_name=target,
            ensure_model=lambda name: self._ensure_model(name, others[target]),
        )
        if copied is None:
            drained.gone.append(info.name)
        else:
            drained.moves[info.name] = target, copied

    def _ensure_model(self, name: str, client: spillway_kv.Client) -> None:
        """Creates a model, or a part of one, if a daemon has none with this name."""
        whole, number, count = whole_of(name)
        dealt = self._directory.model(whole)
        if dealt is None or dealt.part_count != count:
            # Created by a client that was connected to the daemon itself.
            client.get_model(name)
        else:
            ensure_part(client, dealt, number)

    def stop(self) -> None:
        """Ends the daemon. Its rows are lost."""
        self._stopping.set()
        self._process.stop(_GRACE_SECONDS)
        # Done first, because Ray may kill this process before the rest.
        self._process.clear()
        if self._watcher is not None:
            self._watcher.join()
            # The watcher may just have started a new process.
            self._process.stop(_GRACE_SECONDS)
        self._process.clear()
        if self._client is not None:
            self._client.close()


def host_id() -> str:
    """Returns an id that distinguishes this machine from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
