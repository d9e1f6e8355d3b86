"""Deadlines, cancellation, clients that die, full memory: nothing leaks."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import on_gpu, running_daemon
from helpers import delete_model, encode, held, refused, settles, wait_for
from raw_grpc import raw
from spillway_kv import Client, Model, Policy, Sequence, _split
from spillway_kv._native import Carrier
from spillway_kv._proto import attention_service_pb2 as attention

F32 = np.float32
# An attend of this many queries over this many tokens takes seconds.
EVERY_TRANSPORT = pytest.mark.transports("messages", "doorbell", "embedded")
QUERIES = 1024
TOKENS = 600_000 if on_gpu() else 24_000


@pytest.fixture(scope="module")
def heavy(client: Client) -> Iterator[Sequence]:
    """A sequence whose attends take long."""
    model = client.create_model(
        layer_count=1, query_head_count=16, kv_head_count=1, head_dim=32, dtype="float16"
    )
    sequence = client.create_sequence(model)
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 1, TOKENS, 32), F32).astype(np.float16)
    sequence.append(0, 0, k, v)
    yield sequence
    delete_model(client, model)


def services(client: Client) -> Any:
    """The services by libspillway, or by grpcio, which reads answers while it sends requests."""
    return raw(client.target) if client.step_transport == "messages" else client.connection.stubs


def long_request(heavy: Sequence) -> attention.AttendRequest:
    q = encode(np.ones((QUERIES, 16, 32), np.float16), "q")
    return attention.AttendRequest(items=[attention.AttendItem(sequence=heavy.name, q=q)])


def seconds_of_an_attend(sequence: Sequence, shape: tuple[int, int, int], dtype: Any) -> float:
    start = time.monotonic()
    sequence.attend(0, np.ones(shape, dtype), Policy(selector="all"))
    return time.monotonic() - start


def seconds_of_a_small_attend(heavy: Sequence) -> float:
    return seconds_of_an_attend(heavy, (1, 16, 32), np.float16)


def test_deadline_in_mid_attend(heavy: Sequence, no_leak: Callable[[], None]) -> None:
    start = time.monotonic()
    with pytest.raises(spillway_kv.DeadlineExceeded):
        heavy.attend(0, np.ones((QUERIES, 16, 32), np.float16), timeout=0.1)
    # The daemon stopped the attend, so the next one does not wait.
    assert seconds_of_a_small_attend(heavy) < 1.0
    assert time.monotonic() - start < 1.5
    assert heavy.refresh().layer_token_counts == (TOKENS,)


def test_cancelled_attend(client: Client, heavy: Sequence, no_leak: Callable[[], None]) -> None:
    start = time.monotonic()
    call = raw(client.target).attention.Attend.future(long_request(heavy))
    time.sleep(0.1)
    assert call.cancel()
    assert seconds_of_a_small_attend(heavy) < 1.0
    assert time.monotonic() - start < 1.5


def test_the_attend_would_have_been_long(heavy: Sequence) -> None:
    # The two tests above depend on this.
    start = time.monotonic()
    heavy.attend(0, np.ones((QUERIES, 16, 32), np.float16))
    assert time.monotonic() - start > 0.3


@pytest.fixture
def fork(heavy: Sequence) -> Iterator[Sequence]:
    """A fork of it, to which steps append."""
    fork = heavy.fork()
    yield fork
    fork.delete()


@pytest.fixture
def forks(heavy: Sequence) -> Iterator[list[Sequence]]:
    """Forks of it. A step of all of them takes as long as a long attend."""
    forks = [heavy.fork() for _ in range(QUERIES // 8)]
    yield forks
    for fork in forks:
        fork.delete()


def of_a_step(count: int, tokens: int = 16) -> list[Any]:
    """q [B, T, H_q, d], k and v [B, T, H_kv, d] of a step of `count` heavy sequences."""
    return [np.ones((count, tokens, heads, 32), np.float16) for heads in (16, 1, 1)]


def step_requests(fork: Sequence, count: int) -> list[attention.StepRequest]:
    """A step whose layer is attended `count` times, with the same tokens."""
    q, k, v = (encode(array, "a tensor") for array in of_a_step(1))
    part = attention.DecodeStep.Part(
        sequence=fork.name, token_start=TOKENS, generation=fork.generation
    )
    begin = attention.DecodeStep(
        parts=[part], token_count=16, policy=Policy(selector="all").to_proto()
    )
    attend = attention.StepRequest(attend=attention.StepAttend(q=q, k=k, v=v))
    return [attention.StepRequest(begin=begin), *[attend] * count]


@EVERY_TRANSPORT
def test_cancelled_steps(
    client: Client, heavy: Sequence, no_leak: Callable[[], None], fork: Sequence
) -> None:
    call = services(client).attention.Step(iter(step_requests(fork, 50)))
    time.sleep(0.1)
    call.cancel()
    assert seconds_of_a_small_attend(heavy) < 2.0
    error = refused(lambda: list(call))
    assert error.code == "CANCELLED"


@EVERY_TRANSPORT
def test_step_deadline(client: Client, heavy: Sequence, fork: Sequence) -> None:
    requests = step_requests(fork, 1000)
    error = refused(lambda: list(services(client).attention.Step(iter(requests), timeout=0.1)))
    assert error.code == "DEADLINE_EXCEEDED"
    assert seconds_of_a_small_attend(heavy) < 2.0


@EVERY_TRANSPORT
def test_steps_that_fail_leave_no_thread(client: Client, fork: Sequence) -> None:
    q, k, v = of_a_step(1)
    k[0, 3, 0, 5] = np.nan
    before = threading.active_count()
    # More than the threads that may have been about to end.
    steps = [client.begin_step([fork], token_count=16) for _ in range(10)]
    for step in steps:
        with pytest.raises(spillway_kv.OutOfRange):
            step.attend(0, q, k.swapaxes(1, 2), v.swapaxes(1, 2))
    wait_for(lambda: threading.active_count() <= before)


@pytest.mark.transports("messages", "doorbell")
def test_a_step_closed_by_another_thread(
    client: Client, heavy: Sequence, forks: list[Sequence]
) -> None:
    q, k, v = of_a_step(len(forks))
    rows = k.swapaxes(1, 2), v.swapaxes(1, 2)
    step = client.begin_step(forks, token_count=16, policy=Policy(selector="all"))
    closer = threading.Timer(0.1, step.close)
    closer.start()
    start = time.monotonic()
    with pytest.raises(ValueError, match="the step is closed"):
        step.attend(0, q, *rows)
    assert time.monotonic() - start < 1.0
    closer.join()
    with pytest.raises(ValueError, match="the step is closed"):
        step.attend(0, q, *rows)
    assert seconds_of_a_small_attend(heavy) < 2.0


@EVERY_TRANSPORT
def test_bursts_are_served_in_order(client: Client, model: Model) -> None:
    """The daemon reads messages while it answers others. None may overtake another."""
    q, k, v = (encode(np.ones((1, 1, heads, 16), F32), "a tensor") for heads in (4, 2, 2))
    attend = attention.StepAttend(q=q, k=k, v=v)
    for _ in range(10):
        sequence = client.create_sequence(model)
        requests = []
        for start in range(300):
            part = attention.DecodeStep.Part(sequence=sequence.name, token_start=start)
            begin = attention.DecodeStep(parts=[part], token_count=1)
            requests.append(attention.StepRequest(begin=begin, attend=attend))
        answers = list(services(client).attention.Step(iter(requests), timeout=60))
        assert [answer.status.code for answer in answers] == [0] * 300
        visible = [list(a.results[0].certificate.visible_token_counts) for a in answers]
        assert visible == [[start + 1] * 4 for start in range(300)]
        assert sequence.refresh().layer_token_counts == (300, 0)
        sequence.delete()


@pytest.mark.parametrize("carrier", [Carrier.MESSAGES, Carrier.DOORBELL], ids=lambda x: x.name)
def test_interrupted_step(target: str, heavy: Sequence, carrier: Carrier) -> None:
    """Ctrl-C ends the wait for a step that the daemon has begun. Then the client continues."""
    script = Path(__file__).with_name("step_for_ever.py")
    process = subprocess.Popen(
        [sys.executable, script, target, heavy.name, str(QUERIES // 4), carrier.name],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{carrier.name.lower()}\n"
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    assert time.monotonic() - start < 0.3
    assert process.stdout.readline() == "another\n"
    # It does not wait for the long step, which takes seconds.
    assert time.monotonic() - start < 1.5
    assert process.stdout.readline() == "the same again\n"
    assert process.wait(10) == 0


def test_cancelled_append(client: Client, model: Model, no_leak: Callable[[], None]) -> None:
    sequence = client.create_sequence(model)
    rows = np.ones((2, 2, 100, 16), F32)
    sent = threading.Event()

    def requests() -> Iterator[attention.AppendRequest]:
        request = attention.AppendRequest()
        _split.fill_chunk(request.chunk, sequence.name, 0, 0, 0, rows, rows)
        yield request
        sent.set()
        threading.Event().wait(10)

    call = raw(client.target).attention.Append.future(requests())
    assert sent.wait(10)
    wait_for(lambda: sequence.refresh().token_count == 100)
    call.cancel()
    # Committed tokens stay, and the append can continue.
    sequence.append(0, 100, rows, rows)
    assert sequence.refresh().layer_token_counts == (200, 200)
    sequence.delete()


def test_client_killed_in_mid_append(
    client: Client, target: str, model: Model, no_leak: Callable[[], None]
) -> None:
    sequence = client.create_sequence(model)
    script = Path(__file__).with_name("append_slowly.py")
    process = subprocess.Popen(
        [sys.executable, script, target, sequence.name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "sent\n"
    wait_for(lambda: sequence.refresh().token_count == 2000)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    rows = np.full((2, 2, 50, 16), 2, F32)
    sequence.append(0, 2000, rows, rows)
    out = sequence.attend(0, np.zeros((1, 4, 16), F32)).out
    np.testing.assert_allclose(out, (2000 + 2 * 50) / 2050, rtol=1e-5)
    sequence.delete()
    no_leak()


def kill_in_mid_attend(client: Client, target: str, heavy: Sequence, other: Sequence) -> None:
    before = client.statistics().memory.other_bytes
    script = Path(__file__).with_name("attend_for_ever.py")
    process = subprocess.Popen(
        [sys.executable, script, target, heavy.name, str(QUERIES), "16", "32"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "sent\n"
    # Meanwhile, other clients are served.
    assert seconds_of_an_attend(other, (1, 4, 16), F32) < 10
    wait_for(lambda: client.statistics().memory.other_bytes > before)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert seconds_of_a_small_attend(heavy) < 1.0
    np.testing.assert_allclose(other.attend(0, np.zeros((1, 4, 16), F32)).out, 3, rtol=1e-5)


def test_client_killed_in_mid_attend(
    client: Client, target: str, heavy: Sequence, model: Model, no_leak: Callable[[], None]
) -> None:
    other = client.create_sequence(model)
    rows = np.full((2, 2, 50, 16), 3, F32)
    other.append(0, 0, rows, rows)
    kill_in_mid_attend(client, target, heavy, other)
    # A device keeps workspaces of attends for later ones, and each attend may use another of them.
    # So memory settles after some attends, but grows without an end if there is a leak.
    for _ in range(4):
        before = client.statistics().memory
        kill_in_mid_attend(client, target, heavy, other)
        if settles(lambda held=before: client.statistics().memory == held):  # type: ignore[misc]
            break
    else:
        pytest.fail(f"{client.statistics().memory} after {before}")
    other.delete()


def test_cycles_do_not_leak(client: Client, model: Model) -> None:
    """The charged memory settles: the tenth cycle holds as much as the second."""
    rows = np.ones((2, 2, 1500, 16), F32)
    used = []
    for _ in range(10):
        sequence = client.create_sequence(model)
        sequence.append(0, 0, rows, rows)
        copy = sequence.fork()
        copy.append(0, 1500, rows[:, :, :10], rows[:, :, :10])
        copy.attend(0, np.ones((1, 4, 16), F32))
        sequence.truncate(700)
        sequence.delete()
        copy.delete()
        used.append(client.statistics().memory.used_bytes)
    # Messages of calls that have just ended may still be charged, in either figure.
    assert used[-1] < used[1] + 1024


def append_for_ever(sequence: Sequence, rows: Any) -> None:
    for start in itertools.count(0, rows.shape[2]):
        sequence.append(0, start, rows, rows)


@pytest.fixture(scope="module")
def small_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a daemon that may hold 64 MiB."""
    folder = tmp_path_factory.mktemp("small")
    with (
        running_daemon(folder, "--memory-limit", str(64 << 20)) as target,
        spillway_kv.connect(target) as client,
    ):
        yield client


def test_memory_runs_out(small_client: Client) -> None:
    client = small_client
    assert client.statistics().memory.limit_bytes == 64 << 20
    model = client.create_model(
        layer_count=2, query_head_count=4, kv_head_count=4, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model)
    rows = np.ones((2, 4, 400, 64), F32)
    before_fill = held(client)
    with pytest.raises(spillway_kv.ResourceExhausted) as caught:
        append_for_ever(sequence, rows)
    error: Any = caught.value
    assert error.needed_bytes > 0
    assert error.needed_bytes > error.free_bytes >= 0
    memory = client.statistics().memory
    assert memory.used_bytes <= memory.limit_bytes
    # Rows took most of the memory.
    assert memory.row_bytes > memory.limit_bytes // 2
    counts = sequence.refresh().layer_token_counts
    # The chunk that failed left nothing, and sequences can still be read.
    assert all(count % 400 == 0 for count in counts)
    assert sequence.attend(0, np.ones((1, 4, 64), F32)).out.shape == (1, 4, 64)
    sequence.delete()
    assert held(client) == before_fill
    again = client.create_sequence(model)
    again.append(0, 0, rows, rows)
    delete_model(client, model)
