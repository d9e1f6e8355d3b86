"""The plugin's worker side with an embedded engine, compared with double precision."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest
import spillway_kv
import torch
from daemon_process import on_gpu
from helpers import wait_for
from spillway_kv._library import Sums
from spillway_kv.decoding import Decoding
from spillway_kv.indices import RotationHash
from spillway_kv.policy import Policy
from spillway_kv.step import DecodeStep
from spillway_kv.vllm import layers
from spillway_kv.vllm.decoding import Group
from spillway_kv.vllm.layers import Attending, begins_of
from spillway_kv.vllm.model_graph import OpenLayer
from spillway_kv.vllm.sequences import Lost
from spillway_kv.vllm.settings import KeptRoom, Settings
from spillway_kv.vllm.step_plan import Loss, Source, StepPlan
from spillway_kv.vllm.worker import Worker
from vllm_texts import DEVICE, DIM, HEADS, KV_HEADS, LAYERS, SHAPES, Model, Varlen, check, planned


@pytest.fixture(params=["at once", "later", "held"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A model with its own worker, which appends prompts at once, or later as on a GPU.

    Held: a prompt in chunks stays in the device's memory, if there is room among 200 tokens.
    """
    made = Model()
    made.append_later(request.param != "at once", 200 if request.param == "held" else 0)
    if request.param == "held":
        monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", Varlen())
    yield made
    made.worker.close()


def test_the_engines_model_has_the_codes_of_values_that_are_set() -> None:
    for value_bits in (0, 2):
        settings = Settings(memory="64MiB", device=str(DEVICE), value_bits=value_bits)
        model = Model(settings=settings)
        try:
            _, outs = model.step(StepPlan([planned(1, 0, 3)]), {1: 1})
            check(model, outs[1], 1, 0)
            (made,) = model.worker._sequences.client.list_models()
            assert made.hash_weights == RotationHash(value_bits=value_bits)
        finally:
            model.worker.close()


def test_the_engines_model_has_the_row_type_that_is_set() -> None:
    settings = Settings(memory="64MiB", device=str(DEVICE), row_type="int8")
    model = Model(settings=settings)
    try:
        _, outs = model.step(StepPlan([planned(1, 0, 40)]), {1: 1})
        check(model, outs[1], 1, 0)
        # A step reads rows as they are stored.
        _, outs = model.step(StepPlan([planned(1, 40, 1)]), {1: 1})
        off = (outs[1] - model.expected(1, 40, 1)).norm() / model.expected(1, 40, 1).norm()
        assert 1e-5 < off < 0.02
        (made,) = model.worker._sequences.client.list_models()
        assert made.row_type == "int8"
    finally:
        model.worker.close()


def test_chunks_and_decode_steps_in_one_batch(model: Model) -> None:
    """Rows are in any order. Each request sees only its own tokens."""
    texts = {1: 1, 2: 2, 3: 3}
    _, outs = model.step(StepPlan([planned(1, 0, 40), planned(2, 0, 1)]), texts)
    check(model, outs[1], 1, 0)
    check(model, outs[2], 2, 0)
    plan = StepPlan([planned(2, 1, 1), planned(3, 0, 33), planned(1, 40, 1)])
    report, outs = model.step(plan, texts)
    for key, start in ((2, 1), (3, 0), (1, 40)):
        check(model, outs[key], texts[key], start)
    plan = StepPlan([planned(1, 41, 7), planned(2, 2, 1), planned(3, 33, 1, decodes=False)])
    report, outs = model.step(plan, texts)
    for key, start in ((1, 41), (2, 2), (3, 33)):
        check(model, outs[key], texts[key], start)
    assert not report.losses
    assert not report.gone


def test_prompts_that_begin_together_are_attended_in_one_call(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel for several prompts is there. One that goes on is attended on its own."""
    varlen = Varlen()
    monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", varlen)
    texts = {key: key for key in range(1, 6)}
    _, outs = model.step(StepPlan([planned(1, 0, 40), planned(2, 0, 1), planned(3, 0, 33)]), texts)
    for key in (1, 2, 3):
        check(model, outs[key], key, 0)
    ends = [0, 40, 41, 74]
    assert varlen.calls == [(ends, ends, 40, 40)] * LAYERS
    varlen.calls.clear()
    plan = StepPlan([planned(1, 40, 1), planned(4, 0, 5), planned(2, 1, 7), planned(5, 0, 6)])
    report, outs = model.step(plan, texts)
    for key, start in ((1, 40), (2, 1), (4, 0), (5, 0)):
        check(model, outs[key], key, start)
    assert varlen.calls == [([0, 5], [0, 5], 5, 5), ([0, 6], [0, 6], 6, 6)] * LAYERS
    assert not report.losses


def test_a_prompt_in_chunks_stays_in_memory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is room for it, its chunks fetch nothing."""
    varlen = Varlen()
    monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", varlen)
    model.append_later(True, 150)
    fetched: list[int] = []
    fetch = spillway_kv.Sequence.fetch

    def counted(self: Any, layer: int, start: int, end: int, **more: Any) -> Any:
        fetched.append(end)
        return fetch(self, layer, start, end, **more)

    monkeypatch.setattr(spillway_kv.Sequence, "fetch", counted)
    texts = {key: key for key in range(1, 6)}
    # A prompt of 100 tokens in three chunks, beside one of 70 for which there is no room.
    both = StepPlan([planned(1, 0, 40, prompt=100), planned(2, 0, 30, prompt=70)])
    _, outs = model.step(both, texts)
    check(model, outs[1], 1, 0)
    assert varlen.calls == [([0, 40, 70], [0, 40, 70], 40, 40)] * LAYERS
    varlen.calls.clear()
    _, outs = model.step(StepPlan([planned(1, 40, 35, prompt=100)]), texts)
    check(model, outs[1], 1, 40)
    _, outs = model.step(StepPlan([planned(1, 75, 25, prompt=100)]), texts)
    check(model, outs[1], 1, 75)
    assert (
        varlen.calls
        == [([0, 35], [0, 75], 35, 75)] * LAYERS + [([0, 25], [0, 100], 25, 100)] * LAYERS
    )
    assert fetched == []
    _, outs = model.step(StepPlan([planned(2, 30, 40, prompt=70)]), texts)
    check(model, outs[2], 2, 30)
    assert fetched == [30] * LAYERS
    # All are appended, with the other's memory free again.
    _, outs = model.step(
        StepPlan([planned(1, 100, 1), planned(3, 0, 20, prompt=150), planned(2, 70, 1)]), texts
    )
    for key, start in ((1, 100), (2, 70), (3, 0)):
        check(model, outs[key], key, start)
    # A prompt that waits makes room for one that is computed, and then fetches. Not while its K/V
    # are still read for an append.
    appends = model.worker._sequences._appends
    assert appends is not None
    wait_for(lambda: not appends.reads(3))
    _, outs = model.step(StepPlan([planned(4, 0, 20, prompt=120)]), texts)
    check(model, outs[4], 4, 0)
    fetched.clear()
    plan = StepPlan([planned(3, 20, 10, prompt=150), planned(4, 20, 12, prompt=120)])
    report, outs = model.step(plan, texts)
    for key in (3, 4):
        check(model, outs[key], key, 20)
    assert fetched == [20] * LAYERS
    assert not report.losses
    # It is lost, and begins again.
    model.step(StepPlan([planned(5, 0, 4)], dropped=[4]), texts)
    _, outs = model.step(StepPlan([planned(4, 0, 60, prompt=120, epoch=1)]), texts)
    check(model, outs[4], 4, 0)
    _, outs = model.step(StepPlan([planned(4, 60, 61, prompt=120, epoch=1)]), texts)
    check(model, outs[4], 4, 60)


def test_chunks_are_appended_in_order(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing waits between them, and where the first has lacked memory."""
    monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", Varlen())
    model.append_later(True, 100)
    append = spillway_kv.Sequence.append
    calls: list[int] = []

    def slow(self: Any, layer: int, start: int, *rows: Any) -> Any:
        calls.append(start)
        if len(calls) == 1:
            time.sleep(0.1)
            raise spillway_kv.ResourceExhausted("the memory limit is reached")
        return append(self, layer, start, *rows)

    monkeypatch.setattr(spillway_kv.Sequence, "append", slow)
    for start in (0, 30, 60):
        _, outs = model.step(StepPlan([planned(1, start, 30, prompt=90)]), {1: 1})
        check(model, outs[1], 1, start)
    report, outs = model.step(StepPlan([planned(1, 90, 1)]), {1: 1})
    check(model, outs[1], 1, 90)
    assert not report.losses
    # One for each layer, of which the first was made again.
    assert calls[0] == 0
    assert calls.count(0) == LAYERS + 1


def test_a_prompt_that_lacks_memory_is_lost_at_a_later_chunk(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not after all of it is computed. It begins again."""
    monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", Varlen())
    model.append_later(True, 200)
    append = spillway_kv.Sequence.append

    def lacking(self: Any, layer: int, start: int, *rows: Any) -> Any:
        raise spillway_kv.ResourceExhausted("the memory limit is reached")

    monkeypatch.setattr(spillway_kv.Sequence, "append", lacking)
    losses: dict[int, Loss] = {}
    chunks = 0
    while not losses and chunks < 5:
        report, outs = model.step(StepPlan([planned(1, 30 * chunks, 30, prompt=180)]), {1: 1})
        losses, chunks = report.losses, chunks + 1
    assert losses[1].kind == "memory"
    assert not outs[1].any()
    monkeypatch.setattr(spillway_kv.Sequence, "append", append)
    for start in (0, 90):
        _, outs = model.step(
            StepPlan([planned(1, start, 90, prompt=180, epoch=1)], dropped=[1] * (start == 0)),
            {1: 1},
        )
        check(model, outs[1], 1, start)
    report, outs = model.step(StepPlan([planned(1, 180, 1, epoch=1)]), {1: 1})
    check(model, outs[1], 1, 180)
    assert not report.losses


def test_a_prompt_is_computed_again_with_what_was_made_after_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is longer then than its memory, and fetches."""
    monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", Varlen())
    model.append_later(True, 200)
    for start, count in ((0, 30), (30, 35)):
        _, outs = model.step(StepPlan([planned(1, start, count, prompt=60)]), {1: 1})
        check(model, outs[1], 1, start)
    _, outs = model.step(StepPlan([planned(1, 65, 20, prompt=60)]), {1: 1})
    check(model, outs[1], 1, 65)


def by_decoder(model: Model) -> bool:
    """Whether a decoder makes the decode steps: on a GPU, except with a cluster."""
    return on_gpu() and model.worker._sequences.client.transport != "cluster"


def test_requests_that_come_and_go_while_others_decode(model: Model) -> None:
    """A decoder is kept while the same requests decode together. A fork of one of them ends it."""
    texts = {1: 0, 2: 2, 3: 100}
    model.step(StepPlan([planned(1, 0, 100), planned(2, 0, 30)]), texts)
    for step in range(5):
        plan = StepPlan([planned(1, 100 + step, 1), planned(2, 30 + step, 1)])
        report, outs = model.step(plan, texts)
        assert not report.losses
        check(model, outs[1], 0, 100 + step)
        check(model, outs[2], 2, 30 + step)
    if by_decoder(model):
        sums, _ = model.worker.take_statistics(wait=True)
        assert sums.attend_count == 2 * 5 * LAYERS
        assert sums.device_time_us == 0
    plan = StepPlan(
        [planned(1, 105, 1), planned(2, 35, 1), planned(3, 96, 3, source=Source(1, 96))]
    )
    report, outs = model.step(plan, texts)
    assert not report.losses
    check(model, outs[1], 0, 105)
    check(model, outs[2], 2, 35)
    check(model, outs[3], 100, 96)
    report, outs = model.step(StepPlan([planned(1, 103, 1)], dropped=[2]), texts)
    assert not report.losses
    check(model, outs[1], 0, 103)


class StepDecoder:
    """A decoder that attends by decode steps, so that it needs no GPU."""

    token_count = 1
    token_count_max = 8192
    layer_count = LAYERS

    def __init__(self, client: spillway_kv.Client, sequences: list[spillway_kv.Sequence]) -> None:
        self._client, self._sequences = client, sequences
        self._step: DecodeStep | None = None
        self.step_count = 0
        self.closed = False
        # Rows whose outputs are NaN, as if the GPU had found elements that are not finite.
        self.failing: list[int] = []
        self.error: spillway_kv.SpillwayError | None = None
        self.run_error: spillway_kv.SpillwayError | None = None

    def next(self) -> None:
        assert not self.closed
        if self.error is not None:
            raise self.error
        self._step = self._client.begin_step(self._sequences, policy=Policy(selector="all"))
        self.step_count += 1

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        wants_lse: bool,
        out: torch.Tensor | None = None,
    ) -> Any:
        assert self._step is not None
        assert not wants_lse
        made, _ = self._step.attend(layer, q, k, v)
        made[self.failing] = float("nan")
        return (made if out is None else out.copy_(made)), None

    def run(self, graph: Any) -> None:
        if self.run_error is not None:
            raise self.run_error
        graph.run_with(self.attend)

    def finish(self) -> None:
        assert self._step is not None
        self._step.close()

    def sums(self, layer: int) -> Sums:
        return Sums()

    def close(self) -> None:
        self.closed = True


# The texts of requests, by key.
TEXTS = {1: 0, **{key: key for key in range(2, 20)}}


@pytest.fixture
def decoding(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[StepDecoder]:
    """Lets the model's worker open decoders, which hold requests 1 and 2 after two steps of them.

    Returns:
        The decoders that were opened, the first one first.
    """
    opened: list[StepDecoder] = []

    def open_decoder(sequences: list[spillway_kv.Sequence], **_: Any) -> StepDecoder:
        opened.append(StepDecoder(model.worker._sequences.client, sequences))
        return opened[-1]

    monkeypatch.setattr(model.worker._sequences.client, "open_decoder", open_decoder)
    # As with an engine on the GPU of the tensors.
    monkeypatch.setattr(Decoding, "_suits", lambda *_: True)
    model.step(StepPlan([planned(1, 0, 100), planned(2, 0, 30)]), TEXTS)
    for step in range(2):
        plan = StepPlan([planned(1, 100 + step, 1), planned(2, 30 + step, 1)])
        report, outs = model.step(plan, TEXTS)
        assert not report.losses
        check(model, outs[1], 0, 100 + step)
        check(model, outs[2], 2, 30 + step)
    assert [(each.step_count, each.closed) for each in opened] == [(2, False)]
    return opened


def test_drafts_are_attended_together(model: Model) -> None:
    """Requests with as many drafts share a step. Rows of rejected ones are cut by the next step."""
    texts = {1: 1, 2: 2, 3: 3, 4: 4}
    model.step(StepPlan([planned(key, 0, 20 * key) for key in texts]), texts)
    model.worker.take_statistics(wait=True)
    rows = Model.rows
    # Of the first request's drafts one is right, of the third's none.
    right = {1: 22, 3: 61}

    def drafted(text: int, position: int, layer: int) -> tuple[torch.Tensor, ...]:
        return rows(text if position < right.get(text, 1000) else 50, position, layer)

    model.rows = drafted  # type: ignore[method-assign]
    plan = StepPlan(
        [
            planned(1, 20, 4, decodes=True),
            planned(2, 40, 1),
            planned(3, 60, 4, decodes=True),
            planned(4, 80, 3, decodes=True),
        ]
    )
    report, outs = model.step(plan, texts)
    model.rows = rows  # type: ignore[method-assign]
    assert not report.losses
    for key in texts:
        start = 20 * key
        check(model, outs[key][:, : right.get(key, 1000) - start], key, start)
    sums, prompt_token_count = model.worker.take_statistics(wait=True)
    assert prompt_token_count == 0
    # An attend for each token and layer.
    assert sums.attend_count == (4 + 1 + 4 + 3) * LAYERS
    assert sums.exact_count == (4 + 1 + 4 + 3) * LAYERS * HEADS
    plan = StepPlan(
        [
            planned(3, 61, 2, decodes=True),
            planned(1, 22, 4, decodes=True),
            planned(2, 41, 2, decodes=True),
            planned(4, 83, 1),
        ]
    )
    report, outs = model.step(plan, texts)
    assert not report.losses
    for key, start in ((3, 61), (1, 22), (2, 41), (4, 83)):
        check(model, outs[key], key, start)


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
@pytest.mark.parametrize("forked", [1, 2])
def test_a_decoder_ends_where_one_of_its_sequences_is_forked(
    model: Model, decoding: list[StepDecoder], forked: int
) -> None:
    """The same requests go on with a new decoder, because the first one holds its sequences."""
    source = Source(forked, 16)
    plan = StepPlan([planned(1, 102, 1), planned(2, 32, 1), planned(3, 16, 3, source=source)])
    report, outs = model.step(plan, {**TEXTS, 3: TEXTS[forked]})
    assert not report.losses
    check(model, outs[1], 0, 102)
    check(model, outs[2], 2, 32)
    check(model, outs[3], TEXTS[forked], 16)
    assert [(each.step_count, each.closed) for each in decoding] == [(2, True), (1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_decoder_ends_where_one_of_its_sequences_is_dropped(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """The request whose rows are dropped is lost, and the other one goes on alone."""
    plan = StepPlan([planned(1, 102, 1), planned(2, 32, 1)], dropped=[2])
    report, outs = model.step(plan, TEXTS)
    assert set(report.losses) == {2}
    check(model, outs[1], 0, 102)
    assert (outs[2] == 0).all()
    assert [(each.step_count, each.closed) for each in decoding] == [(2, True), (1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
@pytest.mark.parametrize("back", [{1}, {2}, {1, 2}])
def test_a_decoder_ends_where_one_of_its_sequences_has_another_length(
    model: Model, decoding: list[StepDecoder], back: set[int]
) -> None:
    """A request that was preempted computes its last token again."""
    starts = {key: end - (key in back) for key, end in ((1, 102), (2, 32))}
    report, outs = model.step(StepPlan([planned(key, at, 1) for key, at in starts.items()]), TEXTS)
    assert not report.losses
    for key, at in starts.items():
        check(model, outs[key], TEXTS[key], at)
    assert [(each.step_count, each.closed) for each in decoding] == [(2, True), (1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_decoder_ends_where_its_requests_do_not_go_on(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """One of them waits. A prompt beside them changes nothing."""
    plan = StepPlan([planned(1, 102, 1), planned(3, 0, 5), planned(2, 32, 1)])
    report, _ = model.step(plan, TEXTS)
    assert not report.losses
    assert [(each.step_count, each.closed) for each in decoding] == [(3, False)]
    report, outs = model.step(StepPlan([planned(1, 103, 1)]), TEXTS)
    assert not report.losses
    check(model, outs[1], 0, 103)
    assert [(each.step_count, each.closed) for each in decoding] == [(3, True), (1, False)]


def _decode(model: Model, starts: dict[int, int], prompt: int | None = None) -> None:
    """A step of requests that decode, in this order, and of a prompt of 5 tokens before the last.

    starts: tokens that each has. They become one more.
    """
    requests = [planned(key, at, 1) for key, at in starts.items()]
    if prompt is not None:
        requests.insert(len(requests) - 1, planned(prompt, 0, 5))
    report, outs = model.step(StepPlan(requests), TEXTS)
    assert not report.losses
    for key in starts:
        check(model, outs[key], TEXTS[key], starts[key])
        starts[key] += 1


def _counts(opened: list[StepDecoder]) -> list[tuple[int, int, bool]]:
    """Sequences and steps of each decoder, and whether it is closed."""
    return [(len(each._sequences), each.step_count, each.closed) for each in opened]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_requests_decode_apart_while_there_are_prompts(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """To end a decoder is to wait for the GPU, which prompts keep busy.

    A request sits out the step after its prompt. So that step has no prompt if it was the last one,
    and the GPU is still busy with it.
    """
    starts = {1: 102, 2: 32}
    _decode(model, starts, prompt=3)
    _decode(model, starts, prompt=4)
    starts[3] = 5
    _decode(model, starts, prompt=5)
    starts[4] = 5
    _decode(model, starts)
    assert _counts(decoding) == [(2, 6, False), (1, 2, False), (1, 1, False)]
    starts[5] = 5
    _decode(model, starts)
    assert _counts(decoding) == [(2, 6, True), (1, 2, True), (1, 1, True), (5, 1, False)]
    _decode(model, starts)
    assert _counts(decoding)[3] == (5, 2, False)


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_requests_decode_apart_for_eight_steps(model: Model, decoding: list[StepDecoder]) -> None:
    starts = {1: 102, 2: 32}
    _decode(model, starts, prompt=3)
    starts[3] = 5
    for prompt in range(4, 12):
        _decode(model, starts, prompt)
    assert _counts(decoding) == [(2, 11, False), (1, 8, False)]
    _decode(model, starts, prompt=12)
    assert _counts(decoding) == [(2, 11, True), (1, 8, True), (3, 1, False)]
    # From there, it begins again.
    starts[12] = 5
    _decode(model, starts, prompt=13)
    assert _counts(decoding)[2:] == [(3, 2, False), (1, 1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_requests_join_where_decoders_have_no_memory_beside_each_other(
    model: Model, decoding: list[StepDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = model.worker._sequences.client
    opened = client.open_decoder

    def open_one(sequences: list[spillway_kv.Sequence], **more: Any) -> StepDecoder:
        if not all(each.closed for each in decoding):
            raise spillway_kv.ResourceExhausted("no memory beside the other decoder")
        made: Any = opened(sequences, **more)
        return made

    monkeypatch.setattr(client, "open_decoder", open_one)
    starts = {1: 102, 2: 32}
    _decode(model, starts, prompt=3)
    starts[3] = 5
    _decode(model, starts, prompt=4)
    assert _counts(decoding) == [(2, 4, False)]
    _decode(model, starts, prompt=5)
    starts[4] = 5
    _decode(model, starts, prompt=6)
    assert _counts(decoding) == [(2, 4, True), (3, 1, True), (4, 1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_an_error_of_an_earlier_step_ends_one_decoder_beside_prompts(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """The requests of the other one and the prompt go on."""
    starts = {1: 102, 2: 32}
    _decode(model, starts, prompt=3)
    starts[3] = 5
    _decode(model, starts, prompt=4)
    decoding[0].error = spillway_kv.OutOfRange("K/V that are not finite")
    _decode(model, starts, prompt=5)
    assert _counts(decoding) == [(2, 4, True), (1, 2, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_prompt_that_is_lost_joins_no_decoders(model: Model, decoding: list[StepDecoder]) -> None:
    """What goes on is decided before it is known which requests are lost."""
    starts = {1: 102, 2: 32}
    _decode(model, starts, prompt=3)
    starts[3] = 5
    gone = Source(77, 16)
    plan = StepPlan([planned(key, at, 1) for key, at in starts.items()])
    plan.requests.append(planned(4, 16, 5, source=gone))
    report, outs = model.step(plan, TEXTS)
    assert set(report.losses) == {4}
    for key in starts:
        check(model, outs[key], TEXTS[key], starts[key])
    assert [(each.step_count, each.closed) for each in decoding] == [(4, False), (1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_decoder_ends_where_its_requests_change_places(
    model: Model, decoding: list[StepDecoder]
) -> None:
    _decode(model, {2: 32, 1: 102}, prompt=3)
    assert [(each.step_count, each.closed) for each in decoding] == [(2, True), (1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_one_that_ends_ends_the_decoder_beside_prompts(
    model: Model, decoding: list[StepDecoder]
) -> None:
    starts = {1: 102, 2: 32}
    _decode(model, starts, prompt=3)
    del starts[1]
    starts[3] = 5
    _decode(model, starts, prompt=4)
    assert _counts(decoding) == [(2, 3, True), (2, 1, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_step_that_fails_on_the_gpu_is_known_with_its_tokens(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """The report of the step does not wait for the GPU. What was lost is read later."""
    decoding[0].failing = [1]
    report, outs = model.step(StepPlan([planned(1, 102, 1), planned(2, 32, 1, epoch=3)]), TEXTS)
    assert not report.losses
    check(model, outs[1], 0, 102)
    failures = model.worker.failures()
    assert failures is not None
    assert failures() == {2: Loss(3, "again", failures()[2].reason)}
    # Without decoders, the report says everything.
    model.step(StepPlan([planned(3, 0, 5)]), TEXTS)
    assert model.worker.failures() is None


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_an_error_of_an_earlier_step_loses_only_what_it_has_cut(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """The engine has cut the sequence that failed. The others are served one by one."""
    decoding[0].error = spillway_kv.OutOfRange("K/V that are not finite")
    sequences = model.worker._sequences

    def close() -> None:
        sequences._sequences[2].truncate(30)

    decoding[0].close = close  # type: ignore[method-assign]
    report, outs = model.step(StepPlan([planned(1, 102, 1), planned(2, 32, 1)]), TEXTS)
    assert {key: loss.kind for key, loss in report.losses.items()} == {2: "again"}
    check(model, outs[1], 0, 102)
    assert (outs[2] == 0).all()


def test_a_request_begins_with_anothers_rows(model: Model) -> None:
    """Its sequence is forked at a token, while the other request continues."""
    texts = {1: 0, 2: 100}
    model.step(StepPlan([planned(1, 0, 120)]), texts)
    plan = StepPlan([planned(1, 120, 1), planned(2, 96, 20, source=Source(1, 96))])
    report, outs = model.step(plan, texts)
    check(model, outs[1], 0, 120)
    check(model, outs[2], 100, 96)
    assert not report.losses


def test_rows_beyond_the_plan_are_cut(model: Model) -> None:
    """A preempted request continues at an earlier token than its last."""
    texts = {1: 1}
    model.step(StepPlan([planned(1, 0, 50)]), texts)
    report, outs = model.step(StepPlan([planned(1, 30, 9)]), texts)
    check(model, outs[1], 1, 30)
    assert not report.losses


def test_rows_that_are_not_there_are_lost(model: Model) -> None:
    """The report names this request, and its outputs are zeros. The others are served."""
    texts = {1: 1, 2: 2, 3: 3}
    model.step(StepPlan([planned(1, 0, 10)]), texts)
    plan = StepPlan(
        [
            planned(1, 20, 1, epoch=5),
            planned(2, 0, 4),
            planned(3, 64, 4, source=Source(9, 64)),
        ]
    )
    report, outs = model.step(plan, texts)
    assert set(report.losses) == {1, 3}
    assert report.losses[1].epoch == 5
    assert report.losses[1].reason == "10 of 20 tokens' rows are there"
    assert report.losses[1].kind == "again"
    check(model, outs[2], 2, 0)
    assert (outs[1] == 0).all()
    assert (outs[3] == 0).all()
    assert model.worker.sequence_count == 1


def test_a_missing_sequence_to_begin_with_is_reported(model: Model) -> None:
    """Then the scheduler does not offer it to other requests."""
    plan = StepPlan([planned(2, 64, 4, source=Source(1, 64))])
    report, _ = model.step(plan, {2: 2})
    assert report.losses[2].kind == "again"
    assert report.gone == {1}


@pytest.mark.skipif(on_gpu(), reason="prompts on a GPU are appended later")
def test_a_fork_finds_that_the_rows_of_a_running_prompt_are_gone(model: Model) -> None:
    """The prompt itself was ready before. Both are computed again."""
    texts = {1: 0, 2: 100}
    model.step(StepPlan([planned(1, 0, 100)]), texts)
    model.worker._sequences.settle(1)
    model.worker._sequences.client.get_sequence(model.worker._sequences._sequences[1].name).delete()
    plan = StepPlan([planned(1, 100, 5), planned(2, 64, 3, source=Source(1, 64))])
    report, outs = model.step(plan, texts)
    assert {key: loss.kind for key, loss in report.losses.items()} == {1: "again", 2: "again"}
    assert report.gone == {1}
    assert (outs[1] == 0).all()
    assert (outs[2] == 0).all()


def test_what_a_running_prompt_lacks_is_its_own_loss(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks memory, which a fork of it finds out first."""
    texts = {1: 0, 2: 100}
    model.append_later(True)
    append = spillway_kv.Sequence.append
    full = True

    def appended(self: spillway_kv.Sequence, *arguments: Any, **more: Any) -> Any:
        if full:
            raise spillway_kv.ResourceExhausted("the memory limit is reached")
        return append(self, *arguments, **more)

    monkeypatch.setattr(spillway_kv.Sequence, "append", appended)
    report, _ = model.step(StepPlan([planned(1, 0, 100)]), texts)
    assert not report.losses
    # It holds its K/V until it is known that they cannot be appended.
    appends = model.worker._sequences._appends
    assert appends is not None
    plan = StepPlan([planned(1, 100, 5), planned(2, 64, 3, source=Source(1, 64))])
    report, _ = model.step(plan, texts)
    assert {key: loss.kind for key, loss in report.losses.items()} == {1: "memory", 2: "again"}
    assert appends.end_of(1) is None
    full = False
    report, outs = model.step(StepPlan([planned(1, 0, 105, epoch=1)], dropped=[1]), texts)
    assert not report.losses
    check(model, outs[1], 0, 0)


def test_failed_appends_hold_no_memory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried once more before others are started, and then dropped."""
    model.append_later(True)
    appends = model.worker._sequences._appends
    assert appends is not None
    appends._collected_bytes = 1

    def appended(*_: Any, **__: Any) -> None:
        raise spillway_kv.ResourceExhausted("the memory limit is reached")

    submit = appends._pool.submit

    def ended(*call: Any) -> Future[None]:
        """The next append is added after this one has failed."""
        future: Future[None] = submit(*call)
        wait([future])
        return future

    monkeypatch.setattr(spillway_kv.Sequence, "append", appended)
    monkeypatch.setattr(appends._pool, "submit", ended)
    for key in range(1, 6):
        model.step(StepPlan([planned(key, 0, 40)]), {key: key})
    held = [append for of in appends._of.values() for append in of if append._rows is not None]
    # Those of the last layer: there was none after it.
    assert len(held) == 1


def test_sequences_go_when_told(model: Model) -> None:
    """Sequences are dropped before the step, and kept ones stay."""
    texts = {1: 1, 2: 2}
    model.step(StepPlan([planned(1, 0, 10), planned(2, 0, 10)]), texts)
    model.worker.begin(StepPlan(kept=[2], dropped=[1, 77]), {})
    model.worker.end()
    assert model.worker.sequence_count == 1


@pytest.mark.skipif(on_gpu(), reason="a decoder holds its sequences while it is open")
def test_a_sequence_that_was_deleted_is_lost_at_any_layer(model: Model) -> None:
    """Another client deletes it between two layers. The step's others are served one by one."""
    texts = {1: 1, 2: 2}
    model.step(StepPlan([planned(1, 0, 10), planned(2, 0, 10)]), texts)
    attend = model.worker.attend

    def attend_once(layer: int, *tensors: Any) -> None:
        if layer == 1:
            model.worker._sequences._sequences[1].delete()
        attend(layer, *tensors)

    model.worker.attend = attend_once  # type: ignore[assignment, method-assign]
    report, outs = model.step(StepPlan([planned(1, 10, 1), planned(2, 10, 1)]), texts)
    assert set(report.losses) == {1}
    check(model, outs[2], 2, 10)
    assert (outs[1][1] == 0).all()


def test_values_that_are_not_finite_fail_alone(model: Model) -> None:
    """Neither the worker nor the other requests of the step fail."""
    texts = {1: 1, 2: 2}
    model.step(StepPlan([planned(1, 0, 10), planned(2, 0, 10)]), texts)
    rows = Model.rows

    def broken(text: int, position: int, layer: int) -> tuple[torch.Tensor, ...]:
        q, k, v = rows(text, position, layer)
        return (q, k * float("nan"), v) if text == 1 else (q, k, v)

    model.rows = broken  # type: ignore[method-assign]
    report, outs = model.step(StepPlan([planned(1, 10, 1), planned(2, 10, 1)]), texts)
    check(model, outs[2], 2, 10)
    if by_decoder(model):
        failures = model.worker.failures()
        assert failures is not None
        assert {key: loss.kind for key, loss in failures().items()} == {1: "again"}
        # Computed again, the prompt has the same values, which may be known a step later.
        plan = StepPlan([planned(1, 0, 11, epoch=1), planned(2, 11, 1)], dropped=[1])
        report, outs = model.step(plan, texts)
        check(model, outs[2], 2, 11)
        if not report.losses:
            report, outs = model.step(StepPlan([planned(1, 11, 1), planned(2, 12, 1)]), texts)
            check(model, outs[2], 2, 12)
    assert report.losses[1].kind == "failed"
    assert set(report.losses) == {1}
    assert "finite" in report.losses[1].reason


@pytest.mark.parametrize("later", [False, True])
def test_kept_sequences_make_room(later: bool) -> None:
    """They are dropped if rows need memory. If that is not enough, requests are lost for memory.

    Where prompts are appended later, this is known a step later.
    """
    model = Model("8MiB")
    model.append_later(later)
    try:
        texts = {key: key for key in range(1, 30)}
        gone: set[int] = set()
        for key in range(1, 12):
            report, outs = model.step(StepPlan([planned(key, 0, 600)], kept=[key - 1]), texts)
            assert not report.losses
            check(model, outs[key][:, -2:], key, 598)
            gone |= report.gone
        assert gone == set(range(1, len(gone) + 1))
        assert len(gone) >= 3
        report, _ = model.step(StepPlan([planned(20, 0, 6000)]), texts)
        if later:
            assert not report.losses
            report, _ = model.step(StepPlan([planned(20, 6000, 1)]), texts)
        assert report.losses[20].kind == "memory"
        assert "memory.limit" in report.losses[20].reason
        report, outs = model.step(StepPlan([planned(21, 0, 5)]), texts)
        assert not report.losses
        check(model, outs[21], 21, 0)
    finally:
        model.worker.close()


def test_kept_sequences_leave_room_to_copies() -> None:
    """64,000 bytes for codes of 10 bytes a token and copies of 90, of which 62,000 may be taken.

    600 running tokens leave 2,000, but a sixteenth is for kept ones: codes of 400 tokens.
    """
    room = KeptRoom(total_bytes=64000, code_bytes=10, row_bytes=90, copy_bytes=56000)
    assert [room.tokens(running) for running in (0, 100, 580, 581, 600)] == [
        *(6200, 5200, 400, 400, 400)
    ]
    # Copies cannot take more than their limit.
    few = KeptRoom(total_bytes=64000, code_bytes=10, row_bytes=90, copy_bytes=9000)
    assert [few.tokens(running) for running in (100, 1000)] == [5200, 4300]
    model = Model(settings=Settings(memory="64MiB", device=str(DEVICE), kept_room=room))
    texts = {**{key: key for key in range(1, 6)}, 6: 1, 7: 7}
    try:
        for key in range(1, 6):
            report, _ = model.step(StepPlan([planned(key, 0, 100)], kept=[key - 1]), texts)
            assert report.gone == set()
        # A prompt that begins counts with all tokens that it does not share. The oldest kept one
        # goes, but not that with which a request begins.
        begins = planned(6, 64, 1, source=Source(1, 64), prompt=664)
        report, outs = model.step(StepPlan([begins], kept=[5]), texts)
        assert report.gone == {2}
        check(model, outs[6], 1, 64)
        assert model.worker.sequence_count == 5
        # When it has ended, there is room again.
        report, _ = model.step(StepPlan([planned(7, 0, 1)], kept=[6]), texts)
        assert report.gone == set()
        assert model.worker.sequence_count == 6
    finally:
        model.worker.close()


def test_a_sequence_with_which_a_request_begins_makes_no_room(model: Model) -> None:
    """Of two kept ones, only the other is dropped, although it is not enough."""
    model.step(StepPlan([planned(1, 0, 100), planned(2, 0, 100)]), {1: 0, 2: 2})
    plan = StepPlan([planned(3, 64, 1, source=Source(1, 64))], kept=[1, 2])
    model.worker.begin(plan, {3: 0})
    sequences = model.worker._sequences

    def append() -> None:
        raise spillway_kv.ResourceExhausted("the memory limit is reached")

    with pytest.raises(Lost, match="the memory limit is reached") as lost:
        sequences.patiently(append)
    assert lost.value.kind == "memory"
    assert model.worker.end().gone == {2}
    assert model.worker.sequence_count == 2


def test_a_step_that_lacks_memory_takes_that_of_kept_sequences(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are still served together."""
    texts = {1: 0, 2: 2, 3: 3, 4: 4}
    model.step(StepPlan([planned(key, 0, 100) for key in texts]), texts)
    begin = Group.begin
    began: list[int] = []

    def lacking(self: Group, device: torch.device) -> None:
        began.append(len(self.rows))
        if model.worker.sequence_count > 2:
            raise spillway_kv.ResourceExhausted("the memory limit is reached")
        begin(self, device)

    monkeypatch.setattr(Group, "begin", lacking)
    plan = StepPlan([planned(1, 100, 1), planned(2, 100, 1)], kept=[3, 4])
    report, outs = model.step(plan, texts)
    # Until the third time, each with one kept sequence less.
    assert began == [2, 2, 2]
    assert report.gone == {3, 4}
    assert not report.losses
    for key in (1, 2):
        check(model, outs[key], texts[key], 100)


def test_sparse_steps_are_counted(model: Model) -> None:
    """Attends, rows and certificates of decode steps are counted, but not those of prompts."""
    model.step(StepPlan([planned(1, 0, 7)]), {1: 1})
    statistics, prompt_token_count = model.worker.take_statistics(wait=True)
    assert prompt_token_count == 7
    assert statistics.attend_count == 0
    model.step(StepPlan([planned(1, 7, 1)]), {1: 1})
    statistics, prompt_token_count = model.worker.take_statistics(wait=True)
    assert prompt_token_count == 0
    assert statistics.attend_count == LAYERS
    assert statistics.touched_row_count == statistics.visible_row_count == LAYERS * KV_HEADS * 8
    assert statistics.exact_count == LAYERS * HEADS


class _Batch:
    def __init__(self, rows: list[tuple[int, int]]) -> None:
        self._rows = rows

    def newest_blocks(self) -> list[tuple[int, int]]:
        return self._rows


class _FakeWorker:
    def __init__(self) -> None:
        self.begun: list[dict[int, int]] = []

    def begin(self, plan: StepPlan, begins: dict[int, int]) -> None:
        self.begun.append(begins)


def test_a_step_begins_when_the_runner_tells_its_requests() -> None:
    """Their order in the batch is the runner's, not the plan's."""
    worker: Any = _FakeWorker()
    attending = Attending(worker, [])
    attending.begin(["a"])
    assert worker.begun == []
    requests = [planned(4, 0, 3, name="a"), planned(9, 5, 1, name="b")]
    attending.plan(StepPlan(requests))
    attending.begin(["b", "a"])
    assert worker.begun == [{9: 0, 4: 1}]
    for names in (["a"], ["a", "c"], ["a", "b", "b"]):
        with pytest.raises(RuntimeError, match=r"the plan \['a', 'b'\]"):
            attending.begin(names)


def test_rows_are_told_by_their_newest_blocks() -> None:
    """This works for any order of requests in vLLM's batch."""
    plan = StepPlan([planned(4, 0, 3), planned(9, 5, 1)])
    assert begins_of(plan, _Batch([(9, 0), (4, 1)])) == {4: 1, 9: 0}
    with pytest.raises(RuntimeError, match=r"blocks \[8, 9\], the plan \[4, 9\]"):
        begins_of(plan, _Batch([(9, 0), (8, 1)]))
    with pytest.raises(RuntimeError, match="the plan"):
        begins_of(plan, _Batch([(9, 0)]))
    with pytest.raises(RuntimeError, match="the plan"):
        begins_of(plan, _Batch([(9, 0), (9, 1)]))


def test_a_daemon_that_does_not_come_back(tmp_path: Any) -> None:
    """The error names the setting for how long the plugin waits."""
    with pytest.raises(spillway_kv.Unavailable):
        Worker(Settings(target=f"unix:{tmp_path}/none.sock"), SHAPES, DEVICE, None)


class Graph:
    """A graph of a step for three requests, whose pieces fill in the tensors of the next layer."""

    def __init__(self, model: Model, texts: list[tuple[int, int]]) -> None:
        """texts: text and position of each row of the batch; other rows are not used."""
        self.step, self.failed, self.finite = self, False, torch.ones(3, dtype=torch.bool)
        self.counts = 3, 1
        self._model, self._texts = model, texts
        self.outs = torch.full((LAYERS, 3, HEADS, DIM), float("nan"))
        self.in_pieces = 0

    def _tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        made = [self._model.rows(text, position, layer) for text, position in self._texts]
        made += [self._model.rows(9, 0, layer)] * (3 - len(made))
        q, k, v = (torch.stack([row[part] for row in made]) for part in range(3))
        return q, k, v, self.outs[layer]

    def pieces(self) -> Iterator[Any]:
        self.in_pieces += 1
        for layer in range(LAYERS):
            q, k, v, out = self._tensors(layer)
            yield OpenLayer(layer, q, k, v, out)

    def run_with(self, enqueue: Any) -> None:
        """Runs the graph with a decoder's attends of the first rows."""
        count = len(self._texts)
        for layer in range(LAYERS):
            q, k, v, out = (x[:count] for x in self._tensors(layer))
            tensors = q.unsqueeze(1), k.unsqueeze(2), v.unsqueeze(2)
            enqueue(layer, *tensors, wants_lse=False, out=out.unsqueeze(1))
            self.finite[:count] = out[:, 0, 0].isfinite()


def run_graph(model: Model, plan: StepPlan, texts: dict[int, int]) -> tuple[Any, Graph]:
    """Runs a step of single tokens as a graph."""
    graph = Graph(model, [(texts[r.key], r.start) for r in plan.requests])
    model.worker.begin(plan, {r.key: row for row, r in enumerate(plan.requests)})
    model.worker.run(graph)  # type: ignore[arg-type]
    return model.worker.end(), graph


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_decoder_runs_the_model_as_a_graph(model: Model, decoding: list[StepDecoder]) -> None:
    """The graph is for more requests than there are. Failures on the GPU are known as ever."""
    plan = StepPlan([planned(1, 102, 1), planned(2, 32, 1)])
    report, graph = run_graph(model, plan, TEXTS)
    assert not report.losses
    assert not graph.in_pieces
    for row, start in enumerate((102, 32)):
        check(model, graph.outs[:, row : row + 1], TEXTS[row + 1], start)
    failures = model.worker.failures()
    assert failures is not None
    assert failures() == {}
    decoding[0].failing = [1]
    report, _ = run_graph(model, StepPlan([planned(1, 103, 1), planned(2, 33, 1)]), TEXTS)
    failures = model.worker.failures()
    assert failures is not None
    assert list(failures()) == [2]
    assert [(each.step_count, each.closed) for each in decoding] == [(4, False)]


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_what_no_decoder_serves_alone_runs_in_pieces(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """A request beside them that computes its last token exactly, and one that is lost."""
    model.step(StepPlan([planned(3, 0, 20)]), TEXTS)
    plan = StepPlan([planned(1, 102, 1), planned(3, 20, 1, decodes=False), planned(2, 32, 1)])
    report, graph = run_graph(model, plan, TEXTS)
    assert not report.losses
    assert graph.in_pieces == 1
    for row, (key, start) in enumerate(((1, 102), (3, 20), (2, 32))):
        check(model, graph.outs[:, row : row + 1], TEXTS[key], start)
    plan = StepPlan([planned(1, 103, 1), planned(2, 33, 1)], dropped=[2])
    report, graph = run_graph(model, plan, TEXTS)
    assert set(report.losses) == {2}
    assert graph.in_pieces == 1
    check(model, graph.outs[:, :1], TEXTS[1], 103)
    assert (graph.outs[:, 1] == 0).all()
    assert graph.outs[:, 2].isnan().all()


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_graph_that_a_decoder_cannot_run_runs_in_pieces(
    model: Model, decoding: list[StepDecoder]
) -> None:
    """It loses no request, and is not tried again."""
    decoding[0].run_error = spillway_kv.Aborted("cudaGraphInstantiate: no memory")
    plan = StepPlan([planned(1, 102, 1), planned(2, 32, 1)])
    report, graph = run_graph(model, plan, TEXTS)
    assert not report.losses
    assert graph.failed
    assert graph.in_pieces == 1
    for row, start in enumerate((102, 32)):
        check(model, graph.outs[:, row : row + 1], TEXTS[row + 1], start)
    assert decoding[0].closed


@pytest.mark.skipif(on_gpu(), reason="a GPU has decoders of its own")
def test_a_graph_of_the_whole_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan it writes zeros, a step that has not begun is an error, others are served."""
    attending = Attending(model.worker, ["a", "b"])
    graph: Any = Graph(model, [(1, 0)])
    attending.run(graph)
    assert (graph.outs == 0).all()
    assert graph.in_pieces == 1
    model.step(StepPlan([planned(1, 0, 30)]), {1: 1})
    attending.plan(StepPlan([planned(1, 30, 1, name="x")]))
    with pytest.raises(RuntimeError, match="did not say which requests"):
        attending.run(graph)
    attending.begin(["x"])
    graph = Graph(model, [(1, 30)])
    attending.run(graph)
    assert not attending.end().losses
    check(model, graph.outs[:, :1], 1, 30)
    # A capture that leaves no attend open would return zeros for ever.
    monkeypatch.setattr(layers, "_is_captured", lambda _: True)
    q, k, v, out = graph._tensors(0)
    with pytest.raises(RuntimeError, match="captures a CUDA graph around"):
        attending.attend("a", None, q, k, v, out)  # type: ignore[arg-type]
