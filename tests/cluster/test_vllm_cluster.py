"""Tests of the vLLM plugin's worker with a cluster. Results must be those of one engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import spillway_kv.cluster
from daemon_process import binary, device_flags
from local_cluster import LocalCluster, local_cluster
from spillway_kv.vllm.settings import Settings, settings_from
from spillway_kv.vllm.step_plan import Source, StepPlan
from test_vllm_worker import (  # noqa: F401  (they run here with this module's `model`)
    test_a_request_begins_with_anothers_rows,
    test_chunks_and_decode_steps_in_one_batch,
    test_requests_that_come_and_go_while_others_decode,
    test_rows_beyond_the_plan_are_cut,
    test_rows_that_are_not_there_are_lost,
    test_sequences_go_when_told,
    test_sparse_steps_are_counted,
    test_values_that_are_not_finite_fail_alone,
)
from vllm_texts import Model, check, planned

FLAGS = ("--memory-limit", "512MiB", "--grace", "1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), 2, *FLAGS) as made:
        yield made


def connected_to(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, part_count: int = 1
) -> Settings:
    """Settings with which the plugin's workers connect to the cluster."""

    def connect(target: str, **_: Any) -> spillway_kv.cluster.ClusterClient:
        assert target == "ray:kv"
        return cluster.connect(part_count)

    monkeypatch.setattr(spillway_kv.cluster, "connect", connect)
    return settings_from({"VLLM_SPILLWAY_TARGET": "ray:kv", "VLLM_SPILLWAY_RECONNECT_SECONDS": "5"})


# Sequences are whole on either daemon, or have one KV head on each.
@pytest.fixture(params=[1, 2])
def model(
    request: pytest.FixtureRequest, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Model]:
    made = Model(settings=connected_to(cluster, monkeypatch, request.param))
    yield made
    made.worker.close()
    with cluster.connect(request.param) as client:
        for each in list(client.list_models()):
            client.delete_model(each)


def daemons_of(model: Model, key: int) -> list[str]:
    """The daemons that have a request's sequence."""
    sequence: Any = model.worker._sequences._sequences[key]
    names: list[str] = sequence.daemons
    return names


def test_ranks_that_begin_at_once_share_the_model(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = connected_to(cluster, monkeypatch, 2)
    ranks = [Model(settings=settings) for _ in range(4)]

    def first_step(rank: Model) -> Any:
        report, outs = rank.step(StepPlan([planned(1, 0, 5)]), {1: 1})
        assert not report.losses
        check(rank, outs[1], 1, 0)

    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(first_step, ranks))
    for rank in ranks:
        rank.worker.close()
    with cluster.connect(2) as client:
        (shared,) = client.list_models()
        client.delete_model(shared)


def test_what_a_lost_daemon_had_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(binary()), "--sampling-seed", "0", *device_flags()]
    with local_cluster(tmp_path, 2, *FLAGS, command=command) as cluster:
        model = Model(settings=connected_to(cluster, monkeypatch))
        texts = {1: 0, 2: 100}
        model.step(StepPlan([planned(1, 0, 120), planned(2, 0, 120)]), texts)
        (lost,) = daemons_of(model, 1)
        assert daemons_of(model, 2) != [lost]
        node = cluster.nodes[lost]
        cluster.directory.dead_nodes["node-" + lost[-1]] = "its machine is off"
        node._stopping.set()
        assert node.pid is not None
        os.kill(node.pid, 9)
        report, outs = model.step(StepPlan([planned(1, 120, 1), planned(2, 120, 1)]), texts)
        assert {key: loss.kind for key, loss in report.losses.items()} == {1: "again"}
        check(model, outs[2], 100, 120)
        plan = StepPlan([planned(1, 96, 25, source=Source(2, 96)), planned(2, 121, 1)])
        report, outs = model.step(plan, texts)
        assert not report.losses
        check(model, outs[1], 0, 96)
        check(model, outs[2], 100, 121)
        model.worker.close()
