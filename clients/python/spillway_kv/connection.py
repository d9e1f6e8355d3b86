"""The connection of a client: its channel, its calls, regions and restarts, and what it knows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from spillway_kv import _library, _native, _split, forks
from spillway_kv._native import Carrier, NativeChannel
from spillway_kv._proto import admin_service_pb2, model_service_pb2
from spillway_kv.access import Access
from spillway_kv.errors import Unavailable, VersionMismatch
from spillway_kv.regions import Regions
from spillway_kv.restart import Restarts
from spillway_kv.results import Model
from spillway_kv.server import ServerInfo, Transport
from spillway_kv.services import Services

# Size limit of a message. Larger ones are refused by the side that receives them.
MESSAGE_BYTES_MAX = 4 << 20
API_MAJOR = 0


class Connection:
    """A connection to one daemon, or the engine in this process. Thread-safe.

    Attributes:
        target: gRPC target of the daemon.
        server_info: The daemon's description of itself, from the time when the client connected,
            or continued after a restart.
        channel: Carries everything, and shows a daemon that the client is connected.
        stubs: The services.
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
        settings: Mapping[str, str],
        access: Access,
        resume_seconds: float,
    ) -> None:
        forks.check_connect()
        self.target = target
        self.left = ""
        self._timeout = timeout
        self.carrier = Carrier.BEST
        self.no_doorbell = ""
        self.no_decoder = ""
        self.channel = NativeChannel(_library.library(), target, settings, access)
        self.stubs = Services(self.channel)
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
        self.channel.close()

    def leave_to_parent(self, error: str) -> None:
        """In a forked process: makes every use raise a RuntimeError with this text."""
        self.left = error
        # When it is destroyed it writes to the connection, which only the parent may do.
        forks.keep(self.channel)
        self.channel.leave_to_parent(error)
        self.stubs = cast(Any, forks.Left(error))
        self.regions.leave_to_parent()

    @property
    def transport(self) -> str:
        """Where the engine is: `embedded`, in this process; `daemon`, in another one."""
        return "embedded" if self.target == _native.EMBEDDED else "daemon"

    @property
    def step_transport(self) -> str:
        """How decode steps (`begin_step`) are transported.

        `embedded`: not at all, they are function calls within the process. `doorbell`: by memory
        that is shared with a daemon on this host. `messages`: over the daemon's socket.
        """
        if self.target == _native.EMBEDDED:
            return "embedded"
        possible = self.regions.available and not self.no_doorbell
        return "doorbell" if possible and self.carrier != Carrier.MESSAGES else "messages"

    def described_transport(self) -> Transport:
        """Returns how the engine is reached, and why no better transport is used."""
        steps = self.step_transport
        gpus = [device for device in self.server_info.devices if device.uuid]
        mps = bool(gpus) and all(gpu.mps for gpu in gpus)
        if steps == "embedded":
            return Transport(steps, "in place", mps, "")
        reasons = ['the engine is in a daemon, and not in this process: connect("embedded:")']
        if steps == "messages":
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

    def call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        """Calls a method with one response. Raises SpillwayError, or what `request` raises.

        request: A message, or an iterator of messages.
        timeout: Seconds. None means the client's timeout, and infinity no limit.
        """
        limit = self._timeout if timeout is None else timeout
        return method(request, timeout=None if math.isinf(limit) else limit)

    def read(self, method: Any, request: Any) -> Any:
        """Calls a method that changes nothing. Repeats it if a restart of the daemon broke it."""
        return self.restarts.again(partial(self.call, method, request))

    def stream(self, method: Any, request: Any, *, timeout: float | None = None) -> Iterator[Any]:
        """Calls a method with a stream of responses. An abandoned iterator cancels the call."""
        limit = self._timeout if timeout is None else timeout
        call = method(request, timeout=limit)
        try:
            yield from call
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

    def get_model(self, name: str) -> Model:
        """Returns a model by its resource name. Raises NotFound if there is none."""
        request = model_service_pb2.GetModelRequest(name=name)
        return Model.from_proto(self.read(self.stubs.models.GetModel, request).model)

    def go_on_with(self, now: ServerInfo) -> None:
        """Takes over another process of the daemon, which has the rows and no regions."""
        self.server_info = now
        self.regions.forget()

    def serves(self) -> bool:
        """Whether the daemon reports that it is serving."""
        return self.channel.serves(self._timeout)

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
