"""generate() with beams and samples: tokens and K/V keep the same rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import spillway_kv
import torch
from interrupts import Interrupted
from random_llama import llama, prompt
from spillway_kv import Client
from spillway_kv.transformers import SpillwayCache, TokenMismatchError, generate
from spillway_kv.transformers.generation import follow
from test_sliding_layers import qwen
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

pytestmark = pytest.mark.transports("embedded")
GREEDY = {"do_sample": False, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def dense() -> Any:
    """The model with transformers' own attention."""
    return llama(2)


@pytest.fixture(scope="module")
def spilled() -> Any:
    """The same model with Spillway's attention."""
    model = llama(2)
    model.set_attn_implementation("spillway")
    return model


def padded(count: int) -> torch.Tensor:
    """Prompts of 40 tokens. The first of several has 12 positions of padding."""
    ids = prompt(count, 40)
    if count > 1:
        ids[0, :12] = 0
    return ids


def answers(dense: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    """What transformers generates with its own attention and cache."""
    torch.manual_seed(3)
    mask = (ids != 0).long()
    made: torch.Tensor = dense.generate(ids, past_key_values=cache, attention_mask=mask, **options)
    return made


def of_cache(model: Any, cache: SpillwayCache, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the same call generates with Spillway."""
    torch.manual_seed(3)
    made: torch.Tensor = generate(model, cache, ids, attention_mask=(ids != 0).long(), **options)
    return made


def check_rows(cache: SpillwayCache, answer: torch.Tensor) -> None:
    """The tokens of each row, in the cache and in the daemon, are those of the answer's row."""
    assert cache.batch_size == len(answer)
    for row, (known, padding) in enumerate(zip(cache.tokens, cache.paddings, strict=True)):
        assert known == answer[row, padding : cache.length].tolist()
        assert cache.sequences[row].refresh().token_count == len(known)


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("beams", [2, 4])
def test_turns_of_beams(
    client: Client, dense: Any, spilled: Any, folder: str, prompts: int, beams: int
) -> None:
    ids = padded(prompts)
    for returned in range(1, beams + 1):
        options = {**GREEDY, "num_beams": beams, "num_return_sequences": returned}
        first = answers(dense, ids, **options)
        turn = torch.cat([first, prompt(len(first), 5)], dim=1)
        # With beams for each row of the answer, or with none.
        options = options if returned == 1 else GREEDY
        second = answers(dense, turn, **options)
        with SpillwayCache(spilled.config, client) as cache:
            more = {"num_beams": beams, "num_return_sequences": returned}
            assert torch.equal(of_cache(spilled, cache, ids, **GREEDY, **more), first)
            check_rows(cache, first)
            assert cache.length >= 40
            cache.save(folder)
            assert torch.equal(of_cache(spilled, cache, turn, **options), second)
            check_rows(cache, second)
        with SpillwayCache.load(folder, spilled.config, client) as cache:
            check_rows(cache, first)
            if returned == beams:
                assert torch.equal(of_cache(spilled, cache, turn, **options), second)


@pytest.mark.transports("regions", "embedded")
@pytest.mark.parametrize("prompts", [1, 2])
def test_turns_of_samples(
    client: Client, dense: Any, spilled: Any, folder: str, prompts: int
) -> None:
    ids = padded(prompts)
    options = {"do_sample": True, "max_new_tokens": 5}
    own = DynamicCache(config=dense.config)
    first = answers(dense, ids, own, num_return_sequences=3, **options)
    turn = torch.cat([first, prompt(len(first), 5)], dim=1)
    second = answers(dense, turn, own, **options)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(of_cache(spilled, cache, ids, num_return_sequences=3, **options), first)
        check_rows(cache, first)
        assert cache.length == first.shape[1] - 1
        cache.save(folder)
        assert torch.equal(of_cache(spilled, cache, turn, **options), second)
        cache.batch_select_indices(torch.tensor([-1]))
        check_rows(cache, second[-1:])
        other = second.clone()
        other[-1, 41] += 1
        with pytest.raises(TokenMismatchError, match="position 41"):
            cache.check_tokens(other[-1:])
    with SpillwayCache.load(folder, spilled.config, client) as cache:
        check_rows(cache, first)
        assert torch.equal(of_cache(spilled, cache, turn, **options), second)


def test_beams_of_a_greedy_turn(client: Client, dense: Any, spilled: Any) -> None:
    """Rows are multiplied when a cache already has one for each prompt, or before."""
    ids = padded(2)
    first = answers(dense, ids, **GREEDY)
    expected = answers(dense, first, num_beams=3, **GREEDY)
    with SpillwayCache(spilled.config, client) as cache:
        of_cache(spilled, cache, ids, **GREEDY)
        with cache.fork() as fork:
            fork.batch_repeat_interleave(3)
            assert torch.equal(of_cache(spilled, fork, first, num_beams=3, **GREEDY), expected)
        # A call that fails before the model runs changes no rows.
        with pytest.raises(ValueError, match="num_return_sequences"):
            of_cache(spilled, cache, first, num_beams=3, num_return_sequences=4, **GREEDY)
        assert cache.batch_size == 2
        assert torch.equal(of_cache(spilled, cache, first, num_beams=3, **GREEDY), expected)
        check_rows(cache, expected)


def test_beams_that_end_early(client: Client, dense: Any, spilled: Any) -> None:
    """The K/V of a finished beam are cut to what the cache still has of it."""
    ids = padded(2)
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 16, "eos_token_id": list(range(2, 40))}
    first = answers(dense, ids, **options)
    assert first.shape[1] < 56
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(of_cache(spilled, cache, ids, **options), first)
        check_rows(cache, first)
        assert 40 <= cache.length < first.shape[1] - 1


def test_beams_that_a_window_has_lost(client: Client) -> None:
    """A layer with a sliding window cannot go back so far, so the cache is emptied."""
    model = qwen()
    model.set_attn_implementation("spillway")
    ids = prompt(1, 300)
    with SpillwayCache(model.config, client) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        cache.note_tokens(ids)
        follow(cache, ids, 1)
        assert cache.length == 300
        ids[0, 20] += 1
        follow(cache, ids, 1)
        assert cache.length == 0


def test_prompt_that_was_noted(client: Client, dense: Any, spilled: Any) -> None:
    """A direct call of model.generate multiplies the rows of tokens that were noted before."""
    ids = padded(2)
    options = {**GREEDY, "num_beams": 4}
    expected = answers(dense, ids, **options)
    with SpillwayCache(spilled.config, client) as cache:
        cache.note_tokens(ids)
        assert torch.equal(answers(spilled, ids, cache, **options), expected)
        rows = ids.repeat_interleave(4, dim=0)
        assert cache.tokens == [row[row != 0].tolist() for row in rows]
        with pytest.raises(ValueError, match="holds 8 rows, the ids have 2"):
            cache.note_tokens(ids)
        with pytest.raises(ValueError, match=r"shape \[40\]"):
            cache.note_tokens(ids[0])


def test_assisted_decoding(client: Client, dense: Any, spilled: Any, folder: str) -> None:
    ids = prompt(1, 20).repeat(1, 3)
    options = {**GREEDY, "max_new_tokens": 12, "prompt_lookup_num_tokens": 4}
    own = DynamicCache(config=dense.config)
    first = answers(dense, ids, own, **options)
    turn = torch.cat([first, prompt(1, 5)], dim=1)
    with SpillwayCache(spilled.config, client) as cache:
        assert torch.equal(of_cache(spilled, cache, ids, **options), first)
        check_rows(cache, first)
        cache.save(folder)
        expected = answers(dense, turn, own, **options)
        # Some versions, such as 5.17, give the tokens of earlier turns to the cache once more.
        if own.get_seq_length() == expected.shape[1] - 1:
            assert torch.equal(of_cache(spilled, cache, turn, **options), expected)
    with SpillwayCache.load(folder, spilled.config, client) as cache:
        check_rows(cache, first)


def state(cache: SpillwayCache) -> Any:
    """What a cache holds."""
    names = [sequence.name for sequence in cache.sequences]
    return names, cache.paddings, cache.tokens, cache.length, dict(cache.turns)


def test_operations_that_fail_change_nothing(
    client: Client, spilled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: spillway_kv.Sequence, *arguments: Any) -> Any:
        raise spillway_kv.ResourceExhausted("no room", code="RESOURCE_EXHAUSTED")

    with SpillwayCache(spilled.config, client) as cache:
        of_cache(spilled, cache, padded(2), **GREEDY)
        cache.mark("turn")
        before = state(cache)
        wrong: list[tuple[type[Exception], str, Callable[[], None]]] = [
            (IndexError, "no row 2", lambda: cache.reorder_cache(torch.tensor([0, 2]))),
            (IndexError, "no row -3", lambda: cache.batch_select_indices(torch.tensor([-3]))),
            (IndexError, r"\[3\]", lambda: cache.batch_select_indices(torch.ones(3) > 0)),
            (ValueError, "no row is", lambda: cache.batch_select_indices(torch.zeros(2) > 0)),
            (ValueError, "0 times", lambda: cache.batch_repeat_interleave(0)),
            (ValueError, "negative", lambda: cache.crop(1)),
        ]
        for kind, message, call in wrong:
            with pytest.raises(kind, match=message):
                call()
            assert state(cache) == before
        with monkeypatch.context() as patch:
            patch.setattr(spillway_kv.Sequence, "fork", fail)
            with pytest.raises(spillway_kv.ResourceExhausted):
                cache.reorder_cache(torch.tensor([1, 1]))
            assert state(cache) == before
        # A row that is gone already can be dropped.
        cache.sequences[0].delete()
        cache.batch_select_indices(torch.tensor([False, True]))
        assert cache.tokens == before[2][1:]
        assert cache.paddings == (0,)


def test_interrupted_selection(client: Client) -> None:
    """Ctrl-C leaves all rows as they were, or makes all as they should be."""
    model = qwen()
    model.set_attn_implementation("spillway")
    ids, new = prompt(2, 30), prompt(2, 1)

    def filled() -> SpillwayCache:
        cache = SpillwayCache(model.config, client)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.note_tokens(ids)
        return cache

    def logits(cache: SpillwayCache) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = model(new, past_key_values=cache).logits
        return made

    rows = {0: ids, 1: ids[[1, 1]]}
    expected = {}
    for state in rows:
        with filled() as cache:
            cache.reorder_cache(torch.tensor([state, 1]))
            expected[state] = logits(cache)
    seen = set()
    for line in itertools.count(0, 9):
        with filled() as cache:
            hit = Interrupted(line).run(lambda c=cache: c.reorder_cache(torch.tensor([1, 1])))  # type: ignore[misc]
            cache.crop(0)
            (state,) = (i for i, held in rows.items() if cache.tokens == held.tolist())
            assert torch.equal(logits(cache), expected[state]), line
            seen.add((hit, state))
        if not hit:
            break
    assert seen == {(True, 0), (True, 1), (False, 1)}


class Noting(BaseStreamer):
    """Notes what generate() streams."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamers(client: Client, dense: Any, spilled: Any) -> None:
    ids = padded(1)
    wanted = answers(dense, ids, **GREEDY)
    streamer = Noting()
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        of_cache(spilled, cache, ids, streamer=streamer, **GREEDY)
    assert streamer.tokens == wanted[0].tolist()
    assert streamer.ended


def test_embeddings_in_place_of_tokens(client: Client, dense: Any, spilled: Any) -> None:
    ids = padded(1)
    wanted = answers(dense, ids, **GREEDY)[:, 40:]
    embeddings = spilled.get_input_embeddings()(ids)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        made = spilled.generate(inputs_embeds=embeddings, past_key_values=cache, **GREEDY)
        assert cache.length == 44
    assert torch.equal(made, wanted)


def test_a_loop_of_ones_own(client: Client, dense: Any, spilled: Any) -> None:
    ids = padded(1)
    wanted = answers(dense, ids, **GREEDY)

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Passed to generate() as custom_generate."""
        cache = kwargs.get("past_key_values") or kwargs["cache"]
        made = given = input_ids
        with torch.no_grad():
            for _ in range(GREEDY["max_new_tokens"]):
                logits = model(given, past_key_values=cache, use_cache=True).logits
                given = logits[:, -1:].argmax(-1)
                made = torch.cat([made, given], dim=1)
        return made

    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        assert torch.equal(loop(spilled, ids, past_key_values=cache), wanted)
    with SpillwayCache(spilled.config, client, quality="exact") as cache:
        made = generate(spilled, cache, ids, custom_generate=loop, max_new_tokens=5)
        assert torch.equal(made, wanted)


def test_weights_that_accelerate_moves(client: Client) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = llama(2)
    ids = padded(1)
    wanted = answers(model, ids, **GREEDY)
    accelerate.cpu_offload(model, execution_device=ids.device)
    model.set_attn_implementation("spillway")
    with SpillwayCache(model.config, client, quality="exact") as cache:
        assert torch.equal(of_cache(model, cache, ids, **GREEDY), wanted)


@pytest.mark.parametrize("implementation", ["static", "offloaded"])
def test_another_cache_beside_this_one(client: Client, spilled: Any, implementation: str) -> None:
    with SpillwayCache(spilled.config, client) as cache:
        with pytest.raises(ValueError, match="cache_implementation"):
            of_cache(spilled, cache, padded(1), cache_implementation=implementation, **GREEDY)
        assert cache.length == 0


def test_no_use_of_the_cache(client: Client, spilled: Any) -> None:
    with SpillwayCache(spilled.config, client) as cache:
        with pytest.raises(ValueError, match="use_cache is False"):
            of_cache(spilled, cache, padded(1), use_cache=False, **GREEDY)
        assert cache.length == 0
