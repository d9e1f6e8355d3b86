"""The connection of a client: its channel, its calls, regions and restarts, and what it knows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health_pb2_grpc

from spillway_kv import _library, _native, _split, forks
from spillway_kv._native import Carrier, NativeChannel
from spillway_kv._proto import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    attention_service_pb2_grpc,
    memory_service_pb2_grpc,
    model_service_pb2_grpc,
    sequence_service_pb2_grpc,
)
from spillway_kv.access import Access
from spillway_kv.errors import Unavailable, VersionMismatch, error_from_rpc
from spillway_kv.presence import Presence
from spillway_kv.regions import Regions
from spillway_kv.restart import Restarts
from spillway_kv.server import ServerInfo, Transport
from spillway_kv.tracing import Metadata, trace_metadata

if TYPE_CHECKING:
    from spillway_kv.client import Client

# Size limit of a message at the daemon. Larger messages are refused by both sides.
MESSAGE_BYTES_MAX = 4 << 20
API_MAJOR = 0


class Stubs:
    """The stubs of the services. Their methods have no types."""

    def __init__(self, channel: Any) -> None:
        self.models: Any = model_service_pb2_grpc.ModelServiceStub(channel)
        self.sequences: Any = sequence_service_pb2_grpc.SequenceServiceStub(channel)
        self.attention: Any = attention_service_pb2_grpc.AttentionServiceStub(channel)
        self.memory: Any = memory_service_pb2_grpc.MemoryServiceStub(channel)
        self.admin: Any = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)


class Connection:
    """A connection to one daemon, or the engine in this process. Thread-safe.

    Attributes:
        target: gRPC target of the daemon.
        server_info: The daemon's description of itself, from the time when the client connected,
            or continued after a restart.
        channel: Carries the calls, except decode steps.
        stubs: The services.
        presence: Shows a daemon that the client is connected. None: an embedded engine, which ends
            with this process.
        native: Carries decode steps, and all calls to an embedded engine. None: without
            libspillway.
        regions: The memory that the client shares with the daemon.
        restarts: Continues calls after a restart of the daemon.
        budget_bytes: Bytes of tensors in one message.
        carrier: What may carry the tensors of decode steps. Tests set it.
        no_doorbell: Why there is no doorbell; empty as long as that is not known.
        no_decoder: Why the last decoder could not be opened.
        left: In a forked process: the error for every use, because the connection belongs to the
            parent.
    """

    def __init__(
        self,
        target: str,
        timeout: float,
        native: bool | None,
        settings: Mapping[str, str],
        access: Access,
        resume_seconds: float,
    ) -> None:
        forks.check_connect()
        self.target = target
        self.left = ""
        self._timeout = timeout
        self._native_asked = native
        self.carrier = Carrier.BEST
        self.no_doorbell = ""
        self.no_decoder = ""
        embedded = target == _native.EMBEDDED
        library = None if native is False else _library.library(required=embedded or native is True)
        self.native: NativeChannel | None = None
        self.presence: Presence | None = None
        if embedded:
            assert library is not None
            self.native = NativeChannel(library, target, settings, access)
            self.channel: Any = self.native
            self.stubs = Stubs(self.channel)
        else:
            self.channel = _grpcio_channel(target, access)
            self.stubs = Stubs(self.channel)
            self.presence = Presence(self.stubs.sequences.Connect)
            # For a client that is never closed.
            forks.finalizer(self, self.presence.close)
            if library is not None:
                self.native = NativeChannel(
                    library, target, settings, access, self.presence.client_id
                )
        self.regions = Regions(self)
        forks.leaves(self)
        self.restarts = Restarts(self, resume_seconds)
        try:
            self.server_info = self.get_server_info()
            major = self.server_info.version.split(".")[0]
            if major != str(API_MAJOR):
                raise VersionMismatch(
                    f"the daemon at {target} has version {self.server_info.version}; "
                    f"this client speaks major version {API_MAJOR}"
                )
        except Unavailable as error:
            self.close()
            raise Unavailable(
                f"no daemon answers at {target} ({error.message}); start spillwayd or name another "
                "target with connect(target) or SPILLWAY_TARGET"
            ) from None
        except BaseException:
            self.close()
            raise
        limit = self.server_info.limits.message_bytes_max or MESSAGE_BYTES_MAX
        self.budget_bytes = min(limit, MESSAGE_BYTES_MAX) - _split.OVERHEAD_BYTES

    def close(self) -> None:
        """Closes the connection. In a forked process, this does nothing."""
        if self.left:
            return
        self.regions.close()
        if self.presence is not None:
            self.presence.close()
        self.channel.close()
        if self.native is not None:
            self.native.close()

    def leave_to_parent(self, error: str) -> None:
        """In a forked process: makes every use raise a RuntimeError with this text."""
        self.left = error
        # When these are destroyed they write to the connection, which only the parent may do.
        for given in (self.channel, self.stubs, self.presence):
            forks.keep(given)
        if self.native is not None:
            self.native.leave_to_parent(error)
        self.channel = self.stubs = cast(Any, forks.Left(error))
        self.regions.leave_to_parent(error)

    @property
    def transport(self) -> str:
        """What sends and receives the messages of decode steps.

        `embedded`: nothing, they are function calls within the process. `libspillway`, or `grpcio`
        if libspillway is not installed: over the socket of a daemon.
        """
        if self.native is None:
            return "grpcio"
        return "embedded" if self.target == _native.EMBEDDED else "libspillway"

    @property
    def step_transport(self) -> str:
        """How decode steps (`begin_step`) are transported.

        Like `transport`, or `doorbell`, which is faster than a socket: memory that libspillway
        shares with a daemon on this host.
        """
        possible = self.native is not None and self.regions.available and not self.no_doorbell
        return "doorbell" if possible and self.carrier != Carrier.MESSAGES else self.transport

    def described_transport(self) -> Transport:
        """Returns how the engine is reached, and why no better transport is used."""
        steps = self.step_transport
        gpus = [device for device in self.server_info.devices if device.uuid]
        mps = bool(gpus) and all(gpu.mps for gpu in gpus)
        if steps == "embedded":
            return Transport(steps, "in place", mps, "")
        reasons = ['the engine is in a daemon, and not in this process: connect("embedded:")']
        if steps == "grpcio":
            reasons.append(
                "native=False was asked for"
                if self._native_asked is False
                else "libspillway was not found: SPILLWAY_LIBRARY can name it"
            )
        elif steps == "libspillway":
            reasons.append(self.no_doorbell or "no doorbell: it needs a unix socket of the daemon")
        taking_turns = [gpu.name for gpu in gpus if not gpu.mps]
        if taking_turns:
            reasons.append(
                f"the daemon's {', '.join(taking_turns)} is not shared through MPS: kernels of "
                "this process take turns with the daemon's (spillwayd --mps on)"
            )
        if self.no_decoder:
            reasons.append(f"no decoder: {self.no_decoder}")
        if self.regions.no_gpu:
            reasons.append(f"no memory of the daemon's GPU is shared: {self.regions.no_gpu}")
        if not self.regions.available or self.regions.refused:
            reasons.append(
                "the client could not get a region of its own, for lack of memory or of the "
                "daemon's socket for regions: Client.attach_region raises the reason"
                if self.regions.available
                else "there are no regions: they need a unix socket of the daemon"
            )
            return Transport(steps, "messages", mps, "; ".join(reasons))
        if not self.regions.attached:
            reasons.append(
                "large arrays are copied to the client's own region, small ones to messages: "
                "arrays in a region of Client.attach_region are not copied"
            )
        return Transport(steps, "regions", mps, "; ".join(reasons))

    @property
    def metadata(self) -> Metadata | None:
        """gRPC metadata of a call: the id of this client, and of the active trace."""
        return None if self.presence is None else self.presence.metadata + trace_metadata()

    def call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        """Calls a method with one response. Raises SpillwayError, or what `request` raises.

        request: A message, or an iterator of messages.
        timeout: Seconds. None means the client's timeout, and infinity no limit.
        """
        limit = self._timeout if timeout is None else timeout
        # Errors while requests are made, which grpcio does in a thread of its own.
        failed: list[Exception] = []
        if isinstance(request, Iterator):
            request = _noting(request, failed)
        try:
            return method(
                request, timeout=None if math.isinf(limit) else limit, metadata=self.metadata
            )
        except grpc.RpcError as error:
            if failed:
                raise failed[0] from None
            raise error_from_rpc(error) from None

    def read(self, method: Any, request: Any) -> Any:
        """Calls a method that changes nothing. Repeats it if a restart of the daemon broke it."""
        return self.restarts.again(partial(self.call, method, request))

    def stream(self, method: Any, request: Any, *, timeout: float | None = None) -> Iterator[Any]:
        """Calls a method with a stream of responses. An abandoned iterator cancels the call."""
        limit = self._timeout if timeout is None else timeout
        call = method(request, timeout=limit, metadata=self.metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            if self.left:
                forks.keep(call)
            else:
                call.cancel()

    def get_server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the daemon for its description. timeout: seconds; None: the client's."""
        request = admin_service_pb2.GetServerInfoRequest()
        return ServerInfo.from_proto(
            self.call(self.stubs.admin.GetServerInfo, request, timeout=timeout)
        )

    def boot_id(self) -> str:
        """Asks the daemon for its boot_id. An embedded engine is not asked: it does not restart."""
        embedded = self.target == _native.EMBEDDED
        info = self.server_info if embedded else self.get_server_info()
        return info.boot_id

    def snapshot_folder(self, folder: str | Path) -> str:
        """Returns the folder as the engine sees it. An embedded engine accepts any path.

        Raises:
            ValueError: The name is empty, or begins with "~" and an unknown user.
        """
        text = os.fspath(folder)
        if self.target != _native.EMBEDDED:
            return text
        if not text:
            raise ValueError("the name of the folder is empty")
        path = os.path.expanduser(text)
        if path.startswith("~"):
            raise ValueError(f"{text}: there is no user of this name; for a folder, write ./{text}")
        return os.path.abspath(path)


def wire(client: Client) -> Connection:
    """Returns the connection of a client, for what its calls do not offer."""
    return client._wire  # noqa: SLF001


def _noting(requests: Iterator[Any], failed: list[Exception]) -> Iterator[Any]:
    """Yields the requests. If making one of them fails, appends the error to `failed`."""
    try:
        yield from requests
    except Exception as error:
        failed.append(error)
        raise


def _grpcio_channel(target: str, access: Access) -> grpc.Channel:
    return access.grpcio_channel(
        target,
        [
            # A daemon on this host is not behind the user's web proxy.
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.enable_http_proxy", 0),
            # A daemon that restarts is found again soon.
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ],
    )
