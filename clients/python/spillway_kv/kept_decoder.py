"""A decoder on a GPU that is kept open from step to step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import torch

from spillway_kv._library import Sums
from spillway_kv.client import Client
from spillway_kv.policy import Policy
from spillway_kv.sequence import Sequence
from spillway_kv.step_graph import StepGraph

# A decoder has room for at least so many tokens, and for so many more than its sequences have.
# Another one is opened when they are there, in a few ms.
_ROOM_MIN = 8192
_MORE_MIN = 2048


def _room(longest: int) -> int:
    """Returns for how many tokens a decoder is opened: a quarter more than there are."""
    more = longest + max(longest // 4, _MORE_MIN)
    return max(-(-more // 1024) * 1024, _ROOM_MIN)


class KeptDecoder:
    """A decoder of some sequences, with the settings for which it was opened, and its counts.

    Not thread-safe. The sequences are held until `decoder.close()`.

    Attributes:
        decoder: The decoder.

    Args:
        client: Client of an embedded engine, or of a daemon on this host, on a GPU.
        sequences: The sequences to decode, each with the same number of tokens in all layers.
        policy: Overrides the policies of the sequences.
        token_count: Number of new tokens of each sequence in a step.
        length_max: Tokens that no sequence will have more of, as far as the caller knows. A decoder
            with room for no more takes less memory.

    Raises:
        SpillwayError: As for `Client.open_decoder`.
    """

    def __init__(
        self,
        client: Client,
        sequences: SequenceABC[Sequence],
        policy: Policy | None,
        token_count: int,
        length_max: int | None = None,
    ) -> None:
        longest = max(sequence.token_count for sequence in sequences)
        room = _room(longest)
        if length_max is not None:
            room = max(min(room, length_max), longest + token_count)
        self.decoder = client.open_decoder(
            sequences, token_count=token_count, token_count_max=room, policy=policy
        )
        self._policy = policy
        self._room = self.decoder.token_count_max - longest
        self._layer_count = self.decoder.layer_count
        self._next_layer = self._layer_count
        self._taken = [Sums() for _ in range(self._layer_count)]

    def serves(self, policy: Policy | None, token_count: int) -> bool:
        """Whether the decoder fits the next step: same policy and token count, and enough room."""
        same = policy == self._policy and token_count == self.decoder.token_count
        return same and token_count <= self._room

    @property
    def between_steps(self) -> bool:
        """Whether all layers of the step are attended."""
        return self._next_layer == self._layer_count

    def next(self) -> None:
        """Begins the next step, like `StreamDecoder.next`."""
        self.decoder.next()
        self._room -= self.decoder.token_count
        self._next_layer = 0

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `StreamDecoder.attend`, but returns only the output [B, T, H_q, d].

        out: written and returned if it is given.
        """
        made, _ = self.decoder.attend(layer, q, k, v, out=out, wants_lse=False)
        self._next_layer = layer + 1
        return made

    def run(self, graph: StepGraph) -> None:
        """Runs all layers of the step, like `StreamDecoder.run`."""
        self.decoder.run(graph)
        self._next_layer = self._layer_count

    def take(self) -> list[tuple[int, Sums]]:
        """Returns the sums of each layer, over steps that finished since the last call."""
        taken = []
        for layer, before in enumerate(self._taken):
            now = self.decoder.sums(layer)
            names = [name for name, _ in Sums._fields_]
            more = Sums(*(getattr(now, name) - getattr(before, name) for name in names))
            taken.append((layer, more))
            self._taken[layer] = now
        return taken
