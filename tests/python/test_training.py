"""Hash functions: the loss, their evaluation, their files, and agreement with the daemon."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import spillway_kv
import torch
from helpers import delete_model
from safetensors.torch import save_file
from spillway_kv import Policy, TopK
from spillway_kv.lab.training import (
    HashMlp,
    Traces,
    Training,
    describe_hash,
    import_hata,
    import_spotlight,
    save_hash,
    train_layer,
)
from spillway_kv.lab.training.ranking import (
    intersection_over_union,
    ranking_loss,
    softsign,
    top_counts,
    true_scores,
)
from spillway_kv.lab.training.trainer import CENTRE_TOKEN_COUNT
from tiny_model import WORDS, draw_words, save_tiny_llama

DIM = 32
KV_HEADS = 2
GROUP = 3
SHAPES = [False, True]  # values of per_query_head


def make_traces(folder: Path, sample_count: int = 4, n: int = 1536, m: int = 256) -> Traces:
    """Queries and keys in two narrow cones: an offset and a few directions with large variance."""
    generator = torch.Generator().manual_seed(3)
    heads = KV_HEADS * GROUP
    basis = torch.linalg.qr(torch.randn(KV_HEADS, DIM, DIM, generator=generator)).Q
    spread = torch.logspace(0.7, -1.3, DIM)
    offset = 4 * torch.randn(heads, 1, DIM, generator=generator)
    for index in range(sample_count):
        raw = torch.randn(KV_HEADS, n, DIM, generator=generator) * spread
        keys = raw @ basis + 6 * basis[:, :1]
        turned = torch.randn(heads, m, DIM, generator=generator)
        queries = turned * (0.3 + spread.flip(0)) @ basis.repeat_interleave(GROUP, 0) + offset
        positions = torch.randperm(n, generator=generator)[:m].sort().values
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {"keys": keys, "queries": queries, "positions": positions},
            folder / f"layer_000_sample_{index:03d}.safetensors",
        )
    meta = {
        "model": "cones",
        "layer_count": 1,
        "query_head_count": heads,
        "kv_head_count": KV_HEADS,
        "head_dim": DIM,
        "sample_count": sample_count,
        "token_count": n,
    }
    (folder / "traces.json").write_text(json.dumps(meta))
    return Traces.open(folder)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return make_traces(tmp_path_factory.mktemp("traces"))


def test_the_loss_is_the_mean_over_pairs() -> None:
    generator = torch.Generator().manual_seed(1)
    n, share, alpha, beta = 40, 0.1, 3.0, 0.5
    visible = torch.tensor([40, 25, 9])
    keys = torch.randn(1, n, 4, generator=generator)
    queries = torch.randn(1, 2, 3, 4, generator=generator)
    scores = true_scores(queries, keys, visible)
    estimates = torch.randn(1, 2, 3, n, generator=generator) * 4
    means = []
    for g in range(2):
        for t, seen in enumerate(visible.tolist()):
            order = scores[0, g, t, :seen].argsort(descending=True)
            k = math.ceil(share * seen)
            top, other = estimates[0, g, t, order[:k]], estimates[0, g, t, order[k:]]
            pairs = torch.sigmoid(beta * (top[:, None] - other[None]) - alpha)
            means.append(-pairs.log().mean())
    drawn = ranking_loss(
        estimates,
        scores,
        visible,
        share=share,
        top_sample_count=400,
        other_sample_count=800,
        alpha=alpha,
        beta=beta,
        generator=generator,
    )
    assert drawn == pytest.approx(float(torch.stack(means).mean()), rel=0.02)


def test_the_soft_sign() -> None:
    y = torch.tensor([-2.0, -0.01, 0.0, 0.01, 2.0])
    torch.testing.assert_close(softsign(y, 64.0), 64 * y / (1 + 64 * y.abs()))


@pytest.mark.parametrize("bits", [32, 4])
def test_intersection_over_union(bits: int) -> None:
    """Compared with sets. Few bits give many ties, and of these the newest tokens are taken."""
    generator = torch.Generator().manual_seed(bits)
    n, share = 300, 0.05
    visible = torch.tensor([300, 61, 1, 20])
    keys = torch.randn(2, n, 8, generator=generator)
    queries = torch.randn(2, 3, 4, 8, generator=generator)
    scores = true_scores(queries, keys, visible)
    key_bits = torch.rand(2, n, bits, generator=generator) > 0.5
    query_bits = torch.rand(2, 3, 4, bits, generator=generator) > 0.5
    found = intersection_over_union(key_bits, query_bits, scores, visible, share)
    for h in range(2):
        for g in range(3):
            for t, seen in enumerate(visible.tolist()):
                k = int(top_counts(visible[t], share))
                matches = (key_bits[h, :seen] == query_bits[h, g, t]).sum(-1).tolist()
                taken = set(sorted(range(seen), key=lambda i: (matches[i], i))[-k:])
                wanted = set(scores[h, g, t, :seen].topk(k).indices.tolist())
                assert found[h, g, t] == pytest.approx(len(taken & wanted) / len(taken | wanted))


@pytest.mark.parametrize("per_query_head", SHAPES)
def test_training_finds_more_than_hyperplanes(traces: Traces, per_query_head: bool) -> None:
    training = Training(hash_bits=64, step_count=200, judge_every=50, per_query_head=per_query_head)
    seen: list[int] = []
    function, result = train_layer(
        traces, 0, training, torch.device("cpu"), lambda step, loss, iou: seen.append(step)
    )
    assert seen[-1] == result.step_count
    assert len(result.iou) == len(result.lsh_iou) == KV_HEADS * GROUP
    assert result.gain > 1.25, result
    assert function.w1.shape == (KV_HEADS * (GROUP if per_query_head else 1), DIM, DIM)
    # Training is deterministic.
    again = train_layer(traces, 0, training, torch.device("cpu"))[1]
    assert again.iou == result.iou


def test_training_ends_where_nothing_is_gained(traces: Traces) -> None:
    training = Training(
        hash_bits=32, step_count=1000, judge_every=5, patience=2, learning_rate=0.0, weight_decay=0
    )
    _, result = train_layer(traces, 0, training, torch.device("cpu"))
    assert (result.best_step, result.step_count) == (0, 10)


@pytest.mark.parametrize("per_query_head", SHAPES)
@pytest.mark.parametrize("raw_keys", [False, True])
def test_the_daemon_ranks_by_the_codes_that_were_trained(
    client: spillway_kv.Client, traces: Traces, tmp_path: Path, per_query_head: bool, raw_keys: bool
) -> None:
    training = Training(
        hash_bits=64, step_count=20, per_query_head=per_query_head, raw_keys=raw_keys
    )
    function, _ = train_layer(traces, 0, training, torch.device("cpu"))
    path = tmp_path / "hash.safetensors"
    described = spillway_kv.MlpHash(64, DIM, False, per_query_head, raw_keys)
    save_hash(path, function.tensors(0), 1, described)
    assert describe_hash(path) == described
    model = client.create_model(
        layer_count=1,
        query_head_count=KV_HEADS * GROUP,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
        hash_weights=describe_hash(path),
    )
    client.upload_hash_weights(model, path)
    sample = traces.sample(0, 0, torch.device("cpu"))
    n, count = sample.keys.shape[1], 40
    sequence = client.create_sequence(model)
    sequence.append(0, 0, sample.keys.numpy(), torch.zeros_like(sample.keys).numpy())
    q = sample.queries[:, -1]
    policy = Policy(
        selector="hamming",
        heavy=TopK(count=count),
        tail="none",
        dense_token_count=1024,
        sink_token_count=0,
        window_token_count=1,
    )
    selection = sequence.select(0, q[None].numpy(), policy)

    keys = sample.keys.double()
    if not raw_keys:
        keys = keys - keys[:, :CENTRE_TOKEN_COUNT].mean(1, keepdim=True)
    exact = function.double()
    grouped = q.double().unflatten(0, (KV_HEADS, GROUP))
    with torch.no_grad():
        if per_query_head:
            bits = exact(keys.repeat_interleave(GROUP, 0)).unflatten(0, (KV_HEADS, GROUP)) > 0
            query_bits = exact(grouped.flatten(0, 1)[:, None]).unflatten(0, (KV_HEADS, GROUP)) > 0
            matches = (bits == query_bits).sum((1, 3))
        else:
            matches = (exact(keys)[:, None] > 0).eq(exact(grouped)[:, :, None] > 0).sum((1, 3))
    for h in range(KV_HEADS):
        scores = matches[h, : n - 1].tolist()  # the last token is the window
        wanted = set(sorted(range(n - 1), key=lambda i: (scores[i], i))[-count:])
        rows = slice(int(selection.offsets[h]), int(selection.offsets[h + 1]))
        heavy = set(selection.indices[rows][selection.strata[rows] == 2].tolist())
        assert len(heavy) == count
        # A bit may differ if a sum is close to 0.
        assert len(heavy & wanted) >= count - 2
    delete_model(client, model)


def test_spotlights_checkpoints(tmp_path: Path) -> None:
    """The published form: z = SiLU(x P1 + c1) + x, y = z P2 + c2 + z."""
    generator = torch.Generator().manual_seed(5)
    heads, dim, layers = 4, 32, 2
    shapes = [(1, heads, dim, dim), (1, heads, 1, dim)] * 2
    parts = [torch.randn(s, generator=generator) for _ in range(layers) for s in shapes]
    path = tmp_path / "spotlight.pth"
    torch.save([part.bfloat16() for part in parts], path)
    tensors, described = import_spotlight(path, layers)
    assert described == spillway_kv.MlpHash(dim, dim, True, per_query_head=True, raw_keys=True)
    x = torch.randn(heads, 5, dim, generator=generator)
    p1, c1, p2, c2 = (part.bfloat16().float()[0] for part in parts[4:])
    z = torch.nn.functional.silu(x @ p1 + c1) + x
    w1, b1, w2, b2 = (tensors[f"layers.1.{name}"] for name in ("w1", "b1", "w2", "b2"))
    function = HashMlp(w1, b1, w2, b2, residual=True)
    torch.testing.assert_close(function(x), z @ p2 + c2 + z)
    with pytest.raises(ValueError, match="has 8 tensors, and 3 layers need 12"):
        import_spotlight(path, 3)
    torch.save(parts[:-1] + [parts[0]], path)
    with pytest.raises(ValueError, match="tensor 7 is"):
        import_spotlight(path, layers)
    torch.save({"layers": parts[0]}, path)
    with pytest.raises(ValueError, match="not a list"):
        import_spotlight(path, layers)


def test_hatas_layers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(2, 32, 64, generator=generator) for _ in range(3)]
    for layer, weight in enumerate(weights):
        torch.save(weight, tmp_path / f"hash_weight_layer_{layer:02d}.pt")
    tensors, layer_count, described = import_hata(tmp_path)
    assert layer_count == 3
    assert described == spillway_kv.MlpHash(64, 64, raw_keys=True)
    x = torch.randn(2, 7, 32, generator=generator)
    w1, b1, w2 = (tensors[f"layers.2.{name}"] for name in ("w1", "b1", "w2"))
    function = HashMlp(w1, b1, w2)
    torch.testing.assert_close(function(x), x @ weights[2], rtol=1e-4, atol=1e-4)
    (tmp_path / "hash_weight_layer_01.pt").unlink()
    with pytest.raises(ValueError, match=r"hash_weight_layer_00\.pt and those that follow"):
        import_hata(tmp_path)


def test_a_file_with_a_layer_missing(tmp_path: Path) -> None:
    function = HashMlp(torch.ones(1, 32, 32), torch.zeros(1, 32), torch.ones(1, 32, 32))
    with pytest.raises(ValueError, match=r"layers without weights: \[0, 2\]"):
        save_hash(tmp_path / "hash.safetensors", function.tensors(1), 3, spillway_kv.MlpHash())
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not describe its hash"):
        describe_hash(tmp_path / "other.safetensors")


def train(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `spillway-lab train-hash`."""
    return subprocess.run(
        [sys.executable, "-m", "spillway_kv.lab.cli", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a random Llama and its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, num_hidden_layers=3, max_position_embeddings=512)
    text = folder / "text.txt"
    text.write_text(" ".join(WORDS[i] for i in draw_words(1500)))
    return folder, text


def test_the_command_goes_on_where_it_was(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = tiny
    output = tmp_path / "hash.safetensors"
    words: list[str | Path] = [
        *("train-hash", folder, text, "--output", output, "--tokens", "256", "--device", "cpu"),
        *("--steps", "6", "--judge-every", "3", "--hash-bits", "32", "--hidden", "8"),
    ]
    first = train(*words, "--layers", "0,2")
    assert first.returncode == 0, first.stderr
    assert "waits for layers 1" in first.stdout
    assert not output.exists()
    kept = (tmp_path / "hash.safetensors.parts/layer_002.json").read_text()
    second = train(*words)
    assert second.returncode == 0, second.stderr
    assert "Written" in second.stdout
    assert not (tmp_path / "hash.safetensors.parts").exists()
    assert describe_hash(output) == spillway_kv.MlpHash(32, 8)
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["sample_count"] == 5
    assert report["held_out_count"] == 1
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2]
    assert report["layers"][2]["seconds"] == json.loads(kept)["seconds"]


def test_the_command_trains_hashattention(
    tiny: tuple[Path, Path], tmp_path: Path, client: spillway_kv.Client
) -> None:
    folder, text = tiny
    output = tmp_path / "hash.safetensors"
    made = train(
        *("train-hash", folder, text, "--output", output, "--tokens", "256", "--device", "cpu"),
        *("--steps", "6", "--judge-every", "3", "--method", "hashattention"),
    )
    assert made.returncode == 0, made.stderr
    described = describe_hash(output)
    assert described == spillway_kv.MlpHash(
        hash_bits=32,
        hidden_dim=128,
        per_query_head=True,
        raw_keys=True,
        hidden_layer_count=2,
        query_weights=True,
    )
    model = client.create_model(
        layer_count=3, query_head_count=4, kv_head_count=2, head_dim=16, hash_weights=described
    )
    assert client.upload_hash_weights(model, output).ready
    delete_model(client, model)


def test_classification_tells_the_top_from_the_others(traces: Traces) -> None:
    training = Training(
        method="hashattention",
        hash_bits=32,
        hidden_dim=64,
        per_query_head=True,
        raw_keys=True,
        step_count=60,
        learning_rate=3e-3,
    )
    _, result = train_layer(traces, 0, training, torch.device("cpu"))
    assert sum(result.iou) > 2 * sum(result.lsh_iou)


def test_the_command_says_what_is_wrong(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = tiny
    words = ("train-hash", folder, text, "--output", tmp_path / "x.safetensors", "--steps", "1")
    traces = ("--traces", tmp_path / "traces", "--tokens", "256")

    def refused(*more: str | Path) -> str:
        done = train(*words, *more)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    assert "33 is not a multiple of 32" in refused("--hash-bits", "33")
    assert "1500 tokens are 1 segments of 1024" in refused("--tokens", "1024")
    assert "layers 1-3 are not in [0, 2]" in refused(*traces, "--layers", "1-3")
    assert "layers 2-1 are not in [0, 2]" in refused(*traces, "--layers", "0,2-1")
    assert "'1-' is neither a layer" in refused(*traces, "--layers", "1-")
    assert "traces made with other options" in refused(*traces[:2], "--tokens", "300")
    missing = train("train-hash", folder, tmp_path / "none.txt", "--output", tmp_path / "x")
    assert missing.returncode == 2
    assert "does not exist" in missing.stderr
    wrong = train("import-hash", "hata", tmp_path, "--output", tmp_path / "x")
    assert wrong.returncode == 2
    assert "hash_weight_layer_00.pt" in wrong.stderr
