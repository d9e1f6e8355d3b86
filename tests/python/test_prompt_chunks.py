"""All tokens of a prompt are attended exactly, in any chunks, and decoding is sparse.

Attends of layer 0 in the daemon are noted as (queries, whether all rows were read). Only forward
passes of at most 16 tokens use the daemon; others are attended in this process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from random_llama import generate, llama, prompt
from spillway_kv import Client, Policy, RotationHash, TopK
from spillway_kv.transformers import AttendEvent, SpillwayCache
from transformers import DynamicCache

# Of 1,100 or more tokens, it reads 64 + 64 + 16, so that sparse attends can be recognised.
SPARSE = Policy(dense_token_count=1024, heavy=TopK(count=16), tail="none")
EXACT = True
STEP = (1, not EXACT)


@pytest.fixture(scope="module")
def dense() -> Any:
    """The model with transformers' own attention."""
    return llama()


@pytest.fixture(scope="module")
def spilled() -> Any:
    """The same model with Spillway's attention."""
    model = llama()
    model.set_attn_implementation("spillway")
    return model


class Seen(list[tuple[int, bool]]):
    """The attends of layer 0, with their query counts and whether they read all rows."""

    def __call__(self, event: AttendEvent) -> None:
        """Notes an attend."""
        if event.layer > 0:
            return
        touched = event.result.touched_row_counts
        visible = event.result.certificate.visible_token_counts[:, :1]
        whole = bool((touched == visible).all())
        # 16 heavy tokens, the sink, and a window that may be longer by most of a page.
        assert whole or (touched <= 16 + 64 + 127).all()
        self.append((len(event.query), whole))


@contextmanager
def watched(client: Client, model: Any, **options: Any) -> Iterator[tuple[SpillwayCache, Seen]]:
    """A cache, and a list of its attends. SPARSE makes sparse and exact attends distinguishable."""
    seen = Seen()
    with SpillwayCache(model.config, client, policy=SPARSE, on_attend=seen, **options) as cache:
        yield cache, seen


@pytest.mark.parametrize(
    ("length", "chunk", "expected"),
    [
        (1200, None, [STEP, STEP, STEP]),
        (1210, 400, [(10, EXACT), (1, EXACT), STEP, STEP]),
        (1217, 400, [(1, EXACT), STEP, STEP]),
        (1202, 400, [(2, EXACT), (1, EXACT), STEP, STEP]),
        # The last chunk has one token.
        (1201, 400, [(1, EXACT), STEP, STEP, STEP]),
        # Here the prompt is complete before this token, but that looks like the case above.
        (1200, 400, [(1, EXACT), STEP, STEP]),
        (1120, 10, [(10, EXACT)] * 111 + [(1, EXACT), STEP, STEP]),
        # The second of two chunks has one token, like a first decode step.
        (1101, 1100, [STEP, STEP, STEP, STEP]),
        (1100, 1100, [STEP, STEP, STEP]),
    ],
)
def test_chunks(
    client: Client,
    spilled: Any,
    length: int,
    chunk: int | None,
    expected: list[tuple[int, bool]],
) -> None:
    ids = prompt(1, length)
    with watched(client, spilled) as (cache, seen):
        generate(spilled, ids, cache, prefill_chunk_size=chunk, max_new_tokens=4)
        assert seen == expected
        assert cache.sequences[0].token_count == length + 3


def test_chunks_are_exact_where_codes_answer_for_steps(client: Client, spilled: Any) -> None:
    seen: list[tuple[int, bool]] = []

    def note(event: AttendEvent) -> None:
        seen.append((len(event.query), bool((event.result.certificate.promises == "exact").all())))

    with SpillwayCache(
        spilled.config,
        client,
        policy=Policy(dense_token_count=1024, epsilon=0.3),
        hash_weights=RotationHash(value_bits=2),
        on_attend=note,
    ) as cache:
        generate(spilled, prompt(1, 1210), cache, prefill_chunk_size=400, max_new_tokens=4)
    layers = 3
    assert seen[: 2 * layers] == [(10, EXACT)] * layers + [(1, EXACT)] * layers
    assert seen[2 * layers :] == [STEP] * 2 * layers


@pytest.mark.parametrize("rest", [1, 2, 10, 16, 17])
def test_logits_after_a_short_chunk(client: Client, dense: Any, spilled: Any, rest: int) -> None:
    ids = prompt(1, 1200 + rest)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    expected: Any = generate(dense, ids, **options)
    with watched(client, spilled) as (cache, _):
        made: Any = generate(spilled, ids, cache, prefill_chunk_size=400, **options)
    torch.testing.assert_close(made.logits[0], expected.logits[0], rtol=1e-3, atol=1e-3)


def test_short_part_of_a_padded_row(client: Client, spilled: Any) -> None:
    ids = prompt(2, 1300)
    # The second row has 5 of the last chunk's 50 tokens.
    ids[1, :1295] = 0
    ids[0, :50] = 0
    with watched(client, spilled) as (cache, seen):
        generate(spilled, ids, cache, prefill_chunk_size=1250, max_new_tokens=3)
        assert seen == [(1, EXACT), (1, EXACT), STEP, (1, EXACT)]


@pytest.mark.parametrize("length", [1, 10, 30])
def test_second_turn(client: Client, spilled: Any, length: int) -> None:
    ids = prompt(1, 1200)
    with watched(client, spilled) as (cache, seen):
        first = generate(spilled, ids, cache, max_new_tokens=3)
        assert seen == [STEP, STEP]
        seen.clear()
        # The last token of the first turn is also new to the cache.
        turn = torch.cat([first, prompt(1, length)], dim=1)
        generate(spilled, turn, cache, max_new_tokens=3)
        first_part = [(length + 1, EXACT)] if length < 16 else []
        assert seen == [*first_part, STEP, STEP]


def test_continued_generation_is_no_prompt(client: Client, spilled: Any) -> None:
    with watched(client, spilled) as (cache, seen):
        first = generate(spilled, prompt(1, 1200), cache, max_new_tokens=3)
        generate(spilled, first, cache, max_new_tokens=3)
        assert seen == [STEP] * 5


def kinds(seen: Seen) -> set[bool]:
    """Whether all, some or none of the attends were exact."""
    return {exact for _, exact in seen}


def test_candidates_are_no_prompt(client: Client, spilled: Any) -> None:
    # Every continuation occurs earlier in the prompt.
    ids = prompt(1, 100).repeat(1, 12)
    assisted = {"prompt_lookup_num_tokens": 5}
    with watched(client, spilled) as (cache, seen):
        first = generate(spilled, ids, cache, max_new_tokens=20, **assisted)
        assert max(count for count, _ in seen) > 1
        assert kinds(seen) == {not EXACT}
        # The next turn is a prompt, even though generate() cropped the cache last.
        seen.clear()
        generate(spilled, torch.cat([first, prompt(1, 9)], dim=1), cache, max_new_tokens=3)
        assert seen == [(10, EXACT), STEP, STEP]


# In older versions, assisted decoding reads a non-empty cache's tokens once more.
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="not with this transformers"
)
def test_first_candidates_are_a_prompt(client: Client, spilled: Any) -> None:
    # Tokens that come with the first candidates of a turn are its prompt, and are attended in this
    # process.
    ids = prompt(1, 100).repeat(1, 12)
    with watched(client, spilled) as (cache, seen):
        first = generate(spilled, ids, cache, max_new_tokens=3)
        seen.clear()
        turn = torch.cat([first, prompt(1, 9)], dim=1)
        generate(spilled, turn, cache, max_new_tokens=20, prompt_lookup_num_tokens=5)
        assert kinds(seen) == {not EXACT}
        assert 1 < max(count for count, _ in seen) <= 6


def test_tokens_after_crop_are_a_prompt(client: Client, spilled: Any) -> None:
    ids = prompt(1, 1200)
    with watched(client, spilled) as (cache, seen), torch.no_grad():
        for count in (600, 300, 300):
            spilled(ids[:, :count], past_key_values=cache)
        cache.crop(-4)
        for count in (1, 3, 1):
            spilled(ids[:, :count], past_key_values=cache)
        assert seen == [STEP, (3, EXACT), STEP]


def test_fork_goes_on_with_the_prompt(client: Client, spilled: Any) -> None:
    ids = prompt(1, 1201)
    with watched(client, spilled) as (cache, _), torch.no_grad():
        for count in (600, 600):
            spilled(ids[:, :count], past_key_values=cache)
        seen = Seen()
        with copy.deepcopy(cache) as fork:
            fork.on_attend = seen
            for _ in range(2):
                spilled(ids[:, 1200:], past_key_values=fork)
        assert seen == [(1, EXACT), STEP]


def test_policy_of_requests(client: Client, spilled: Any) -> None:
    ids = prompt(1, 1200)
    with watched(client, spilled) as (cache, seen), torch.no_grad():
        cache.request_policy = SPARSE
        for count in (1190, 10, 1, 1):
            spilled(ids[:, :count], past_key_values=cache)
        assert seen == [(10, EXACT), (1, EXACT), STEP]


def test_own_cache_of_transformers_agrees(client: Client, dense: Any, spilled: Any) -> None:
    ids = prompt(2, 1230)
    ids[0, :70] = 0
    mask = (ids != 0).long()
    own = DynamicCache(config=dense.config)
    with watched(client, spilled) as (cache, _), torch.no_grad():
        for start, stop in ((0, 1200), (1200, 1207), (1207, 1229), (1229, 1230)):
            part = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
            position = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:stop]
            mine = spilled(**part, position_ids=position, past_key_values=cache).logits[:, -1]
            theirs = dense(**part, position_ids=position, past_key_values=own).logits[:, -1]
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
