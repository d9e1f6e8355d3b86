"""Caches that last: interruptions, saves, other processes, turns, quality settings."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import spillway_kv
import torch
from daemon_process import on_gpu
from interrupts import Interrupted
from random_llama import llama, prompt
from spillway_kv import Client, Model, Policy, RotationHash
from spillway_kv._proto import sequence_service_pb2
from spillway_kv.quality import QUALITIES, policy_of
from spillway_kv.row_types import RowType
from spillway_kv.shared_model import shared_model
from spillway_kv.transformers import AttendEvent, SpillwayCache, TokenMismatchError
from spillway_kv.transformers import generate as generate_text

pytestmark = pytest.mark.transports("regions", "messages", "embedded")


@pytest.fixture(scope="module")
def spilled() -> Any:
    """A model with three layers and Spillway's attention."""
    model = llama(3)
    model.set_attn_implementation("spillway")
    return model


def forward(model: Any, ids: torch.Tensor, cache: SpillwayCache) -> torch.Tensor:
    """The logits of the last position. The cache may already have the first tokens."""
    with torch.no_grad():
        out = model(ids[:, cache.get_seq_length() :], past_key_values=cache)
    logits: torch.Tensor = out.logits[:, -1]
    return logits


def continued(model: Any, ids: torch.Tensor, cache: SpillwayCache, count: int) -> torch.Tensor:
    """Decodes greedily, step by step."""
    for _ in range(count):
        if cache.get_seq_length() == ids.shape[1]:
            cache.crop(-1)
        ids = torch.cat([ids, forward(model, ids, cache).argmax(-1, keepdim=True)], dim=1)
    return ids


def held(cache: SpillwayCache) -> set[tuple[int, ...]]:
    """The layer lengths of all sequences."""
    for sequence in cache.sequences:
        sequence.refresh()
    return {sequence.layer_token_counts for sequence in cache.sequences}


@pytest.mark.parametrize("kind", ["prompt", "chunk", "step", "crop"])
def test_interrupted_anywhere(client: Client, spilled: Any, kind: str) -> None:
    """Results after an interruption must be the same as without one."""
    ids = prompt(1, 60)
    with SpillwayCache(spilled.config, client) as cache:
        expected = continued(spilled, ids, cache, 6)
    base = {"prompt": 0, "chunk": 40, "step": 60, "crop": 60}[kind]
    fired = 0
    for line in itertools.count(0, 7 if kind != "prompt" else 11):
        with SpillwayCache(spilled.config, client) as cache:
            if base:
                forward(spilled, ids[:, :base], cache)
            text = expected[:, :61] if kind == "step" else ids
            calls: dict[str, Callable[[], Any]] = {
                "prompt": lambda c=cache: forward(spilled, ids, c),  # type: ignore[misc]
                "chunk": lambda c=cache: forward(spilled, ids, c),  # type: ignore[misc]
                "step": lambda c=cache, t=text: forward(spilled, t, c),  # type: ignore[misc]
                "crop": lambda c=cache: c.crop(-20),  # type: ignore[misc]
            }
            hit = Interrupted(line).run(calls[kind])
            # The cache says how much it holds, and holds this at its next use.
            length = cache.get_seq_length()
            whole = {"prompt": 60, "chunk": 60, "step": 61, "crop": 40}[kind]
            assert length in (base, whole), (kind, line)
            made = continued(spilled, text, cache, expected.shape[1] - text.shape[1])
            assert torch.equal(made, expected), (kind, line)
            assert held(cache) == {(made.shape[1] - 1,) * 3}
            fired += hit
        if not hit:
            break
    assert fired > 5


def test_interrupted_in_every_layer(client: Client, spilled: Any) -> None:
    """Interrupts the model's own code, and code that runs on the daemon's answers."""
    ids = prompt(2, 50)
    with SpillwayCache(spilled.config, client) as cache:
        expected = continued(spilled, ids, cache, 4)

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    for layer, step in itertools.product(range(3), (50, 51)):
        with SpillwayCache(spilled.config, client) as cache:
            forward(spilled, expected[:, : step - 1], cache)
            hook = spilled.model.layers[layer].mlp.register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                forward(spilled, expected[:, :step], cache)
            hook.remove()
            assert cache.length == (step if layer == 2 else step - 1)
            assert torch.equal(continued(spilled, expected[:, :step], cache, 54 - step), expected)

    def fail_at_the_second(event: AttendEvent) -> None:
        if event.layer == 1:
            raise KeyboardInterrupt

    with SpillwayCache(spilled.config, client, on_attend=fail_at_the_second) as cache:
        forward(spilled, ids, cache)
        with pytest.raises(KeyboardInterrupt):
            forward(spilled, expected[:, :51], cache)
        cache.on_attend = None
        assert cache.length == 50
        assert torch.equal(continued(spilled, expected[:, :51], cache, 3), expected)


def test_interrupted_generate_goes_on(client: Client, spilled: Any) -> None:
    """Tests generate() itself, and generation with known tokens."""
    ids = prompt(1, 80)
    options: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with SpillwayCache(spilled.config, client) as cache:
        expected = spilled.generate(ids, past_key_values=cache, **options)
    for line in range(100, 6000, 900):
        with SpillwayCache(spilled.config, client) as cache:
            Interrupted(line).run(
                lambda c=cache: generate_text(spilled, c, ids, **options)  # type: ignore[misc]
            )
            (known,) = cache.tokens or [[]]
            assert known == expected[0, : len(known)].tolist()
            text = expected[:, : max(len(known), 80)]
            more = expected.shape[1] - text.shape[1]
            if more:
                made = generate_text(spilled, cache, text, **{**options, "max_new_tokens": more})
                assert torch.equal(made, expected), line


def test_a_failed_append_leaves_what_is_there(
    client: Client, spilled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(1, 90)
    append = spillway_kv.Sequence.append

    def fail(self: spillway_kv.Sequence, layer: int, start: int, *arguments: Any) -> Any:
        if layer == 1 and start == 40:
            raise spillway_kv.ResourceExhausted("no room", code="RESOURCE_EXHAUSTED")
        return append(self, layer, start, *arguments)

    with SpillwayCache(spilled.config, client) as cache:
        expected = continued(spilled, ids, cache, 3)
    with SpillwayCache(spilled.config, client) as cache:
        forward(spilled, ids[:, :40], cache)
        monkeypatch.setattr(spillway_kv.Sequence, "append", fail)
        with pytest.raises(spillway_kv.ResourceExhausted):
            forward(spilled, ids[:, :70], cache)
            forward(spilled, ids, cache)
        monkeypatch.undo()
        cache.crop(0)
        assert cache.length == 40
        assert torch.equal(continued(spilled, ids, cache, 3), expected)


def test_saved_and_loaded(client: Client, spilled: Any, folder: str) -> None:
    ids = prompt(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    options: Any = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with SpillwayCache(spilled.config, client, policy=Policy(epsilon=0.2)) as cache:
        first = generate_text(spilled, cache, ids, attention_mask=mask, **options)
        cache.mark("first answer")
        cache.save(folder)
        longer = torch.cat([first, prompt(2, 5)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 13)], dim=1)
        expected = generate_text(spilled, cache, longer, attention_mask=mask, **options)
        cache.save(folder)
    with SpillwayCache.load(folder, spilled.config, client) as cache:
        assert cache.length == expected.shape[1] - 1
        assert cache.paddings == (9, 0)
        assert cache.turns == {"first answer": 77}
        assert cache.tokens == [expected[0, 9:-1].tolist(), expected[1, :-1].tolist()]
        other = expected.clone()
        other[1, 75] += 1
        with pytest.raises(TokenMismatchError, match="row 1 .* at position 75") as caught:
            generate_text(spilled, cache, other, attention_mask=torch.ones_like(other), **options)
        assert (caught.value.row, caught.value.position) == (1, 75)
        with pytest.raises(TokenMismatchError, match="truncate"):
            cache.check_tokens(expected[:, :70])
        # Go back to a turn, make a branch, and generate the same again.
        cache.truncate("first answer")
        branch = cache.fork()
        for one in (cache, branch):
            assert one.length == 77
            made = generate_text(spilled, one, longer, attention_mask=mask, **options)
            assert torch.equal(made, expected)
        branch.close()
        with pytest.raises(KeyError, match="first answer"):
            cache.truncate("another")
        with pytest.raises(ValueError, match="not in"):
            cache.truncate(1000)
        cache.truncate(50)
        assert not cache.turns
    # Caches of another model, and a folder without a cache.
    wider = copy.deepcopy(spilled.config)
    wider.num_hidden_layers = 4
    before = len(list(client.list_sequences()))
    with pytest.raises(ValueError, match="num_hidden_layers was 3 and is 4"):
        SpillwayCache.load(folder, wider, client)
    with pytest.raises(ValueError, match="layer_count=4"):
        SpillwayCache.load(folder, wider, client, check_model=False)
    assert len(list(client.list_sequences())) == before
    with pytest.raises(spillway_kv.NotFound):
        SpillwayCache.load(folder + "-not", spilled.config, client)
    with (
        SpillwayCache(spilled.config, client) as empty,
        pytest.raises(ValueError, match="nothing to save"),
    ):
        empty.save(folder)


def test_a_folder_without_a_name(client: Client, spilled: Any) -> None:
    with SpillwayCache(spilled.config, client) as cache:
        forward(spilled, prompt(1, 20), cache)
        with pytest.raises(ValueError, match="the name of the folder is empty"):
            cache.save("")
    with pytest.raises(ValueError, match="the name of the folder is empty"):
        SpillwayCache.load("", spilled.config, client)


def test_rows_of_two_saves_do_not_load(client: Client, spilled: Any, folder: str) -> None:
    save = spillway_kv.Sequence.save
    with SpillwayCache(spilled.config, client) as cache:
        forward(spilled, prompt(2, 20), cache)
        cache.save(folder)
        forward(spilled, prompt(2, 21), cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                spillway_kv.Sequence,
                "save",
                lambda self, to, **more: None if "row-1" in to else save(self, to, **more),
            )
            cache.save(folder)
        with pytest.raises(ValueError, match="row 1 is from another save"):
            SpillwayCache.load(folder, spilled.config, client)
        # A snapshot that was not saved by SpillwayCache.
        cache.sequences[0].save(f"{folder}/row-0", client_data=b"SPWCACHE1junk")
        with pytest.raises(ValueError, match=r"not saved by SpillwayCache\.save"):
            SpillwayCache.load(folder, spilled.config, client)


def test_attached_by_name(client: Client, spilled: Any) -> None:
    ids = prompt(2, 40)
    with SpillwayCache(spilled.config, client) as cache:
        expected = continued(spilled, ids, cache, 5)
    cache = SpillwayCache(spilled.config, client)
    forward(spilled, ids, cache)
    names = cache.detach()
    assert (cache.length, cache.batch_size) == (0, -1)
    cache.close()
    # A step that another process finished in only one layer.
    sequence = client.get_sequence(names[0])
    row = torch.zeros(2, 1, 32)
    sequence.append(0, 40, row, row)
    with SpillwayCache.attach(spilled.config, client, names, tokens=ids) as attached:
        assert attached.length == 40
        with pytest.raises(TokenMismatchError, match="position 0"):
            attached.check_tokens(ids.flip(1))
        assert torch.equal(continued(spilled, ids, attached, 5), expected)
        attached.truncate(40)
    # The sequences still exist.
    with SpillwayCache.attach(spilled.config, client, names, keep=False) as attached:
        assert torch.equal(continued(spilled, ids, attached, 5), expected)
    for name in names:
        with pytest.raises(spillway_kv.NotFound):
            client.get_sequence(name)
    with pytest.raises(ValueError, match="list of names"):
        SpillwayCache.attach(spilled.config, client, names[0])


def test_codes_of_values_stay(client: Client, spilled: Any, folder: str) -> None:
    """Caches with codes of values have a model of their own, also when loaded and when reset."""
    weights, ids = RotationHash(value_bits=2), prompt(1, 1500)

    def sparse(cache: SpillwayCache) -> torch.Tensor:
        made = continued(spilled, ids, cache, 3)
        assert cache.model is not None
        assert cache.model.hash_weights == weights
        assert cache.statistics.rows_touched_fraction < 1
        return made

    policy = Policy(dense_token_count=1024, epsilon=0.3)
    with SpillwayCache(spilled.config, client, policy=policy, hash_weights=weights) as cache:
        expected = sparse(cache)
        with SpillwayCache(spilled.config, client) as other:
            forward(spilled, prompt(1, 5), other)
            assert other.model != cache.model
        cache.truncate(1500)
        cache.save(folder)
        assert torch.equal(sparse(cache), expected)
        cache.reset()
        assert torch.equal(sparse(cache), expected)
    with SpillwayCache.load(folder, spilled.config, client) as cache:
        branch = cache.fork()
        for each in (branch, cache):
            assert torch.equal(sparse(each), expected)
        cache.reset()
        assert torch.equal(sparse(cache), expected)
        branch.close()


def test_a_wrong_number_of_bits_is_refused(client: Client, spilled: Any) -> None:
    with (
        SpillwayCache(spilled.config, client, hash_weights=RotationHash(value_bits=4)) as cache,
        pytest.raises(spillway_kv.InvalidArgument, match=r"value_bits: value 4 is not in \[0, 3\]"),
    ):
        forward(spilled, prompt(1, 5), cache)


def test_rows_of_8_bits_stay(client: Client, spilled: Any, folder: str) -> None:
    """Caches with rows of 8 bits have a model of their own, also when loaded and when reset."""
    ids = prompt(1, 1500)
    policy = Policy(dense_token_count=1024, epsilon=0.3)

    def sparse(cache: SpillwayCache) -> torch.Tensor:
        made = continued(spilled, ids, cache, 3)
        assert cache.model is not None
        assert cache.model.row_type == "int8"
        assert cache.statistics.rows_touched_fraction < 1
        return made

    with SpillwayCache(spilled.config, client, policy=policy, row_type="int8") as cache:
        expected = sparse(cache)
        with SpillwayCache(spilled.config, client) as other:
            forward(spilled, prompt(1, 5), other)
            assert other.model is not None
            assert other.model.row_type == "model"
            assert cache.model is not None
            assert cache.model.row_bytes_per_token < other.model.row_bytes_per_token
        cache.truncate(1500)
        cache.save(folder)
        assert torch.equal(sparse(cache), expected)
        cache.reset()
        assert torch.equal(sparse(cache), expected)
    with SpillwayCache.load(folder, spilled.config, client, row_type="int8") as cache:
        branch = cache.fork()
        for each in (branch, cache):
            assert torch.equal(sparse(each), expected)
        cache.reset()
        assert torch.equal(sparse(cache), expected)
        branch.close()


def test_rows_of_another_type_are_refused(client: Client, spilled: Any, folder: str) -> None:
    wrong = r"models/\S+ stores rows as row_type 'int8', this cache as 'model': make the cache with"
    with SpillwayCache(spilled.config, client, row_type="int8") as cache:
        forward(spilled, prompt(1, 20), cache)
        cache.save(folder)
        names = cache.detach()
        with SpillwayCache(spilled.config, client, model=cache.model) as other:
            with pytest.raises(ValueError, match=wrong):
                forward(spilled, prompt(1, 5), other)
    with pytest.raises(ValueError, match=wrong):
        SpillwayCache.load(folder, spilled.config, client)
    with pytest.raises(ValueError, match=wrong):
        SpillwayCache.attach(spilled.config, client, names)
    # The sequences are still there for a cache with the same row type.
    with SpillwayCache.attach(spilled.config, client, names, keep=False, row_type="int8") as cache:
        assert cache.length == 20
    with pytest.raises(ValueError, match="row_type 'int4' is not one of"):
        SpillwayCache(spilled.config, client, row_type="int4")  # type: ignore[arg-type]


@pytest.mark.transports("embedded")
def test_only_rows_of_8_bits_change_the_name_of_the_model(
    client: Client, spilled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that know no row types share the models of those that do."""
    specs = []

    def noted(client: Client, kind: str, spec: str, **options: Any) -> Model:
        specs.append(json.loads(spec))
        return shared_model(client, kind, spec, **options)

    monkeypatch.setattr("spillway_kv.transformers.daemon_model.shared_model", noted)
    for row_type in get_args(RowType):
        with SpillwayCache(spilled.config, client, row_type=row_type) as cache:
            forward(spilled, prompt(1, 5), cache)
    assert [len(spec) for spec in specs] == [5, 6]
    assert specs[1] == [*specs[0], "int8"]


@pytest.mark.transports("regions")
@pytest.mark.skipif(on_gpu(), reason="the other process computes on the CPU")
def test_attached_in_another_process(client: Client, spilled: Any, tmp_path: Path) -> None:
    ids = prompt(1, 40)
    spilled.save_pretrained(tmp_path)
    with SpillwayCache(spilled.config, client) as cache:
        expected = continued(spilled, ids, cache, 5)
    cache = SpillwayCache(spilled.config, client)
    forward(spilled, ids, cache)
    script = (
        "import sys, spillway_kv, torch\n"
        "from spillway_kv.transformers import SpillwayCache\n"
        "from transformers import AutoModelForCausalLM\n"
        "folder, target, name, ids = sys.argv[1:]\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation='spillway')\n"
        "ids = torch.tensor([[int(n) for n in ids.split()]])\n"
        "with spillway_kv.connect(target) as client:\n"
        "    with SpillwayCache.attach(model.config, client, [name], keep=False) as cache:\n"
        "        made = model.generate(ids, past_key_values=cache, max_new_tokens=4,\n"
        "                              do_sample=False, eos_token_id=None)\n"
        "print(*made[0].tolist())\n"
    )
    text = expected[0, :41].tolist()
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), client.target, *cache.detach()]
        + [" ".join(map(str, text))],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert [int(n) for n in out.split()] == expected[0].tolist()


def test_pickle_says_what_to_do(client: Client, spilled: Any, tmp_path: Path) -> None:
    with SpillwayCache(spilled.config, client) as cache:
        forward(spilled, prompt(1, 10), cache)
        for call in (
            lambda: pickle.dumps(cache),
            lambda: torch.save(cache, tmp_path / "cache.pt"),
            lambda: torch.save({"past": cache}, tmp_path / "cache.pt"),
        ):
            with pytest.raises(TypeError, match=r"cache\.save\(folder\)"):
                call()
        copied = copy.deepcopy(cache)
        assert copied.length == 10
        copied.close()


def test_quality(client: Client, spilled: Any) -> None:
    assert QUALITIES == ("exact", "high", "default", "fast")
    assert policy_of("default") is None
    for word in QUALITIES:
        policy = policy_of(word)
        with SpillwayCache(spilled.config, client, quality=word) as cache:
            forward(spilled, prompt(1, 10), cache)
            forward(spilled, prompt(1, 11), cache)
            name = cache.sequences[0].name
            asked = sequence_service_pb2.GetSequenceRequest(name=name)
            made = client.connection.stubs.sequences.GetSequence(asked, timeout=10).sequence.policy
            if policy is None:
                assert made.epsilon == 0.1
            elif word == "exact":
                assert made.selector == policy.to_proto().selector
            else:
                assert made.epsilon == policy.epsilon
    with pytest.raises(ValueError, match="'exact', 'high', 'default', 'fast'"):
        SpillwayCache(spilled.config, client, quality="best")
    with pytest.raises(ValueError, match="give only one of them"):
        SpillwayCache(spilled.config, client, quality="high", policy=Policy())
