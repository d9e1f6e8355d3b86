"""A sequence in parts gives the same bits as a whole sequence on one daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from helpers import step as step_of_one
from local_cluster import LocalCluster, local_cluster
from random_llama import generate, llama, prompt
from spillway_kv import torch as spillway_torch
from spillway_kv._native import Carrier
from spillway_kv.at_once import AttendsAtOnce
from spillway_kv.cluster import ClusterClient
from spillway_kv.transformers import SpillwayCache

LAYERS, KV_HEADS, GROUP, DIM = 3, 3, 2, 64
TOKENS = 6000
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": KV_HEADS * GROUP,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "float32",
}
POLICY = spillway_kv.Policy(dense_token_count=1024, dense_layers=[2])


def rows(seed: int, *shape: int) -> np.ndarray:
    """Keys of different lengths, of which few are near a query."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * random.exponential(1, (*shape[:-1], 1))).astype("f4")


K = rows(1, LAYERS, KV_HEADS, TOKENS, DIM)
V = rows(2, LAYERS, KV_HEADS, TOKENS, DIM)
Q = rows(3, 2, KV_HEADS * GROUP, DIM)


class Pair:
    """The same sequence, whole on one daemon and split."""

    def __init__(
        self,
        one: spillway_kv.Client,
        many: ClusterClient,
        sinks: np.ndarray | None,
        **options: Any,
    ) -> None:
        self.clients: list[Any] = [one, many]
        self.models = [
            client.create_model(**SHAPES, policy=POLICY, sink_logits=sinks, **options)
            for client in self.clients
        ]
        self.one, self.many = (
            client.create_sequence(model)
            for client, model in zip(self.clients, self.models, strict=True)
        )
        for sequence in (self.one, self.many):
            sequence.append(0, 0, K, V)

    def delete(self) -> None:
        for sequence in (self.one, self.many):
            sequence.delete()
        for client, model in zip(self.clients, self.models, strict=True):
            client.delete_model(model)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three daemons with one folder of snapshots. Whole sequences are on the first."""
    folder = tmp_path_factory.mktemp("cluster")
    flags = ("--memory-limit", "512MiB", "--snapshot-folder", str(folder / "snapshots"))
    with local_cluster(folder, 3, *flags) as made:
        yield made


@pytest.fixture(scope="module")
def target(cluster: LocalCluster) -> str:
    """Target of a daemon."""
    return str(cluster.directory.daemon("daemon-0").target)


# Two daemons share the heads as 2 + 1, three have one each, or two daemons share the layers.
@pytest.fixture(
    scope="module",
    params=[
        "heads of 2",
        "heads of 2, value codes",
        "heads of 3",
        "layers",
        "heads of 2, sinks",
        "layers, sinks",
        "heads of 2, rows of 8 bits",
    ],
)
def pair(request: pytest.FixtureRequest, cluster: LocalCluster, target: str) -> Iterator[Pair]:
    count = 3 if request.param == "heads of 3" else 2
    groups = 2 if "layers" in request.param else 1
    sinks = None
    if "sinks" in request.param:
        # The log-sum-exps of the rows are about 8 and more.
        sinks = np.linspace(3, 14, LAYERS * KV_HEADS * GROUP).reshape(LAYERS, KV_HEADS * GROUP)
    options: dict[str, Any] = {}
    if "value codes" in request.param:
        options["hash_weights"] = spillway_kv.RotationHash(value_bits=2)
    if "rows of 8 bits" in request.param:
        options["row_type"] = "int8"
    with spillway_kv.connect(target) as one, cluster.connect(count, groups) as many:
        made = Pair(one, many, sinks, **options)
        whole, parts = made.models
        assert parts.row_type == whole.row_type == options.get("row_type", "model")
        assert parts.row_bytes_per_token == whole.row_bytes_per_token
        assert parts.sink_logits == whole.sink_logits
        assert many.get_model(parts.name).sink_logits == whole.sink_logits
        yield made
        made.delete()
        assert not [s for c in many.clients for s in c.list_sequences()]


def expect_same(whole: Any, parts: Any) -> None:
    assert np.array_equal(whole.out, parts.out)
    assert np.array_equal(whole.lse, parts.lse)
    assert np.array_equal(whole.touched_row_counts, parts.touched_row_counts)
    for name in (
        "visible_token_counts",
        "heavy_token_counts",
        "sampled_token_counts",
        "relative_errors",
        "promises",
    ):
        a, b = getattr(whole.certificate, name), getattr(parts.certificate, name)
        assert np.array_equal(a, b), name
    tails = whole.certificate.tail_masses, parts.certificate.tail_masses
    assert np.array_equal(*tails, equal_nan=True)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_attend(pair: Pair, layer: int) -> None:
    whole, parts = pair.one.attend(layer, Q), pair.many.attend(layer, Q)
    expect_same(whole, parts)
    # Only the last layer is dense.
    assert (whole.certificate.promises == "exact").all() == (layer == 2)
    assert whole.certificate.sampled_token_counts.any() == (layer != 2)


# Of 18 query heads for each KV head, groups of nine are attended.
def test_many_query_heads(cluster: LocalCluster, target: str) -> None:
    shapes = {**SHAPES, "query_head_count": 18 * KV_HEADS}
    q = rows(4, 2, 18 * KV_HEADS, DIM)
    with spillway_kv.connect(target) as one, cluster.connect(2, 1) as many:
        clients: list[Any] = [one, many]
        models = [client.create_model(**shapes, policy=POLICY) for client in clients]
        whole, parts = (c.create_sequence(m) for c, m in zip(clients, models, strict=True))
        for sequence in (whole, parts):
            sequence.append(0, 0, K, V)
        a, b = (sequence.attend(0, q) for sequence in (whole, parts))
        assert a.touched_row_counts.shape == (2, 2 * KV_HEADS)
        expect_same(a, b)
        chosen, of_parts = (sequence.select(0, q[:1]) for sequence in (whole, parts))
        assert chosen.offsets.shape == (2 * KV_HEADS + 1,)
        for name in ("offsets", "indices", "log_weights", "strata"):
            assert np.array_equal(getattr(chosen, name), getattr(of_parts, name)), name
        fetched = [np.stack(sequence.fetch(0, selection=chosen)) for sequence in (whole, parts)]
        assert np.array_equal(fetched[0], fetched[1])
        # The second group of the second KV head.
        place = slice(chosen.offsets[3], chosen.offsets[4])
        assert np.array_equal(fetched[1][0, place], K[0, 1, chosen.indices[place]])
        for sequence in (whole, parts):
            sequence.delete()
        for client, model in zip(clients, models, strict=True):
            client.delete_model(model)


def test_a_policy_that_names_layers_names_those_of_the_whole(pair: Pair) -> None:
    policy = spillway_kv.Policy(dense_layers=[1])
    for layer, dense in ((0, False), (1, True), (2, False)):
        whole, parts = (s.attend(layer, Q, policy) for s in (pair.one, pair.many))
        expect_same(whole, parts)
        assert (parts.certificate.promises == "exact").all() == dense


def test_what_queries_see(pair: Pair) -> None:
    expect_same(*(s.attend(0, Q, visible=[4000, 5000]) for s in (pair.one, pair.many)))


def test_torch(pair: Pair) -> None:
    q = torch.from_numpy(Q).to(torch.bfloat16)
    whole, parts = pair.one.attend(0, q), pair.many.attend(0, q)
    assert parts.out.dtype == torch.bfloat16
    assert torch.equal(whole.out, parts.out)
    assert torch.equal(whole.lse, parts.lse)


def test_the_torch_operator(pair: Pair) -> None:
    q = torch.from_numpy(Q[None, :1])
    k, v = (torch.from_numpy(rows(seed, 1, KV_HEADS, 1, DIM)) for seed in (11, 12))
    slot = spillway_torch.Slot()
    answers = []
    for client, whole in zip(pair.clients, (pair.one, pair.many), strict=True):
        fork = whole.fork()
        with client.begin_step([fork]) as step:
            slot.enter(step)
            answers.append(spillway_torch.attend(slot.tensor, 0, q, k, v))
        fork.delete()
    for one, many in zip(*answers, strict=True):
        assert torch.equal(one, many)


def test_select_and_fetch(pair: Pair) -> None:
    whole, parts = (s.select(1, Q[:1]) for s in (pair.one, pair.many))
    for name in ("offsets", "indices", "log_weights", "strata"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name)), name
    assert parts.certificate is not None
    assert whole.certificate is not None
    assert np.array_equal(whole.certificate.relative_errors, parts.certificate.relative_errors)
    of_one, of_many = (np.stack(s.fetch(1, 100, 300)) for s in (pair.one, pair.many))
    assert np.array_equal(of_one, of_many)
    if pair.models[0].row_type == "model":
        assert np.array_equal(of_many, np.stack((K[1], V[1]))[:, :, 100:300])
    chosen = [s.fetch(1, selection=whole) for s in (pair.one, pair.many)]
    assert np.array_equal(chosen[0][0], chosen[1][0])
    assert np.array_equal(chosen[0][1], chosen[1][1])


def test_steps_and_truncation(pair: Pair) -> None:
    forks = pair.one.fork(), pair.many.fork()
    k, v = rows(7, LAYERS, 1, KV_HEADS, 2, DIM), rows(8, LAYERS, 1, KV_HEADS, 2, DIM)
    answers: list[list[Any]] = [[], []]
    for i, (client, fork) in enumerate(zip(pair.clients, forks, strict=True)):
        with client.begin_step([fork], token_count=2) as step:
            for layer in range(LAYERS):
                out, lse = step.attend(layer, Q[None], k[layer], v[layer])
                (result,) = step.results()
                assert np.array_equal(out[0], result.out)
                assert np.array_equal(lse[0], result.lse)
                answers[i].append(result)
        # Steps of one layer each.
        for layer in range(LAYERS):
            for t in range(2):
                new = k[layer, 0, :, t : t + 1], v[layer, 0, :, t : t + 1]
                answers[i].append(step_of_one(fork, layer, Q[:1], *new, client=client))
        assert fork.layer_token_counts == (TOKENS + 4,) * LAYERS
        assert fork.truncate(TOKENS + 1).token_count == TOKENS + 1
        answers[i].append(fork.attend(0, Q))
        with pytest.raises(spillway_kv.OutOfRange, match=f"token_count {TOKENS + 2}|{TOKENS + 2}"):
            fork.truncate(TOKENS + 2)
        assert fork.refresh().layer_token_counts == (TOKENS + 1,) * LAYERS
        fork.delete()
        with pytest.raises(spillway_kv.NotFound):
            fork.delete()
    for whole, parts in zip(*answers, strict=True):
        expect_same(whole, parts)


def test_a_step_of_elements_by_their_bits(pair: Pair) -> None:
    q = spillway_kv.BFloat16.from_float32(Q[None, :1])
    k, v = rows(9, 1, KV_HEADS, 1, DIM), rows(10, 1, KV_HEADS, 1, DIM)
    outs = []
    for client, whole in zip(pair.clients, (pair.one, pair.many), strict=True):
        fork = whole.fork()
        with client.begin_step([fork]) as step:
            outs.append(step.attend(0, q, k, v)[0].bits)
        fork.delete()
    assert np.array_equal(*outs)


def test_what_is_named_is_found(pair: Pair) -> None:
    client = pair.clients[1]
    assert not list(client.list_sequences())
    named = pair.many.fork("kept")
    (info,) = client.list_sequences(pair.models[1])
    assert (info.name, info.token_count, info.named) == ("sequences/kept", TOKENS, True)
    assert info.layer_token_counts == (TOKENS,) * LAYERS
    found = client.get_sequence("sequences/kept")
    expect_same(pair.one.attend(0, Q), found.attend(0, Q))
    assert found.keep().row_bytes == info.row_bytes > 0
    named.delete()
    with pytest.raises(spillway_kv.NotFound):
        client.get_sequence("sequences/kept")


def test_what_is_saved_loads_again(pair: Pair) -> None:
    saved = pair.many.save("split/one", client_data=b"mine")
    assert saved.token_count == TOKENS
    assert saved.byte_count >= TOKENS * pair.models[0].row_bytes_per_token
    client = pair.clients[1]
    loaded, data = client.load_sequence("split/one", model=pair.models[1])
    assert data == b"mine"
    expect_same(pair.one.attend(1, Q), loaded.attend(1, Q))
    loaded.delete()


def test_a_step_that_failed_on_one_daemon_may_be_repeated(pair: Pair) -> None:
    fork = pair.many.fork()
    k, v = rows(7, 1, KV_HEADS, 1, DIM), rows(8, 1, KV_HEADS, 1, DIM)
    # The first daemon already has this step, as if the answers of the others had been lost.
    part = fork.parts[0]
    heads = slice(part.share.kv_heads.start, part.share.kv_heads.stop)
    part.sequence.append(0, TOKENS, k[0, heads], v[0, heads])
    assert fork.token_count == TOKENS
    whole = pair.one.fork()
    outs = []
    for client, sequence in zip(pair.clients, (whole, fork), strict=True):
        with client.begin_step([sequence]) as step:
            outs.append(step.attend(0, Q[None, :1], k, v)[0])
        sequence.delete()
    assert np.array_equal(*outs)


def test_errors_are_of_the_daemon_and_name_the_layer(pair: Pair) -> None:
    with pytest.raises(spillway_kv.InvalidArgument, match=r"layer: value 3 is not in \[0, 2\]"):
        pair.many.attend(3, Q)
    with pytest.raises(spillway_kv.InvalidArgument, match="not the model's 3 KV heads"):
        pair.many.append(0, TOKENS, K[0, :2, :1], V[0, :2, :1])
    with pytest.raises(spillway_kv.OutOfRange):
        pair.many.append(0, TOKENS + 5, K[:, :, :1], V[:, :, :1])
    assert pair.many.refresh().token_count == TOKENS


def test_what_cannot_be_split_is_refused(cluster: LocalCluster) -> None:
    few = {**SHAPES, "kv_head_count": 1, "query_head_count": 2}
    with cluster.connect(2) as client:
        with pytest.raises(ValueError, match="2 daemons cannot share 1 KV heads"):
            client.create_model(**few)
        # The daemon of the second part refuses. That of the first must not keep its part.
        before = [(each, each.create_model("taken.1of2", **SHAPES)) for each in client.clients]
        with pytest.raises(spillway_kv.AlreadyExists):
            client.create_model("taken", **SHAPES)
        for each, model in before:
            assert [m.name for m in each.list_models() if "taken" in m.name] == [model.name]
            each.delete_model(model)


def test_transformers_decode_as_with_one_daemon(cluster: LocalCluster) -> None:
    dense, spilled = llama(), llama()
    spilled.set_attn_implementation("spillway")
    ids = prompt(1, 40)
    expected = generate(dense, ids)
    with (
        cluster.connect(2) as client,
        SpillwayCache(spilled.config, client) as cache,  # type: ignore[arg-type]
    ):
        assert torch.equal(generate(spilled, ids, cache), expected)
        fork = cache.fork()
        assert fork.get_seq_length() == cache.get_seq_length()
        fork.close()


@pytest.mark.parametrize("by", ["doorbell", "messages", "one call each"])
@pytest.mark.parametrize(("count", "tokens"), [(1, 1), (2, 3)])
def test_a_step_by_whatever_leads_to_the_daemons(
    cluster: LocalCluster,
    target: str,
    by: str,
    count: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs are written in place if one call reaches all daemons, and else put together."""

    def connect(to: str) -> spillway_kv.Client:
        client = spillway_kv.connect(to)
        if by == "messages":
            client.connection.carrier = Carrier.MESSAGES
        return client

    if by == "one call each":
        monkeypatch.setattr(AttendsAtOnce, "possible", lambda _: False)
    q = rows(5, count, tokens, KV_HEADS * GROUP, DIM)
    k, v = (rows(seed, count, KV_HEADS, tokens, DIM) for seed in (6, 7))
    with spillway_kv.connect(target) as one, cluster.connect(3, connect=connect) as many:
        answers = []
        pair: list[Any] = [one, many]
        for client in pair:
            model = client.create_model(**SHAPES, policy=POLICY)
            sequences = [client.create_sequence(model) for _ in range(count)]
            for sequence in sequences:
                sequence.append(0, 0, K[:, :, :1500], V[:, :, :1500])
            with client.begin_step(sequences, token_count=tokens) as step:
                made = [(*step.attend(layer, q, k, v), step.results()) for layer in range(LAYERS)]
                answers.append(made)
                if client is many:
                    assert (step._last_at_once is None) == (by == "one call each")
            with client.begin_step(sequences, token_count=tokens) as step:
                with pytest.raises(ValueError, match="k has shape"):
                    step.attend(0, q, k[:, 1:], v)
            for sequence in sequences:
                sequence.delete()
            client.delete_model(model)
    for whole, parts in zip(*answers, strict=True):
        assert np.array_equal(whole[0], parts[0])
        assert np.array_equal(whole[1], parts[1])
        for a, b in zip(whole[2], parts[2], strict=True):
            expect_same(a, b)
