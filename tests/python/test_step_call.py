"""AttentionService.Step, called by grpcio."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import spillway_kv
from daemon_process import running_daemon
from google.rpc import error_details_pb2
from helpers import encode, refused
from raw_grpc import Stubs
from spillway_kv import Client, Model, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv._proto import tensor_pb2

HEADS, KV_HEADS, DIM = 4, 2, 16


class Call:
    """A Step stream whose messages are sent one by one."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        step = Stubs(channel).attention.Step
        self.responses = step(iter(self._requests.get, None), timeout=60)

    def send(self, **fields: Any) -> None:
        self._requests.put(attention.StepRequest(**fields))

    def ask(self, **fields: Any) -> Any:
        self.send(**fields)
        return next(self.responses)

    def close(self) -> None:
        self._requests.put(None)


@pytest.fixture
def call(target: str) -> Iterator[Call]:
    with grpc.insecure_channel(target) as channel:
        made = Call(channel)
        yield made
        made.close()
        made.responses.cancel()


def tensors(count: int, tokens: int = 1, seed: int = 3) -> tuple[Any, Any, Any]:
    """q, k and v of `count` sequences, [B, T, H, d]."""
    rng = np.random.default_rng(seed)
    shapes = [(count, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, k, v


def attend(layer: int, q: Any, k: Any, v: Any, start: int = 0, **fields: Any) -> Any:
    return attention.StepAttend(
        layer=layer,
        part_start=start,
        q=encode(q, "q"),
        k=encode(k, "k"),
        v=encode(v, "v"),
        **fields,
    )


def step(sequences: list[Sequence], starts: list[int], tokens: int = 1, **fields: Any) -> Any:
    parts = [
        attention.DecodeStep.Part(sequence=s.name, token_start=at, generation=s.generation)
        for s, at in zip(sequences, starts, strict=True)
    ]
    return attention.DecodeStep(parts=parts, token_count=tokens, **fields)


def two_sequences(client: Client) -> list[Sequence]:
    """Sequences of a new model, for a daemon that has none."""
    model = client.create_model(
        layer_count=2,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
    )
    return [client.create_sequence(model) for _ in range(2)]


def values(tensor: tensor_pb2.Tensor) -> Any:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


def expected(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Causal attention of sequences [B, T, H, d], in float64: output and log-sum-exp."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    logits = np.einsum("bthd,bshd->bths", q, k) / DIM**0.5
    t = q.shape[1]
    seen = np.arange(t)[None, :] <= np.arange(t)[:, None]
    weights = np.where(seen[None, :, None], np.exp(logits), 0)
    sums = weights.sum(-1, keepdims=True)
    return np.einsum("bths,bshd->bthd", weights / sums, v), np.log(sums[..., 0])


def failure(answer: Any) -> tuple[int, str, str]:
    """Code, reason and text of the status of an answer, which has nothing else."""
    assert not answer.results
    assert not answer.out.data
    assert not answer.lse.data
    info = error_details_pb2.ErrorInfo()
    assert answer.status.details[0].Unpack(info)
    return answer.status.code, info.reason, answer.status.message


def lengths(client: Client, sequences: list[Sequence]) -> list[tuple[int, ...]]:
    return [client.get_sequence(s.name).layer_token_counts for s in sequences]


@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (3, 5)])
def test_appends_and_attends(
    call: Call, client: Client, model: Model, count: int, tokens: int
) -> None:
    sequences = [client.create_sequence(model) for _ in range(count)]
    q, k, v = tensors(count, tokens)
    out, lse = expected(q, k, v)
    begin = step(sequences, [0] * count, tokens)
    for layer, fields in ((1, {"begin": begin}), (0, {})):
        answer = call.ask(attend=attend(layer, q, k, v), **fields)
        assert answer.status.code == 0
        assert (answer.layer, answer.part_start, len(answer.results)) == (layer, 0, count)
        np.testing.assert_allclose(values(answer.out), out, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values(answer.lse), lse, rtol=1e-5, atol=1e-6)
        for result in answer.results:
            assert result.status.code == 0
            seen = [t + 1 for t in range(tokens) for _ in range(HEADS)]
            assert list(result.certificate.visible_token_counts) == seen
            assert not result.HasField("out")
            assert not result.HasField("lse")
    assert lengths(client, sequences) == [(tokens, tokens)] * count


def test_steps_follow_each_other_on_one_stream(call: Call, client: Client, model: Model) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    q, k, v = tensors(2, 3)
    for t in range(3):
        begin = step(sequences, [t, t])
        at = slice(t, t + 1)
        # A step may begin in a message of its own, which is not answered.
        call.send(begin=begin)
        answer = call.ask(attend=attend(0, q[:, at], k[:, at], v[:, at]))
        out, _ = expected(q[:, : t + 1], k[:, : t + 1], v[:, : t + 1])
        np.testing.assert_allclose(values(answer.out), out[:, at], rtol=1e-5, atol=1e-6)
    call.close()
    assert next(call.responses, None) is None
    assert call.responses.code() == grpc.StatusCode.OK


def test_parts_may_come_in_several_messages(call: Call, client: Client, model: Model) -> None:
    sequences = [client.create_sequence(model) for _ in range(4)]
    q, k, v = tensors(4)
    call.send(begin=step(sequences, [0] * 4), attend=attend(0, q[:1], k[:1], v[:1]))
    call.send(attend=attend(0, q[1:3], k[1:3], v[1:3], start=1))
    # Nothing is appended before all have arrived.
    time.sleep(0.1)
    assert lengths(client, sequences) == [(0, 0)] * 4
    answer = call.ask(attend=attend(0, q[3:], k[3:], v[3:], start=3))
    np.testing.assert_allclose(values(answer.out), expected(q, k, v)[0], rtol=1e-5, atol=1e-6)
    assert lengths(client, sequences) == [(1, 0)] * 4


def _bad(client: Client, model: Model) -> list[tuple[Any, int, str, str]]:
    """Attends of a step of two sequences that are refused: code, reason and text."""
    q, k, v = tensors(2)
    at_slice = attend(0, q, k, v)
    at_slice.k.slice.region = "regions/none"
    halves = attend(0, q, k, v)
    halves.v.dtype = tensor_pb2.DTYPE_F16
    halves.v.data = halves.v.data[: len(halves.v.data) // 2]
    broken = k.copy()
    broken[1, 0, 1, 2] = np.nan
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    out_of_range = grpc.StatusCode.OUT_OF_RANGE.value[0]
    cases: list[tuple[Any, int, str, str]] = [
        (attend(2, q, k, v), invalid, "INVALID_FIELD", "attend.layer: value 2 is not in"),
        (attend(-1, q, k, v), invalid, "INVALID_FIELD", "attend.layer: value -1 is not in"),
        (
            attend(0, q, k, v, start=1),
            invalid,
            "INVALID_FIELD",
            "attend.part_start: value 1, but part 0 of the layer is the next",
        ),
        (
            attend(0, *tensors(3)),
            invalid,
            "INVALID_FIELD",
            "attend.q.shape: 3 parts from 0 on are not in [0, 2)",
        ),
        (at_slice, invalid, "INVALID_FIELD", "attend.k.slice: a step's tensors are in their"),
        (halves, invalid, "INVALID_FIELD", "attend.v.dtype: DTYPE_F16 is not the model's"),
        (attend(0, q[:, :, :3], k, v), invalid, "INVALID_FIELD", "attend.q.shape"),
        (attend(0, q, k[:, :, :, :8], v), invalid, "INVALID_FIELD", "attend.k.shape"),
        (attend(0, q, k, v[:1]), invalid, "INVALID_FIELD", "attend.v.shape"),
        (attend(0, q, k, v, out_dtype=2), invalid, "INVALID_FIELD", "attend.out_dtype: value 2"),
        (
            attend(0, q, broken, v),
            out_of_range,
            "NON_FINITE",
            "K is not finite at layer 0, KV head 1, token 0, element 2",
        ),
    ]
    return cases


@pytest.mark.parametrize("number", range(11))
def test_a_wrong_attend_changes_nothing(
    call: Call, client: Client, model: Model, number: int
) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    bad, code, reason, text = _bad(client, model)[number]
    answer = call.ask(begin=step(sequences, [0, 0]), attend=bad)
    found = failure(answer)
    assert found[:2] == (code, reason), found
    assert text in found[2]
    assert lengths(client, sequences) == [(0, 0)] * 2
    # The stream and the step go on.
    answer = call.ask(attend=attend(0, *tensors(2)))
    assert answer.status.code == 0
    assert lengths(client, sequences) == [(1, 0)] * 2


def test_every_case_is_tested(client: Client, model: Model) -> None:
    assert len(_bad(client, model)) == 11


def test_another_layer_before_all_parts_have_arrived(
    call: Call, client: Client, model: Model
) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    q, k, v = tensors(2)
    call.send(begin=step(sequences, [0, 0]), attend=attend(0, q[:1], k[:1], v[:1]))
    found = failure(call.ask(attend=attend(1, q[1:], k[1:], v[1:], start=1)))
    assert "attend.layer: value 1, but layer 0 has only its first 1 parts" in found[2]
    call.send(attend=attend(0, q[:1], k[:1], v[:1]))
    halves = attend(0, q[1:].astype(np.float16), k[1:], v[1:], start=1)
    found = failure(call.ask(attend=halves))
    assert "attend.q.dtype: the types of q and out are not those" in found[2]
    assert call.ask(attend=attend(0, q, k, v)).status.code == 0


def test_the_rest_of_a_refused_layer_is_dropped(call: Call, client: Client, model: Model) -> None:
    """Parts that were sent before the client knew are not answered once more."""
    sequences = [client.create_sequence(model) for _ in range(3)]
    q, k, v = tensors(3)
    wrong = attend(0, q[:1], k[:1], v[:1])
    wrong.v.dtype = tensor_pb2.DTYPE_BF16
    call.send(begin=step(sequences, [0] * 3), attend=wrong)
    for part in (1, 2):
        at = slice(part, part + 1)
        call.send(attend=attend(0, q[at], k[at], v[at], start=part))
    call.send(attend=attend(1, q, k, v))
    assert "attend.v" in failure(next(call.responses))[2]
    answer = next(call.responses)
    assert (answer.layer, answer.status.code) == (1, 0)
    # Another attempt, after another refusal.
    call.send(attend=wrong)
    assert "attend.v" in failure(next(call.responses))[2]
    for part in (0, 1, 2):
        at = slice(part, part + 1)
        call.send(attend=attend(0, q[at], k[at], v[at], start=part))
    answer = next(call.responses)
    assert (answer.layer, answer.status.code, len(answer.results)) == (0, 0, 3)
    # The same of a step that was refused.
    call.send(begin=step(sequences[:1] * 3, [0] * 3), attend=attend(0, q[:1], k[:1], v[:1]))
    call.send(attend=attend(0, q[1:], k[1:], v[1:], start=1))
    call.send(begin=step(sequences, [0] * 3), attend=attend(0, q, k, v))
    assert "parts[1].sequence" in failure(next(call.responses))[2]
    assert next(call.responses).status.code == 0


def ended(call: Call) -> spillway_kv.SpillwayError:
    """How the stream ended, without another answer."""
    return refused(lambda: next(call.responses))


def test_a_message_without_contents_ends_the_stream(call: Call) -> None:
    call.send()
    error = ended(call)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert "neither begin nor attend is set" in error.message


def test_a_stream_that_ends_in_the_middle_of_a_layer(
    call: Call, client: Client, model: Model
) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    q, k, v = tensors(2)
    call.send(begin=step(sequences, [0, 0]), attend=attend(0, q[:1], k[:1], v[:1]))
    call.close()
    error = ended(call)
    assert error.code == "INVALID_ARGUMENT"
    assert "before all parts of a layer had arrived" in error.message
    assert lengths(client, sequences) == [(0, 0)] * 2


def test_thousands_of_steps_begin_without_an_answer(
    call: Call, client: Client, model: Model
) -> None:
    """Each is served as soon as it has arrived."""
    sequences = [client.create_sequence(model) for _ in range(2)]
    begin = step(sequences * 100, [0] * 200)
    for _ in range(20_000):
        call.send(begin=begin)
    call.send(begin=step(sequences, [0, 0]), attend=attend(0, *tensors(2)))
    assert next(call.responses).status.code == 0


def test_a_step_of_millions_of_parts_is_not_read(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stream: Any = channel.stream_stream("/spillway.v1.AttentionService/Step")
        parts = b"\x0a\x00" * (1 << 20)
        message = b"\x0a\x80\x80\x80\x01" + parts
        error = refused(lambda: list(stream(iter([message]), timeout=30)))
    assert error.code == "INVALID_ARGUMENT"
    assert "it has more than 16384 fields" in error.message


def test_a_client_that_does_not_complete_a_layer(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--stream-idle", "1") as target:
        with spillway_kv.connect(target) as client, grpc.insecure_channel(target) as channel:
            sequences = two_sequences(client)
            q, k, v = tensors(2)
            partial, between = Call(channel), Call(channel)
            between.ask(begin=step(sequences, [0, 0]), attend=attend(0, q, k, v))
            partial.send(begin=step(sequences, [0, 0]), attend=attend(1, q[:1], k[:1], v[:1]))
            error = ended(partial)
            assert (error.code, error.reason) == ("ABORTED", "STREAM_IDLE")
            # Between layers a runner computes.
            time.sleep(1.5)
            assert between.ask(attend=attend(1, q, k, v)).status.code == 0
            between.close()


def test_what_has_not_begun_is_not_attended(call: Call, client: Client, model: Model) -> None:
    sequence = client.create_sequence(model)
    rows = tensors(1)
    for _ in range(2):
        assert call.ask(attend=attend(0, *rows)).status.code == 9
    gone = client.create_sequence(model)
    gone.delete()
    # Every attend of a step that was refused gets its error.
    call.send(begin=step([gone], [0]))
    for _ in range(2):
        code, reason, text = failure(call.ask(attend=attend(0, *rows)))
        assert (code, reason) == (5, "SEQUENCE_NOT_FOUND")
        assert gone.name in text
    code, reason, text = failure(
        call.ask(begin=step([sequence, sequence], [0, 0]), attend=attend(0, *rows))
    )
    assert code == 3
    assert "parts[1].sequence" in text
    assert call.ask(begin=step([sequence], [0]), attend=attend(0, *rows)).status.code == 0
    # A refused step ends the one before.
    call.send(begin=step([gone], [0]))
    assert failure(call.ask(attend=attend(1, *rows)))[0] == 5


def test_positions_and_generations(call: Call, client: Client, model: Model) -> None:
    sequences = [client.create_sequence(model) for _ in range(2)]
    rows = tensors(2)
    answer = call.ask(begin=step(sequences, [0, 1]), attend=attend(0, *rows))
    assert failure(answer)[:1] == (11,)
    assert "items[1]: layer 0 has 0 tokens" in answer.status.message
    assert lengths(client, sequences) == [(0, 0)] * 2
    # An attend that is repeated changes nothing and gives the same bits.
    answers = [call.ask(begin=step(sequences, [0, 0]), attend=attend(0, *rows)) for _ in range(2)]
    assert answers[0].out.data == answers[1].out.data
    assert lengths(client, sequences) == [(1, 0)] * 2
    stale = step(sequences, [1, 1])
    sequences[0].truncate(0)
    answer = call.ask(begin=stale, attend=attend(0, *rows))
    assert failure(answer)[:1] == (10,)


def test_a_message_that_does_not_parse_ends_the_stream(
    target: str, client: Client, model: Model
) -> None:
    sequence = client.create_sequence(model)
    good = attention.StepRequest(
        begin=step([sequence], [0]), attend=attend(0, *tensors(1))
    ).SerializeToString()
    answers: list[Any] = []

    def run() -> None:
        with grpc.insecure_channel(target) as channel:
            stream: Any = channel.stream_stream(
                "/spillway.v1.AttentionService/Step",
                response_deserializer=attention.StepResponse.FromString,
            )
            answers.extend(stream(iter([good, b"\x0a\x02x", good]), timeout=30))

    error = refused(run)
    assert [answer.status.code for answer in answers] == [0]
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MESSAGE_UNREADABLE")
    assert "message 2 of the stream: the message is not a valid spillway.v1.StepReq" in str(error)
    assert "the 1 messages before it were read" in str(error)
    assert lengths(client, [sequence]) == [(1, 0)]


def test_a_daemon_ends_while_streams_wait(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with running_daemon(tmp_path, "--memory-limit", "64MiB") as target:
            channel = stack.enter_context(grpc.insecure_channel(target))
            calls = [Call(channel) for _ in range(3)]
            with spillway_kv.connect(target) as client:
                sequences = two_sequences(client)
                q, k, v = tensors(2)
                # One with a step, one with a part of a layer, and one with nothing.
                calls[0].ask(begin=step(sequences, [0, 0]), attend=attend(0, q, k, v))
                calls[1].send(begin=step(sequences, [1, 1]), attend=attend(0, q[:1], k[:1], v[:1]))
            begin = time.monotonic()
        assert time.monotonic() - begin < 20
        for each in calls:
            assert each.responses.code() == grpc.StatusCode.UNAVAILABLE
            each.close()


def test_streams_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--open-stream-count-max", "2") as target:
        with grpc.insecure_channel(target) as channel:
            calls = [Call(channel) for _ in range(2)]
            for each in calls:
                assert each.ask(attend=attend(0, *tensors(1))).status.code == 9
            late = Call(channel)
            error = refused(lambda: next(late.responses))
            assert error.reason == "STREAM_COUNT_EXHAUSTED"
            for each in (*calls, late):
                each.close()


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--memory-limit", "48MiB") as target:
        with spillway_kv.connect(target) as client, grpc.insecure_channel(target) as channel:
            model = client.create_model(
                layer_count=1, query_head_count=32, kv_head_count=2, head_dim=128, dtype="float32"
            )
            sequences = [client.create_sequence(model) for _ in range(200)]
            call = Call(channel)
            rng = np.random.default_rng(0)
            q = rng.standard_normal((200, 16, 32, 128), np.float32)
            k, v = rng.standard_normal((2, 200, 16, 2, 128), np.float32)
            call.send(begin=step(sequences, [0] * 200, 16))
            answer = None
            for at in range(0, 200, 10):
                part = slice(at, at + 10)
                call.send(attend=attend(0, q[part], k[part], v[part], start=at))
            answer = next(call.responses)
            code, _, text = failure(answer)
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], text
            call.close()
            call.responses.cancel()
            # What had arrived is given back.
            alone = Call(channel)
            answer = alone.ask(
                begin=step(sequences[:1], [0], 16), attend=attend(0, q[:1], k[:1], v[:1])
            )
            assert answer.status.code == 0, answer.status.message
            alone.close()
