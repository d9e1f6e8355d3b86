"""The seed of the sampling: random, but the same for all that belongs together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from arena_folder import DIM, LAYERS, SHAPES, daemon, rows
from daemon_process import binary
from spillway_kv.lab import serving

TOKENS = 6000
QUERY = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 4, DIM)
# Keys are hardly told apart, so most of the output comes from samples.
SPARSE = spillway_kv.Policy(dense_token_count=1024, epsilon=0.2)
RANDOM = ("--sampling-seed", "-1")


def filled(client: spillway_kv.Client, model: spillway_kv.Model) -> spillway_kv.Sequence:
    sequence = client.create_sequence(model, "s", policy=SPARSE, ttl=0)
    kv = rows(1, 0, TOKENS)
    sequence.append(0, 0, kv, -kv)
    return sequence


def seed_of(client: spillway_kv.Client, sequence: spillway_kv.Sequence) -> int | None:
    (info,) = (info for info in client.list_sequences() if info.name == sequence.name)
    return info.policy.seed


def output(sequence: spillway_kv.Sequence) -> bytes:
    return b"".join(
        np.asarray(sequence.attend(layer, QUERY).out).tobytes() for layer in range(LAYERS)
    )


def test_engines_draw_their_own(tmp_path: Path) -> None:
    serving.prefer_library(binary())
    seeds, outputs = set(), set()
    for _ in range(3):
        with spillway_kv.connect("embedded:", settings={"device.name": "cpu"}) as client:
            model = client.create_model(**SHAPES)
            # All models of an engine have one, so that they can share a sequence's rows.
            assert client.create_model(**SHAPES).policy.seed == model.policy.seed
            seeds.add(model.policy.seed)
            outputs.add(output(filled(client, model)))
    assert len(seeds) == len(outputs) == 3
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)


def test_one_seed_means_the_same_bits() -> None:
    serving.prefer_library(binary())
    outputs = set()
    for settings, seed in (
        ({"models.sampling_seed": 7}, None),
        ({}, 7),
        ({"models.sampling_seed": 8}, 7),
    ):
        named: dict[str, str | int] = {"device.name": "cpu", **settings}
        with spillway_kv.connect("embedded:", settings=named) as client:
            policy = None if seed is None else spillway_kv.Policy(seed=seed)
            model = client.create_model(**SHAPES, policy=policy)
            assert model.policy.seed == 7
            outputs.add(output(filled(client, model)))
            other = client.create_sequence(model, policy=spillway_kv.Policy(seed=8))
            assert seed_of(client, other) == 8
    assert len(outputs) == 1


def test_a_restart_and_a_fork_keep_it(tmp_path: Path) -> None:
    with daemon(tmp_path, *RANDOM) as each:
        with spillway_kv.connect(each.target) as client:
            model = client.create_model("m", **SHAPES)
            sequence = filled(client, model)
            assert seed_of(client, sequence) == model.policy.seed != 0
            assert seed_of(client, sequence.fork()) == model.policy.seed
            before = output(sequence)
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            again = client.get_sequence("sequences/s")
            assert seed_of(client, again) == model.policy.seed
            assert output(again) == before
            # A model that is made now has it too: it is the store's.
            assert client.create_model("new", **SHAPES).policy.seed == model.policy.seed
    (tmp_path / "other").mkdir()
    with daemon(tmp_path / "other", *RANDOM) as each, spillway_kv.connect(each.target) as client:
        assert client.create_model("new", **SHAPES).policy.seed != model.policy.seed


def test_a_snapshot_brings_its_seed_to_another_engine(tmp_path: Path) -> None:
    serving.prefer_library(binary())
    outputs, seeds = [], []
    for number in range(2):
        with spillway_kv.connect("embedded:", settings={"device.name": "cpu"}) as client:
            if number == 0:
                sequence = filled(client, client.create_model("m", **SHAPES))
                sequence.save(tmp_path / "saved")
            else:
                sequence, _ = client.load_sequence(tmp_path / "saved")
            (model,) = client.list_models()
            seeds.append((seed_of(client, sequence), model.policy.seed))
            outputs.append(output(sequence))
    assert outputs[0] == outputs[1]
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("seed", [-2, 1 << 63])
def test_a_seed_outside_its_range_is_refused(seed: int) -> None:
    serving.prefer_library(binary())
    settings: dict[str, str | int] = {"device.name": "cpu", "models.sampling_seed": seed}
    with pytest.raises(spillway_kv.InvalidArgument, match="models.sampling_seed"):
        spillway_kv.connect("embedded:", settings=settings)
