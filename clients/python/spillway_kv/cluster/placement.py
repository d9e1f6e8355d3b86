"""Which daemons exist, and which models and sequences are on them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import spillway_kv
from spillway_kv.cluster.shares import Share, deal
from spillway_kv.cluster.weights import WeightsFile
from spillway_kv.errors import SpillwayError
from spillway_kv.results import Model


@dataclass(frozen=True)
class Dealt:
    """A model, and how it is split over daemons.

    Attributes:
        model: The whole model.
        part_count: Number of daemons that hold a sequence of the model, one part each.
        layer_groups: Number of groups of consecutive layers. Each group has the same number of
            parts.
        options: Arguments with which a part is created, apart from its share.
        made: Id that distinguishes it from earlier models with this name.
        weights: The hash weights that were uploaded. None: none were.
    """

    model: Model
    part_count: int
    layer_groups: int
    options: Mapping[str, Any] = field(compare=False)
    made: str
    weights: WeightsFile | None = None

    @property
    def shares(self) -> list[Share]:
        """The share of each part."""
        model = self.model
        return deal(model.layer_count, model.kv_head_count, self.part_count, self.layer_groups)


# Most time between taking a name and creating its sequence, which may load a large snapshot.
CLAIM_SECONDS = 600.0

# Names of this form are reserved for parts.
_PART = re.compile(r"(.+)\.(\d+)of(\d+)")


def part_name(name: str, number: int, part_count: int) -> str:
    """Returns a daemon's name of a part of a model or sequence. A whole one keeps its name."""
    return name if part_count == 1 or not name else f"{name}.{number}of{part_count}"


def part_folder(folder: str | Path, number: int, part_count: int) -> str:
    """Returns the folder in which a daemon saves its part of a sequence."""
    return str(folder) if part_count == 1 else f"{folder}/part{number}"


def whole_of(part: str) -> tuple[str, int, int]:
    """Returns the name of the whole, the number of the part, and the number of all parts."""
    matched = _PART.fullmatch(part)
    if matched is None:
        return part, 0, 1
    return matched[1], int(matched[2]), int(matched[3])


def check_id(name: str) -> None:
    """Raises InvalidArgument for a name that has the form of a part's name."""
    if _PART.fullmatch(name):
        raise spillway_kv.InvalidArgument(
            f"{name!r} ends like the parts of a model or sequence (.NUMBERofCOUNT): "
            "choose another name"
        )


class Placement(Protocol):
    """Decides where models and sequences are. Thread-safe."""

    # Defaults for models that do not specify them.
    part_count: int
    layer_groups: int

    def daemons(self) -> list[str]:
        """Returns the names of the daemons that serve."""

    def restarting(self) -> list[str]:
        """Returns the names of daemons that are being restarted and will have what they had."""

    def client(self, daemon: str) -> spillway_kv.Client:
        """Returns the client of a daemon.

        Raises:
            Unavailable: The daemon does not answer, or is gone.
        """

    def dealt(self, name: str) -> Dealt | None:
        """Returns a model by its resource name. None: no such model is recorded."""

    def add_model(self, dealt: Dealt) -> None:
        """Records a model, so that its parts can be created on more daemons.

        Raises:
            AlreadyExists: There is another model with this name.
        """

    def note_weights(self, dealt: Dealt) -> None:
        """Records the uploaded hash weights of a model, so that more daemons can get them.

        Raises:
            NotFound: The model was deleted in between.
        """

    def drop_model(self, name: str) -> None:
        """Drops the record of a model."""

    def choose(self, part_count: int, sequence: str, model: Dealt | None = None) -> list[str]:
        """Chooses daemons for a new sequence, a different one for each part.

        Args:
            part_count: Number of daemons.
            sequence: Resource name of the sequence, which is then taken; empty: no name.
            model: Its model, as known to the caller.

        Raises:
            Stale: The model was deleted or replaced.
            AlreadyExists: The name is taken.
            Unavailable: There are too few daemons.
        """

    def put(self, sequence: str, daemons: SequenceABC[str]) -> None:
        """Records where the parts of a named sequence are that was created by a fork.

        Raises:
            AlreadyExists: The name is taken.
        """

    def find(self, sequence: str) -> list[str] | None:
        """Returns the daemons on which a named sequence's parts were placed. None: no such name."""

    def drop(self, sequence: str, older_than: float = 0.0) -> None:
        """Drops a name, if it was taken at least `older_than` seconds ago, with the same token."""

    def deleted(self, sequence: str, parts: SequenceABC[tuple[str, str]]) -> list[tuple[str, str]]:
        """Records that a sequence was deleted, and drops its name, unless another has it now.

        Args:
            sequence: Name of the sequence; empty: it had none.
            parts: Name and daemon of each part.

        Returns:
            Names and daemons of copies that an unfinished move may have left.
        """

    def moved(self, part: str, daemon: str, *, gone: bool) -> Moved | None:
        """Returns where a part is that was on a daemon. None: it did not move.

        Args:
            part: Name of the part on the daemons.
            daemon: The daemon that is known to have had it.
            gone: The part is no longer there, so a move in progress from there has succeeded.
        """

    def loss(self, daemon: str) -> SpillwayError | None:
        """Returns the error if a daemon is gone for good. None: it may come back."""

    def close(self) -> None:
        """Closes the connections."""


@dataclass(frozen=True)
class Moved:
    """The move of a part to another daemon.

    Attributes:
        daemon: The daemon that has the part now.
        generation: Generation of the part when it left the old daemon.
        new_generation: Generation of the part when it came to the new daemon.
    """

    daemon: str
    generation: int
    new_generation: int


class Stale(spillway_kv.Aborted):
    """The caller's information about a model is outdated: the model was deleted."""


@contextlib.contextmanager
def named(placement: Placement, sequence: str) -> Iterator[None]:
    """Drops the name of a sequence if creating the sequence fails."""
    try:
        yield
    except BaseException:
        if sequence:
            placement.drop(sequence)
        raise
