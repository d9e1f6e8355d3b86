"""What serves decode steps: the choice, and what follows a failure. Over an engine that counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spillway_kv import Policy
from spillway_kv._library import Sums
from spillway_kv.decoding import Decoding
from spillway_kv.errors import Aborted, SpillwayError, Unavailable

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")
LAYERS = 2


class FakeSequence:
    """A sequence that notes what is appended."""

    token_count = 10

    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self._name = log, name

    def append(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self._log.append(("append", self._name, layer, start, float(k[0, 0, 0]), float(v[0, 0, 0])))

    def refresh(self) -> None:
        self._log.append(("refresh", self._name))


class FakeDecoder:
    """A decoder whose outputs are q + 1. It can serve three steps."""

    token_count_max = 13
    layer_count = LAYERS

    def __init__(self, engine: FakeEngine, token_count: int) -> None:
        self._engine, self.token_count = engine, token_count
        self._steps = 0

    def next(self) -> None:
        self._engine.do("next")
        self._steps += 1

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
        self._engine.do(f"enqueue {layer}")
        return (q + 1 if out is None else out.copy_(q + 1)), None

    def run(self, graph: Any) -> None:
        self._engine.do(f"run {graph}")

    def finish(self) -> None:
        self._engine.do("finish")

    def sums(self, layer: int) -> Sums:
        return Sums(attend_count=self._steps)

    def close(self) -> None:
        self._engine.do("close decoder")


class FakeStep:
    """A step whose outputs are q + 2."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        self._engine.do(f"attend {layer}")
        return q + 2, None

    def sums(self) -> Sums:
        return Sums(attend_count=1, device_time_us=5)

    def results(self) -> list[Any]:
        return ["of the step"]

    def close(self) -> None:
        self._engine.do("close step")


class FakeEngine:
    """A client of an engine on GPU 1. Rows and attends give q + 3."""

    transport = "embedded"
    step_transport = "embedded"

    def __init__(self) -> None:
        limits = SimpleNamespace(sparse_query_token_count_max=16, attend_item_count_max=4)
        devices = [SimpleNamespace(name="cuda:1")]
        self.server_info = SimpleNamespace(devices=devices, limits=limits)
        self.log: list[Any] = []
        self.rooms: list[int] = []
        self.failures: dict[str, BaseException] = {}
        self.unopened: BaseException | None = None
        restarts = SimpleNamespace(wait=lambda error: self.log.append("restarted"))
        self.connection = SimpleNamespace(restarts=restarts)
        self.sequences = [FakeSequence(self.log, name) for name in "ab"]

    def do(self, what: str) -> None:
        self.log.append(what)
        if what in self.failures:
            raise self.failures.pop(what)

    def open_decoder(
        self, sequences: Any, *, token_count: int, token_count_max: int, policy: Any
    ) -> FakeDecoder:
        self.log.append(("open", policy))
        self.rooms.append(token_count_max)
        if self.unopened is not None:
            raise self.unopened
        return FakeDecoder(self, token_count)

    def begin_step(self, sequences: Any, *, token_count: int, policy: Any, starts: Any) -> FakeStep:
        self.do("begin step")
        self.log.append((token_count, policy, starts))
        return FakeStep(self)

    def attend(self, layer: int, queries: dict[Any, torch.Tensor], policy: Any) -> dict[Any, Any]:
        self.do(f"attend rows {layer}")
        message = SimpleNamespace(
            certificate=SimpleNamespace(
                visible_token_counts=[11, 11], promises=[], relative_errors=[]
            ),
            statistics=SimpleNamespace(touched_row_counts=[4], device_time_us=1.0),
            out=SimpleNamespace(shape=[1, 2, 3]),
        )
        return {
            sequence: SimpleNamespace(out=query + 3, message=message)
            for sequence, query in queries.items()
        }


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def arrays(value: float = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [2, 1, 2, 3], k and v [2, 1, 1, 3]."""
    q = torch.full((2, 1, 2, 3), float(value))
    return q, torch.full((2, 1, 1, 3), 7.0), torch.full((2, 1, 1, 3), 8.0)


def begin(decoding: Decoding, engine: FakeEngine, **more: Any) -> None:
    options: dict[str, Any] = {"device": GPU, **more}
    decoding.begin(engine.sequences, [10, 20], **options)  # type: ignore[arg-type]


def decoding_of(engine: FakeEngine, **more: Any) -> Decoding:
    return Decoding(engine, **more)  # type: ignore[arg-type]


def test_a_decoder_serves_tensors_on_the_engines_gpu_from_step_to_step(engine: FakeEngine) -> None:
    decoding = decoding_of(engine)
    for _ in range(2):
        begin(decoding, engine)
        assert decoding.has_decoder
        for layer in range(LAYERS):
            assert decoding.in_step
            assert (decoding.attend(layer, *arrays()) == 1).all()
        assert not decoding.in_step
        decoding.finish()
    step = ["next", "enqueue 0", "enqueue 1", "finish"]
    assert engine.log == [("open", None), *step, *step]
    taken = decoding.take_statistics()
    assert {layer: each.attend_count for layer, each in taken.items()} == {0: 2, 1: 2}
    assert not any(each.attend_count for each in decoding.take_statistics().values())
    decoding.release()
    assert engine.log[-1] == "close decoder"
    assert not decoding.has_decoder


@pytest.mark.parametrize(("length_max", "expected"), [(None, 8192), (100, 100), (5, 11)])
def test_a_decoder_has_room_for_no_more_than_the_caller_needs(
    engine: FakeEngine, length_max: int | None, expected: int
) -> None:
    """Sequences of 10 tokens. By default 8,192 fit."""
    begin(decoding_of(engine, length_max=length_max), engine)
    assert engine.rooms == [expected]


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (6_144, 8_192),
        # At least 2,048 more, up to a multiple of 1,024.
        (6_145, 9_216),
        (8_000, 10_240),
        # A quarter more.
        (16_384, 20_480),
        (1_000_000, 1_250_304),
    ],
)
def test_a_decoder_has_room_for_a_quarter_more(
    engine: FakeEngine, longest: int, expected: int
) -> None:
    engine.sequences[1].token_count = longest
    begin(decoding_of(engine), engine)
    assert engine.rooms == [expected]


@pytest.mark.parametrize(
    "more",
    [
        {"device": CPU},
        {"device": torch.device("cuda", 0)},
        {"decoder": False},
        {"token_count": 17},
    ],
)
def test_a_step_serves_everything_else(engine: FakeEngine, more: dict[str, Any]) -> None:
    decoding = decoding_of(engine)
    begin(decoding, engine, policy=Policy(epsilon=0.3), **more)
    assert (decoding.attend(0, *arrays()) == 2).all()
    assert not decoding.has_decoder
    results: list[Any] = decoding.results()
    assert results == ["of the step"]
    count = more.get("token_count", 1)
    assert engine.log == ["begin step", (count, Policy(epsilon=0.3), (10, 20)), "attend 0"]
    decoding.finish()
    assert engine.log[-1] == "close step"
    assert decoding.take_statistics()[0].device_time_us == 5


def test_more_sequences_than_a_decoder_takes(engine: FakeEngine) -> None:
    engine.server_info.limits.attend_item_count_max = 1
    decoding = decoding_of(engine)
    begin(decoding, engine)
    assert not decoding.has_decoder


def test_a_decoder_is_for_its_sequences_policy_and_room(engine: FakeEngine) -> None:
    decoding = decoding_of(engine)
    for _ in range(4):  # it has room for three
        begin(decoding, engine)
        decoding.finish()
    begin(decoding, engine, policy=Policy(epsilon=0.2))
    engine.sequences.reverse()
    begin(decoding, engine, policy=Policy(epsilon=0.2))
    opened = [each for each in engine.log if isinstance(each, tuple)]
    assert opened == [("open", None)] * 2 + [("open", Policy(epsilon=0.2))] * 2
    assert engine.log.count("close decoder") == 3
    # Each was waited for before it was closed.
    for index, each in enumerate(engine.log):
        assert each != "close decoder" or engine.log[index - 1] == "finish"


def test_a_policy_that_decoders_do_not_support_is_asked_for_once(engine: FakeEngine) -> None:
    engine.unopened = SpillwayError("no", code="UNIMPLEMENTED")
    refused: list[Policy | None] = []
    for _ in range(2):
        decoding = decoding_of(engine, refused=refused)
        begin(decoding, engine)
        assert (decoding.attend(0, *arrays()) == 2).all()
    assert engine.log.count(("open", None)) == 1
    assert refused == [None]


def test_without_memory_for_a_decoder_a_step_serves(engine: FakeEngine) -> None:
    engine.unopened = SpillwayError("no", code="RESOURCE_EXHAUSTED")
    decoding = decoding_of(engine)
    begin(decoding, engine)
    assert (decoding.attend(0, *arrays()) == 2).all()
    engine.unopened = None
    begin(decoding, engine)
    assert decoding.has_decoder


def test_a_lack_of_memory_for_a_decoder_is_told_once(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """For the same sequences. Each time, memory may be freed for it once."""
    engine.unopened = SpillwayError("the limit is reached", code="RESOURCE_EXHAUSTED")
    freed = [False, True, True, False]
    decoding = decoding_of(engine, make_room=lambda: freed.pop())
    opened = []
    for _ in range(3):
        before = engine.log.count(("open", None))
        begin(decoding, engine)
        assert not decoding.has_decoder
        opened.append(engine.log.count(("open", None)) - before)
    assert opened == [1, 2, 2]
    engine.sequences.reverse()
    begin(decoding, engine)
    told = [each.getMessage() for each in caplog.records if "no decoder" in each.getMessage()]
    assert len(told) == 2
    assert "2 sequences" in told[0]
    assert "the limit is reached" in told[0]


def test_a_step_may_begin_again_after_its_decoder_lacked_memory(engine: FakeEngine) -> None:
    decoding = decoding_of(engine)
    begin(decoding, engine)
    for layer in range(LAYERS):
        decoding.attend(layer, *arrays())
    engine.failures["next"] = SpillwayError("full", code="RESOURCE_EXHAUSTED")
    with pytest.raises(SpillwayError, match="full"):
        begin(decoding, engine)
    assert not decoding.has_decoder
    engine.failures.clear()
    begin(decoding, engine)
    assert decoding.has_decoder
    assert (decoding.attend(0, *arrays()) == 1).all()


def test_other_failures_to_open_a_decoder_are_raised(engine: FakeEngine) -> None:
    engine.unopened = SpillwayError("no", code="FAILED_PRECONDITION")
    with pytest.raises(SpillwayError):
        begin(decoding_of(engine), engine)


@pytest.mark.parametrize("where", ["next", "enqueue 0", "enqueue 1"])
def test_after_a_restart_rows_and_attends_serve_the_rest_of_a_decoders_step(
    engine: FakeEngine, where: str
) -> None:
    engine.failures[where] = Unavailable("the daemon is gone")
    decoding = decoding_of(engine)
    begin(decoding, engine)
    outs = [float(decoding.attend(layer, *arrays())[0, 0, 0, 0]) for layer in range(LAYERS)]
    first = {"next": 0, "enqueue 0": 0, "enqueue 1": 1}[where]
    assert outs == [1.0] * first + [3.0] * (LAYERS - first)
    at = engine.log.index(where)
    rest = [
        entry
        for layer in range(first, LAYERS)
        for entry in (
            ("append", "a", layer, 10, 7.0, 8.0),
            ("append", "b", layer, 20, 7.0, 8.0),
            f"attend rows {layer}",
        )
    ]
    assert engine.log[at + 1 :] == ["close decoder", "restarted", *rest]
    assert decoding.take_statistics()[1].attend_count == 2
    # The next step has a decoder again.
    begin(decoding, engine)
    assert decoding.has_decoder


def test_other_failures_of_a_decoder_are_raised_and_end_it(engine: FakeEngine) -> None:
    engine.failures["enqueue 1"] = Aborted("no")
    decoding = decoding_of(engine)
    begin(decoding, engine)
    decoding.attend(0, *arrays())
    with pytest.raises(Aborted):
        decoding.attend(1, *arrays())
    assert engine.log[-1] == "close decoder"
    assert not decoding.has_decoder
    assert not decoding.in_step


def test_a_step_that_breaks_asks_whether_the_daemon_has_restarted(engine: FakeEngine) -> None:
    engine.failures["attend 0"] = Unavailable("the daemon is gone")
    decoding = decoding_of(engine)
    begin(decoding, engine, device=CPU)
    with pytest.raises(Unavailable):
        decoding.attend(0, *arrays())
    assert engine.log[-1] == ("refresh", "a")
    assert not decoding.in_step


def test_abandoned_work_raises_nothing(engine: FakeEngine) -> None:
    engine.failures["finish"] = Aborted("a step has failed on the GPU")
    decoding = decoding_of(engine)
    begin(decoding, engine)
    decoding.abandon()
    assert engine.log[-1] == "close decoder"
    decoding.abandon()


def test_a_decoders_step_has_no_results(engine: FakeEngine) -> None:
    decoding = decoding_of(engine)
    begin(decoding, engine)
    decoding.attend(0, *arrays())
    with pytest.raises(ValueError, match="has no results"):
        decoding.results()


def test_a_decoder_runs_a_whole_step_as_a_graph(engine: FakeEngine) -> None:
    """With a daemon, and without a decoder, nothing of the graph runs."""
    graph: Any = "g"
    decoding = decoding_of(engine)
    begin(decoding, engine)
    assert decoding.run(graph)
    assert not decoding.in_step
    begin(decoding, engine)
    assert decoding.run(graph)
    assert engine.log == [("open", None), "next", "run g", "next", "run g"]
    begin(decoding, engine)
    engine.transport = "daemon"
    assert not decoding.run(graph)
    assert engine.log[-1] == "next"
    # The caller goes on layer by layer.
    assert (decoding.attend(0, *arrays()) == 1).all()
    engine.transport = "embedded"
    engine.failures["run g"] = Aborted("the GPU failed")
    begin(decoding, engine)
    with pytest.raises(Aborted, match="the GPU failed"):
        decoding.run(graph)
    assert not decoding.in_step
    assert engine.log[-1] == "close decoder"
    begin(decoding, engine, device=CPU)
    assert not decoding.run(graph)
    assert engine.log[-1] == (1, None, (10, 20))
