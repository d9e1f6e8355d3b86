"""Which daemons there are, and what lies on which of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, Protocol

import spillway
from spillway.errors import SpillwayError
from spillway.results import Model

from spillway_cluster.shares import Share, deal
from spillway_cluster.weights import WeightsFile


@dataclass(frozen=True)
class Dealt:
    """A model, and how it is dealt.

    Attributes:
        model: The whole one.
        part_count: Daemons that hold a sequence of it, one part each.
        layer_groups: Groups of consecutive layers, each of as many parts.
        options: What a part is created with, apart from its share; None: it is not known, so
            the parts must be there.
        made: Tells it from another model that had its name before; empty: nobody notes models.
        weights: The hash weights that were uploaded; None: none were.
    """

    model: Model
    part_count: int
    layer_groups: int = 1
    options: Mapping[str, Any] | None = field(default=None, compare=False)
    made: str = ""
    weights: WeightsFile | None = None

    @property
    def shares(self) -> list[Share]:
        """What each part holds."""
        model = self.model
        return deal(model.layer_count, model.kv_head_count, self.part_count, self.layer_groups)


# Between taking a name and making its sequence, which may be loaded from a large snapshot.
CLAIM_SECONDS = 600.0

# No name of a user's ends so.
_PART = re.compile(r"(.+)\.(\d+)of(\d+)")


def part_name(name: str, number: int, part_count: int) -> str:
    """What a daemon calls a part of a model or of a sequence; a whole one by its own name."""
    return name if part_count == 1 or not name else f"{name}.{number}of{part_count}"


def whole_of(part: str) -> tuple[str, int, int]:
    """The name of what a daemon has a part of, the part's number, and how many there are."""
    matched = _PART.fullmatch(part)
    if matched is None:
        return part, 0, 1
    return matched[1], int(matched[2]), int(matched[3])


def check_id(name: str) -> None:
    """Raises InvalidArgument for a name that a part of something else may have."""
    if _PART.fullmatch(name):
        raise spillway.InvalidArgument(
            f"{name!r} ends like the parts of a model or sequence (.NUMBERofCOUNT): "
            "choose another name"
        )


class Placement(Protocol):
    """Decides where models and sequences lie. Thread-safe."""

    # Parts and groups of layers of a model that names none.
    part_count: int
    layer_groups: int
    # Whether the parts of every model and sequence lie on the daemons in their order, so that
    # nothing is noted.
    in_order: bool

    def daemons(self) -> list[str]:
        """Names of the daemons that serve."""

    def restarting(self) -> list[str]:
        """Names of those that do not, and are about to, with what they had."""

    def client(self, daemon: str) -> spillway.Client:
        """The connection to a daemon.

        Raises:
            Unavailable: It does not answer, or is gone.
        """

    def dealt(self, name: str) -> Dealt | None:
        """A model by its resource name; None: none is noted."""

    def add_model(self, dealt: Dealt) -> None:
        """Notes a model whose parts can be created.

        Raises:
            AlreadyExists: There is another one of its name.
        """

    def note_weights(self, dealt: Dealt) -> None:
        """Notes that a model's hash weights were uploaded, and are to be to further daemons.

        Raises:
            NotFound: The model was deleted meanwhile.
        """

    def drop_model(self, name: str) -> None:
        """Forgets a model."""

    def choose(self, part_count: int, sequence: str, model: Dealt | None = None) -> list[str]:
        """Chooses daemons for a new sequence, one a part, none twice.

        Args:
            part_count: Daemons.
            sequence: Its resource name, which is taken then; empty: it has none.
            model: Of which it shall be, as it is known.

        Raises:
            Stale: The model is another one by now.
            AlreadyExists: The name is taken.
            Unavailable: There are fewer daemons.
        """

    def put(self, sequence: str, daemons: SequenceABC[str]) -> None:
        """Notes where a sequence lies that has got a name otherwise: by a fork.

        Raises:
            AlreadyExists: The name is taken.
        """

    def find(self, sequence: str) -> list[str] | None:
        """Where a named sequence's parts were put; None: there is none."""

    def drop(self, sequence: str, older_than: float = 0.0) -> None:
        """Gives a name up, if it has been taken for so many seconds."""

    def deleted(self, sequence: str, parts: SequenceABC[tuple[str, str]]) -> list[tuple[str, str]]:
        """Notes that a sequence was deleted, and gives its name up.

        Args:
            sequence: Its name; empty: it had none.
            parts: What the daemons called its parts, and where they were.

        Returns:
            Where copies may be that a move had made which was not ended.
        """

    def moved(self, part: str, daemon: str, *, gone: bool) -> Moved | None:
        """Where a part is that was on a daemon: None where it did not move.

        Args:
            part: What the daemons call it.
            daemon: Where it was last.
            gone: That daemon has it no more, so a move that is under way has come so far.
        """

    def loss(self, daemon: str) -> SpillwayError | None:
        """Why a daemon is gone for good; None while it may come back."""

    def close(self) -> None:
        """Closes the connections."""


@dataclass(frozen=True)
class Moved:
    """A part that has gone to another daemon.

    Attributes:
        daemon: Where it is.
        generation: Its generation where it was.
        new_generation: Likewise, where it is.
    """

    daemon: str
    generation: int
    new_generation: int


class Stale(spillway.Aborted):
    """What is known of a model is of one that was deleted."""


class FixedPlacement:
    """Daemons that are named once, in the order of the heads that they hold."""

    in_order = True

    def __init__(self, clients: SequenceABC[spillway.Client], layer_groups: int = 1) -> None:
        """Takes the clients over. Arguments and errors as of `SplitClient`."""
        if not clients:
            raise ValueError("no daemons are named")
        if layer_groups < 1 or len(clients) % layer_groups:
            raise ValueError(
                f"{len(clients)} daemons cannot be split evenly over {layer_groups} groups of "
                "layers"
            )
        seen: dict[str, str] = {}
        first = clients[0].server_info
        for client in clients:
            info = client.server_info
            if info.boot_id in seen:
                raise ValueError(f"{client.target} and {seen[info.boot_id]} are the same daemon")
            seen[info.boot_id] = client.target
            if info.version != first.version:
                raise spillway.VersionMismatch(
                    f"the daemon at {client.target} has version {info.version}, but "
                    f"{clients[0].target} has {first.version}"
                )
        self.part_count = len(clients)
        self.layer_groups = layer_groups
        self._clients = {client.target: client for client in clients}

    def daemons(self) -> list[str]:
        return list(self._clients)

    def restarting(self) -> list[str]:
        return []

    def client(self, daemon: str) -> spillway.Client:
        return self._clients[daemon]

    def dealt(self, name: str) -> Dealt | None:
        return None

    def add_model(self, dealt: Dealt) -> None:
        pass

    def note_weights(self, dealt: Dealt) -> None:
        pass

    def drop_model(self, name: str) -> None:
        pass

    def choose(self, part_count: int, sequence: str, model: Dealt | None = None) -> list[str]:
        assert part_count == self.part_count
        return self.daemons()

    def put(self, sequence: str, daemons: SequenceABC[str]) -> None:
        pass

    def find(self, sequence: str) -> list[str] | None:
        return self.daemons()

    def drop(self, sequence: str, older_than: float = 0.0) -> None:
        pass

    def deleted(self, sequence: str, parts: SequenceABC[tuple[str, str]]) -> list[tuple[str, str]]:
        return []

    def moved(self, part: str, daemon: str, *, gone: bool) -> Moved | None:
        return None

    def loss(self, daemon: str) -> SpillwayError | None:
        return None

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@contextlib.contextmanager
def named(placement: Placement, sequence: str) -> Iterator[None]:
    """Gives a sequence's name up where what makes it fails."""
    try:
        yield
    except BaseException:
        if sequence:
            placement.drop(sequence)
        raise
