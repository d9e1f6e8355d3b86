"""The audit: compares attends with exact attention, and gives failing heads more rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import spillway_kv
from daemon_process import running_daemon
from helpers import delete_model, wait_for
from spillway_kv import Client, Model, Policy, RotationHash, Sequence

GROUP = 4
KV_HEADS = 2
DIM = 64
TOKENS = 6000
EPSILON = 0.05
DELTA = 0.1
# Hamming distances of 64 random bits rank these keys badly.
POLICY = Policy(selector="hamming", epsilon=EPSILON, delta=DELTA, dense_token_count=1024)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a daemon that audits every attend."""
    flags = ("--audit-share", "1", "--audit-cpu-share", "1")
    with (
        running_daemon(tmp_path_factory.mktemp("audited"), *flags) as target,
        spillway_kv.connect(target) as client,
    ):
        yield client


def fill(client: Client, group: int = GROUP) -> tuple[Model, Sequence]:
    """A sequence whose keys lie in few directions and far from the origin."""
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.standard_normal((KV_HEADS, DIM, DIM)))[0]
    spread = np.logspace(0.5, -1.2, DIM)
    k = (rng.standard_normal((KV_HEADS, TOKENS, DIM)) * spread) @ basis + 2 * basis[:, :1]
    k /= np.sqrt((k**2).mean((1, 2), keepdims=True) * DIM / 64)
    v = rng.standard_normal((KV_HEADS, TOKENS, DIM)) + rng.standard_normal((KV_HEADS, 1, DIM))
    model = client.create_model(
        layer_count=1,
        query_head_count=group * KV_HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
        hash_weights=RotationHash(bits_per_dim=1),
    )
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k.astype(np.float32), v.astype(np.float32))
    return model, sequence


def draw(rng: np.random.Generator, group: int = GROUP) -> tuple[npt.NDArray[np.float32], list[int]]:
    """A query, and how many tokens it sees. The number varies, so that samples differ."""
    q = 6 * rng.standard_normal((1, group * KV_HEADS, DIM))
    return q.astype(np.float32), [TOKENS - int(rng.integers(500))]


def violations(
    sequence: Sequence, rng: np.random.Generator, count: int, promise: str = "statistical"
) -> float:
    """Of the certificates that say at most epsilon, the share of outputs with a larger error.

    All these certificates must have `promise`, or be exact.
    """
    promised = failed = 0
    for _ in range(count):
        q, visible = draw(rng)
        result = sequence.attend(0, q, POLICY, visible)
        exact = sequence.attend(0, q, Policy(selector="all"), visible)
        error = np.linalg.norm(result.out - exact.out, axis=-1)
        error /= np.linalg.norm(exact.out, axis=-1)
        within = result.certificate.relative_errors <= EPSILON
        checked = within & (result.certificate.promises == promise)
        assert not (within & ~np.isin(result.certificate.promises, (promise, "exact"))).any()
        promised += int(checked.sum())
        failed += int((error[checked] > EPSILON).sum())
    return failed / promised


def settle(client: Client) -> None:
    """Waits until all offered attends are audited."""
    before = -1
    while (now := client.statistics().audit.check_count) != before:
        before = now
        time.sleep(0.1)


def test_violations_fall_under_delta(client: Client, audited: Client) -> None:
    rng = np.random.default_rng(2)
    model, sequence = fill(client)
    assert client.statistics().audit == spillway_kv.AuditStatistics(0, 0, 0, 0, 0)
    # Attends with 1-bit ranks make no promise, because they would often break it.
    assert violations(sequence, rng, 100, "none") > 1.3 * DELTA
    delete_model(client, model)

    model, sequence = fill(audited)
    assert audited.statistics(model).head_audits == ()
    first = sequence.attend(0, *draw(rng)[:1], POLICY)
    assert first.certificate.head_inflations.size == 0
    for _ in range(40):
        for _ in range(10):
            q, visible = draw(rng)
            sequence.attend(0, q, POLICY, visible)
        settle(audited)
    statistics = audited.statistics(model)
    assert statistics.audit.share == 1
    assert statistics.audit.raised_head_count == KV_HEADS
    assert len(statistics.head_audits) == KV_HEADS
    assert {head.kv_head for head in statistics.head_audits} == set(range(KV_HEADS))
    checks = sum(head.check_count for head in statistics.head_audits)
    assert checks == statistics.audit.check_count > 1000
    for head in statistics.head_audits:
        assert head.level > 0
        assert head.violation_count > 0

    assert violations(sequence, rng, 150) < DELTA
    # Certificates and selections show this.
    q, visible = draw(rng)
    certificate = sequence.attend(0, q, POLICY, visible).certificate
    assert certificate.head_inflations.shape == (KV_HEADS,)
    assert certificate.inflation == 1.25
    selected = sequence.select(0, q, POLICY, visible[0]).certificate
    assert selected is not None
    assert selected.head_inflations.size == KV_HEADS
    delete_model(audited, model)


def test_a_good_selector_is_left_alone(audited: Client) -> None:
    rng = np.random.default_rng(3)
    model, sequence = fill(audited)
    policy = Policy(selector="oracle", epsilon=0.2, dense_token_count=1024)
    for _ in range(30):
        q, visible = draw(rng)
        sequence.attend(0, q, policy, visible)
    settle(audited)
    for head in audited.statistics(model).head_audits:
        assert head.check_count > 0
        assert head.level == 0
    delete_model(audited, model)


def test_groups_are_audited_by_kv_head(audited: Client) -> None:
    """Of 18 query heads for each KV head, groups of nine are attended."""
    rng = np.random.default_rng(4)
    model, sequence = fill(audited, 18)
    policy = Policy(selector="oracle", epsilon=0.2, dense_token_count=1024)
    promised = np.zeros(KV_HEADS, np.int64)

    def counts() -> dict[int, int]:
        heads = audited.statistics(model).head_audits
        return {head.kv_head: head.check_count for head in heads}

    def all_checked() -> bool:
        return sum(counts().values()) >= int(promised.sum())

    for _ in range(10):
        q, visible = draw(rng, 18)
        result = sequence.attend(0, q, policy, visible)
        statistical = result.certificate.promises == "statistical"
        promised += statistical.reshape(KV_HEADS, 18).sum(1)
        wait_for(all_checked)
    assert promised.min() > 10 * 9  # those of more than one group
    assert counts() == dict(enumerate(promised.tolist()))
    delete_model(audited, model)


@pytest.mark.parametrize("flag", ["--audit-share=1.5", "--audit-share=-0.1", "--audit-cpu-share=0"])
def test_shares_out_of_range(tmp_path: Path, flag: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{flag.split('=')[0]}.*is not a share in"):
        with running_daemon(tmp_path, flag):
            pass
