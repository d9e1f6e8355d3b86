"""Decode steps of several requests. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import spillway_kv
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.decoding import Decoding
from spillway_kv.policy import Policy
from spillway_kv.sequence import Sequence
from spillway_kv.vllm.model_graph import ModelGraph
from spillway_kv.vllm.step_plan import PlannedRequest

# How many steps groups other than the first may make before all requests decode in one group. By
# then they have cost about as much time as the wait that joining them takes.
_STEPS_APART = 8


def on_device(numbers: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor on the device, without a wait for the GPU."""
    there = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


@dataclass
class Row:
    """A request of the step, and the position of its tokens in the batch.

    Attributes:
        plan: The request.
        begin: Position of its first token in the batch.
        sequence: Sequence with its K/V.
        alive: False if it was lost in this step.
    """

    plan: PlannedRequest
    begin: int
    sequence: Sequence
    alive: bool = True

    @property
    def end(self) -> int:
        """Position after its last token in the batch."""
        return self.begin + self.plan.token_count


class Group:
    """Rows with the same number of tokens that attend with the same policy.

    Attributes:
        rows: The rows, in the order of the batch.
        policy: Their policy. None means the engine's default.
        together: Whether they are served together. After a failure each is served on its own.

    Args:
        decoding: What serves them.
        rows: As above.
        policy: As above.
        decoder: Whether a decoder may serve them.
    """

    def __init__(
        self, decoding: Decoding, rows: list[Row], policy: Policy | None, *, decoder: bool
    ) -> None:
        self.rows = rows
        self.policy = policy
        self.together = True
        self._decoding = decoding
        self._decoder = decoder
        self._token_count = rows[0].plan.token_count
        # The rows' tokens in the batch. A slice makes no copy of the tensors.
        self._index: slice | torch.Tensor = slice(rows[0].begin, rows[-1].end)
        # Whether each row's outputs of the last layer are finite, on the way to host memory, and
        # when they have arrived.
        self._finite: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    @property
    def on_stream(self) -> bool:
        """Whether a decoder serves the step, so that failures on the GPU are known later."""
        return self._decoding.has_decoder

    @property
    def lacks_decoder(self) -> bool:
        """Whether the step has begun without a decoder, though one could serve it."""
        return self._decoder and self.together and not self.on_stream

    def begin(self, device: torch.device) -> None:
        """Begins the step.

        Args:
            device: Device of the model's tensors.

        Raises:
            SpillwayError: The step cannot be served, or an earlier one has failed on the GPU.
        """
        begin, end = self.rows[0].begin, self.rows[-1].end
        if end - begin != len(self.rows) * self._token_count:
            tokens = [token for row in self.rows for token in range(row.begin, row.end)]
            self._index = on_device(tokens, torch.int64, device)
        self._decoding.begin(
            [row.sequence for row in self.rows],
            [row.plan.start for row in self.rows],
            device=device,
            policy=self.policy,
            token_count=self._token_count,
            decoder=self._decoder,
        )

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        last: bool,
    ) -> None:
        """Appends and attends for all rows. Tensors are those of the batch, [N, H, d].

        Args:
            layer: The layer.
            q: Queries.
            k: Keys.
            v: Values.
            out: Written.
            last: Whether it is the step's last layer.

        Raises:
            SpillwayError: The first failure. Some rows may have been appended.
        """
        index, shape = self._index, (len(self.rows), self._token_count)
        if q.shape[0] != shape[0] * shape[1]:
            # Not all tokens of the batch, as in most steps.
            q, k, v = q[index], k[index], v[index]
        q, k, v = (x.view(*shape, *x.shape[1:]) for x in (q, k, v))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(index, slice):
            # In place: vLLM's tensors are in the same memory at every step, so that the engine can
            # launch the layer as one graph.
            answer = self._decoding.attend(layer, q, k, v, out[index].view(q.shape))
        else:
            answer = self._decoding.attend(layer, q, k, v)
            out[index] = answer.flatten(0, 1)
        if last and self.on_stream:
            self._watch(answer[:, -1, 0, 0].isfinite())

    def run(self, graph: ModelGraph) -> bool:
        """Runs the model as a graph with this group's attends, if a decoder serves it.

        Returns:
            Whether it ran.

        Raises:
            SpillwayError: It has failed.
        """
        if not self._decoding.run(graph.step):
            return False
        assert graph.finite is not None
        self._watch(graph.finite[: len(self.rows)])
        return True

    def _watch(self, finite: torch.Tensor) -> None:
        """Takes which rows' outputs of the last layer are finite, when the GPU knows.

        A layer that fails has outputs that are NaN, and so have all layers after it.
        """
        on_gpu = finite.device.type == "cuda"
        self._finite = torch.empty(
            len(self.rows), dtype=torch.bool, device="cpu", pin_memory=on_gpu
        )
        self._finite.copy_(finite, non_blocking=True)
        if on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def end(self) -> None:
        """Ends the step, without a wait for the GPU."""
        self._decoding.end()

    def failed_rows(self) -> list[Row]:
        """Returns rows of which a layer has failed on the GPU. Waits until the step has run."""
        if self._finite is None:
            return []
        if self._arrived is not None:
            self._arrived.synchronize()
        return [row for row, ok in zip(self.rows, self._finite.tolist(), strict=True) if not ok]


class Decodings:
    """What serves groups of requests, kept while the same requests decode together.

    Args:
        client: Client of the engine.
        length_max: Most tokens that a request can have; None if that is not known.
        make_room: As for `Decoding`.
    """

    def __init__(
        self,
        client: spillway_kv.Client,
        length_max: int | None = None,
        make_room: Callable[[], bool] | None = None,
    ) -> None:
        self._client = client
        self._length_max = length_max
        self._make_room = make_room
        # Keys: the keys of the requests. Values: the decoding, and the length of each sequence.
        self._kept: dict[tuple[int, ...], tuple[Decoding, dict[int, int]]] = {}
        # How many steps groups other than the first have made since all requests decoded in one.
        self._steps_apart = 0
        self._fit_apart = True
        # Those of the step that are not kept.
        self._others: list[Decoding] = []
        self._refused: list[Policy | None] = []
        self._counted: list[LayerStatistics] = []

    @property
    def any_kept(self) -> bool:
        """Whether any is kept from step to step."""
        return bool(self._kept)

    @property
    def stay_apart(self) -> bool:
        """Whether groups go on as they are while prompts are computed.

        Fewer requests decode less efficiently. But while others join, those that decoded before go
        on in a decoder of their own, for some steps: to end it, the host has to wait until the GPU
        has run the step before, with its prompts, and the GPU then waits for the host.
        """
        return self._fit_apart and self._steps_apart < _STEPS_APART

    def join(self) -> None:
        """Says that decoders have no memory beside each other. From now on groups always join."""
        self._fit_apart = False

    def parts(self, requests: list[PlannedRequest]) -> list[list[PlannedRequest]]:
        """Divides requests that could decode together into those that did and the others.

        Args:
            requests: The requests, in the order of the batch.
        """
        left = {request.key: request for request in requests}
        made = []
        for keys, (decoding, _) in self._kept.items():
            of_group = set(keys)
            if decoding.has_decoder and tuple(key for key in left if key in of_group) == keys:
                made.append([left.pop(key) for key in keys])
        if left:
            made.append(list(left.values()))
        return made

    def begin(
        self, groups: list[list[PlannedRequest]], others: set[int], *, apart: bool
    ) -> set[int]:
        """Ends the decodings that the step's groups do not continue.

        Args:
            groups: Groups of requests that decode together.
            others: Sequences that the step uses in another way, by drops or forks.
            apart: Whether groups that could join go on as they are.

        Returns:
            Sequences that decoders still hold. Their lengths are those of the plan.
        """
        self._steps_apart = self._steps_apart + max(len(groups) - 1, 0) if apart else 0
        going_on = {tuple(r.key for r in group): group for group in groups}
        held: set[int] = set()
        for keys in list(self._kept):
            decoding, counts = self._kept[keys]
            group = going_on.get(keys)
            if (
                group is None
                or others & set(keys)
                or any(counts[request.key] != request.start for request in group)
            ):
                self._end(keys)
            elif decoding.has_decoder:
                held |= set(keys)
        return held

    def group(self, rows: list[Row], policy: Policy | None, *, exact: bool) -> Group:
        """Returns a group for the step."""
        if exact:
            self._others.append(Decoding(self._client))
            return Group(self._others[-1], rows, policy, decoder=False)
        keys = tuple(row.plan.key for row in rows)
        if keys not in self._kept:
            decoding = Decoding(self._client, self._refused, self._length_max, self._make_room)
            self._kept[keys] = decoding, {}
        decoding, counts = self._kept[keys]
        counts.update({row.plan.key: row.plan.start + row.plan.token_count for row in rows})
        # After drafts, the lengths follow from which of them were right. A decoder would have to be
        # opened anew at each step.
        return Group(decoding, rows, policy, decoder=rows[0].plan.token_count == 1)

    def let_go(self, rows: list[Row]) -> None:
        """Ends what serves a group, so that its sequences can be used in other ways."""
        self._end(tuple(row.plan.key for row in rows))

    def close(self) -> None:
        """Ends everything."""
        for keys in list(self._kept):
            self._end(keys)

    def _end(self, keys: tuple[int, ...]) -> None:
        kept = self._kept.pop(keys, None)
        if kept is not None:
            kept[0].abandon()
            self._counted += kept[0].take_statistics(wait=False).values()

    def take_statistics(self, *, wait: bool) -> list[LayerStatistics]:
        """Returns statistics of layers since the last call.

        Args:
            wait: Wait for the GPU to end the last steps, so that they are counted.
        """
        taken, self._counted = self._counted, []
        others, self._others = self._others, []
        for decoding in [*others, *(decoding for decoding, _ in self._kept.values())]:
            taken += decoding.take_statistics(wait=wait).values()
        return taken
