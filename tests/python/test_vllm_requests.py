"""The plugin's scheduler side: prefixes, kept sequences, plans, losses."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from spillway_kv.vllm.prefixes import Match, Prefixes, block_hashes
from spillway_kv.vllm.requests import Requests, Scheduled
from spillway_kv.vllm.step_plan import Loss, PlannedRequest, Source, StepReport


def _tokens(*parts: tuple[int, int]) -> list[int]:
    """A list of tokens from pairs (token, count)."""
    return [token for token, count in parts for _ in range(count)]


def _added(prefixes: Prefixes, key: int, tokens: list[int], rows: int, running: bool) -> None:
    prefixes.add(key, block_hashes("", tokens))
    prefixes.set_rows(key, rows, running=running)


def test_hashes_cover_all_before() -> None:
    """Hashes differ for equal blocks after different ones, and for other salts."""
    some = block_hashes("", _tokens((1, 64), (2, 64), (3, 63)))
    assert len(some) == 2
    assert block_hashes("", _tokens((1, 64), (2, 64))) == some
    assert block_hashes("", _tokens((9, 64), (2, 64)))[1] != some[1]
    assert block_hashes("adapter", _tokens((1, 64)))[0] != some[0]
    assert block_hashes("", _tokens((1, 63))) == []
    longer = _tokens((1, 64), (2, 64), (3, 64))
    assert block_hashes("", longer, some) == block_hashes("", longer)
    assert block_hashes("", longer)[:2] == some


def test_the_longest_rows_are_matched() -> None:
    """The best of several that begin alike. Computed and coming tokens are counted separately."""
    prefixes = Prefixes(4)
    prompt = _tokens((1, 64), (2, 64), (3, 64), (4, 64))
    _added(prefixes, 1, prompt, 70, running=True)
    _added(prefixes, 2, _tokens((1, 64), (2, 64)), 128, running=False)
    _added(prefixes, 3, _tokens((5, 300)), 300, running=False)
    _added(prefixes, 4, prompt, 0, running=False)
    # Of its own 256 tokens, it may reuse 255.
    assert prefixes.match(4, 255) == Match(key=2, token_count=128, coming=192)
    prefixes.forget(1)
    assert prefixes.match(4, 255) == Match(key=2, token_count=128, coming=128)
    assert prefixes.match(4, 127) == Match(key=2, token_count=64, coming=64)
    assert prefixes.match(4, 63) is None
    assert prefixes.match(3, 299) is None


def test_rows_in_part_are_matched_in_part() -> None:
    """If 100 tokens of a sequence are computed, 64 are matched."""
    prefixes = Prefixes(4)
    prompt = _tokens((1, 256))
    _added(prefixes, 1, prompt, 100, running=True)
    _added(prefixes, 2, prompt, 0, running=False)
    assert prefixes.match(2, 255) == Match(key=1, token_count=64, coming=192)


def test_the_oldest_kept_goes() -> None:
    """The oldest goes if there are more than the limit. Recently used ones stay longer."""
    prefixes = Prefixes(2)
    for key in (1, 2):
        tokens = _tokens((key, 128))
        _added(prefixes, key, tokens, 128, running=True)
        assert prefixes.keep(key, block_hashes("", tokens), 128) == []
    prefixes.use(1)
    third = _tokens((3, 128))
    _added(prefixes, 3, third, 128, running=True)
    assert prefixes.keep(3, block_hashes("", third), 128) == [2]
    assert prefixes.kept == [1, 3]


def test_a_longer_one_takes_the_place_of_its_beginning() -> None:
    """After a chat's next turn, the turn before is not kept, and in the other order neither."""
    prefixes = Prefixes(8)
    turn, chat = _tokens((1, 128)), _tokens((1, 128), (2, 64))
    _added(prefixes, 1, turn, 128, running=True)
    assert prefixes.keep(1, block_hashes("", turn), 128) == []
    _added(prefixes, 2, chat, 192, running=True)
    assert prefixes.keep(2, block_hashes("", chat), 192) == [1]
    _added(prefixes, 3, turn, 128, running=True)
    assert prefixes.keep(3, block_hashes("", turn), 128) == [3]
    assert prefixes.kept == [2]


def test_too_short_or_not_wanted_is_not_kept() -> None:
    """A sequence shorter than a block is not kept, and none is if the limit is 0."""
    prefixes = Prefixes(1)
    _added(prefixes, 1, _tokens((1, 128)), 63, running=True)
    assert prefixes.keep(1, block_hashes("", _tokens((1, 128))), 63) == [1]
    none = Prefixes(0)
    _added(none, 1, _tokens((1, 128)), 128, running=True)
    assert none.keep(1, block_hashes("", _tokens((1, 128))), 128) == [1]
    assert len(prefixes) == len(none) == 0


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "rows", "keep", "forget", "use"]),
        st.integers(0, 5),
        st.integers(0, 4),
        st.integers(0, 300),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(_STEPS)
def test_matches_are_always_equal_tokens(steps: list[tuple[str, int, int, int]]) -> None:
    """Compared with a model that compares tokens one by one."""
    prefixes = Prefixes(2)
    texts = [_tokens((1, 64 * n), (2 + n, 100)) for n in range(5)]
    live: dict[int, tuple[list[int], int]] = {}
    kept: dict[int, tuple[list[int], int]] = {}
    for what, key, text, rows in steps:
        here = live.get(key)
        if what == "add" and key not in live and key not in kept:
            prefixes.add(key, block_hashes("", texts[text]))
            live[key] = texts[text], 0
        elif what == "rows" and here is not None:
            live[key] = here[0], min(rows, len(here[0]))
            prefixes.set_rows(key, live[key][1], running=True)
        elif what == "keep" and here is not None:
            dropped = prefixes.keep(key, block_hashes("", here[0]), here[1])
            kept[key] = live.pop(key)
            for gone in dropped:
                kept.pop(gone)
            assert len(kept) <= 2
        elif what == "forget":
            prefixes.forget(key)
            live.pop(key, None)
            kept.pop(key, None)
        else:
            prefixes.use(key)
        assert set(prefixes.kept) == set(kept)
        for asking, (tokens, _) in live.items():
            match = prefixes.match(asking, len(tokens) - 1)
            others = {**live, **kept}
            del others[asking]
            expected = 0
            for theirs, there in others.values():
                equal = next(
                    (i for i, (a, b) in enumerate(zip(tokens, theirs, strict=False)) if a != b),
                    min(len(tokens), len(theirs)),
                )
                expected = max(expected, min(equal, there, len(tokens) - 1) // 64 * 64)
            assert (match.token_count if match is not None else 0) == expected


def test_a_request_from_arrival_to_its_end() -> None:
    """Chunks of its prompt, a decode step, and the sequence that is kept."""
    requests = Requests(4)
    prompt = list(range(200))
    requests.add("a", prompt, 200, "")
    assert requests.matched("a", 200, others_running=False) == 0
    plan = requests.plan([Scheduled("a", 0, 128, block=7)], [])
    assert plan.requests == [
        PlannedRequest(1, 0, 0, 128, decodes=False, block=7, name="a", prompt_token_count=200)
    ]
    plan = requests.plan([Scheduled("a", 128, 72, block=8)], [])
    assert plan.requests == [
        PlannedRequest(1, 0, 128, 72, decodes=False, block=8, name="a", prompt_token_count=200)
    ]
    plan = requests.plan([Scheduled("a", 200, 1, block=9)], [])
    assert plan.requests == [
        PlannedRequest(1, 0, 200, 1, decodes=True, block=9, name="a", prompt_token_count=200)
    ]
    requests.finish("a", [*prompt, 5, 6])
    assert requests.kept == [1]
    requests.add("b", prompt, 200, "")
    assert requests.matched("b", 200, others_running=False) == 192
    plan = requests.plan([Scheduled("b", 192, 8, block=3)], [])
    assert plan.kept == [1]
    assert plan.requests == [PlannedRequest(2, 0, 192, 8, False, 3, Source(1, 192), "b", 200)]
    assert requests.reused_token_count == 192


def test_the_last_prompt_token_alone_is_no_decode_step() -> None:
    """The last token of a prompt is attended exactly, like the rest of the prompt."""
    requests = Requests(4)
    requests.add("a", [1] * 65, 65, "")
    plan = requests.plan([Scheduled("a", 64, 1, block=1)], [])
    assert not plan.requests[0].decodes


def test_what_is_on_its_way_is_waited_for() -> None:
    """Waits only while another request computes the tokens, and only if this is worthwhile."""
    requests = Requests(4)
    prompt = list(range(1000))
    requests.add("a", prompt, 1000, "")
    requests.plan([Scheduled("a", 0, 256, block=1)], [])
    requests.add("b", prompt, 1000, "")
    assert requests.matched("b", 1000, others_running=True) is None
    requests.plan([Scheduled("a", 256, 600, block=2)], [])
    # 832 of 960 tokens are there.
    assert requests.matched("b", 1000, others_running=True) is None
    requests.plan([Scheduled("a", 856, 60, block=2)], [])
    assert requests.matched("b", 1000, others_running=True) == 896
    requests.plan([], ["a"])
    assert requests.matched("b", 1000, others_running=False) == 896


def test_a_preempted_request_has_its_own_rows() -> None:
    """All rows but that of its newest token, whose output gives the next token."""
    requests = Requests(0)
    requests.add("a", [1, 2, 3], 3, "")
    requests.plan([Scheduled("a", 0, 3, block=1)], [])
    requests.plan([Scheduled("a", 3, 1, block=1)], [])
    requests.plan([], ["a"])
    assert requests.matched("a", 5, others_running=True) == 4
    plan = requests.plan([Scheduled("a", 4, 1, block=6)], [])
    assert plan.requests == [
        PlannedRequest(1, 0, 4, 1, decodes=True, block=6, name="a", prompt_token_count=3)
    ]


def test_one_token_at_least_is_computed() -> None:
    """Its output gives the next token, even if the rows of all tokens are there."""
    requests, prompt = with_a_finished_request()
    requests.add("b", prompt, 128, "")
    assert requests.matched("b", 128, others_running=False) == 64
    plan = requests.plan([Scheduled("b", 64, 64, block=1)], [])
    assert plan.requests[0].source == Source(1, 64)
    requests.plan([], ["b"])
    assert requests.matched("b", 128, others_running=False) == 127
    assert requests.matched("b", 129, others_running=False) == 128


def test_what_tokens_do_not_tell_is_not_shared() -> None:
    """Prompts with images, other adapters, and models whose other layers have state."""
    requests = Requests(4)
    prompt = list(range(200))
    requests.add("image", None, 200, "")
    requests.plan([Scheduled("image", 0, 200, block=1)], [])
    requests.finish("image", None)
    requests.add("adapter", prompt, 200, "lora")
    requests.plan([Scheduled("adapter", 0, 200, block=1)], [])
    requests.add("plain", prompt, 200, "")
    assert requests.matched("plain", 200, others_running=True) == 0
    hybrid = Requests(4, reuses=False)
    for name in ("a", "b"):
        hybrid.add(name, prompt, 200, "")
    hybrid.plan([Scheduled("a", 0, 200, block=1)], [])
    assert hybrid.matched("b", 200, others_running=True) == 0
    hybrid.finish("a", prompt)
    assert hybrid.plan([], []).dropped == [1]


def test_what_other_layers_keep_of_a_preempted_request_is_gone() -> None:
    """So the request is computed again from its first token, though its rows are still there."""
    hybrid = Requests(4, reuses=False)
    hybrid.add("a", list(range(200)), 200, "")
    hybrid.plan([Scheduled("a", 0, 200, block=1)], [])
    hybrid.plan([Scheduled("a", 200, 1, block=1)], [])
    hybrid.plan([], ["a"])
    assert hybrid.matched("a", 201, others_running=False) == 0
    (again,) = hybrid.plan([Scheduled("a", 0, 201, block=2)], []).requests
    assert (again.start, again.token_count, again.epoch, again.decodes) == (0, 201, 0, False)


def test_losses() -> None:
    """Lost requests are computed again; if memory lacked, after another ends. Alone, they fail."""
    requests = Requests(4)
    for name in ("a", "b"):
        requests.add(name, [1, 2, 3], 3, "")
    requests.plan([Scheduled("a", 0, 3, block=1), Scheduled("b", 0, 3, block=2)], [])
    report = StepReport(losses={1: Loss(0, "again", "gone"), 2: Loss(0, "memory", "memory")})
    assert requests.take_report(report, 2) == (["a", "b"], [])
    # A second report of a step that was in flight is ignored, because its epoch is over.
    assert requests.take_report(report, 2) == ([], [])
    assert requests.matched("a", 3, others_running=False) == 0
    plan = requests.plan([Scheduled("a", 0, 3, block=4)], [])
    assert plan.dropped == [1, 2]
    assert plan.requests == [
        PlannedRequest(1, 1, 0, 3, decodes=False, block=4, name="a", prompt_token_count=3)
    ]
    assert requests.matched("b", 3, others_running=True) is None
    requests.finish("a", [1, 2, 3, 4])
    assert requests.matched("b", 3, others_running=True) == 0
    requests.plan([Scheduled("b", 0, 3, block=5)], [])
    alone = StepReport(losses={2: Loss(1, "memory", "memory")})
    assert requests.take_report(alone, 1) == ([], ["b"])


def with_a_finished_request() -> tuple[Requests, list[int]]:
    """Requests of which one has finished and is kept with key 1, and its prompt."""
    requests = Requests(4)
    prompt = list(range(128))
    requests.add("a", prompt, 128, "")
    requests.plan([Scheduled("a", 0, 128, block=1)], [])
    requests.finish("a", prompt)
    return requests, prompt


def test_kept_ones_that_made_room_are_forgotten() -> None:
    """They are dropped on the other ranks too."""
    requests, prompt = with_a_finished_request()
    requests.take_report(StepReport(gone={1}), 0)
    requests.add("b", prompt, 128, "")
    assert requests.matched("b", 128, others_running=False) == 0
    assert requests.plan([], []).dropped == [1]


def test_a_finished_request_whose_rows_were_lost_is_not_kept() -> None:
    """Its client goes away during the step that loses its rows. The report comes later."""
    requests, prompt = with_a_finished_request()
    report = StepReport(losses={1: Loss(0, "memory", "memory")})
    assert requests.take_report(report, 0) == ([], [])
    assert requests.kept == []
    requests.add("b", prompt, 128, "")
    assert requests.matched("b", 128, others_running=False) == 0
    assert requests.plan([], []).dropped == [1]


def test_a_running_request_whose_sequence_has_disappeared() -> None:
    """Another request was to begin with its rows. Both are computed again."""
    requests = Requests(4)
    prompt = list(range(128))
    requests.add("a", prompt, 128, "")
    requests.plan([Scheduled("a", 0, 128, block=1)], [])
    requests.add("b", [*prompt, 7], 129, "")
    assert requests.matched("b", 129, others_running=True) == 128
    plan = requests.plan([Scheduled("a", 128, 1, block=2), Scheduled("b", 128, 1, block=3)], [])
    assert plan.requests[1].source == Source(1, 128)
    lost = Loss(0, "again", "gone")
    assert requests.take_report(StepReport({1: lost, 2: lost}, {1}), 2) == (["a", "b"], [])
    assert requests.matched("a", 129, others_running=False) == 0
    plan = requests.plan([Scheduled("a", 0, 129, block=4)], [])
    assert plan.dropped == [1, 2]
    assert plan.requests == [
        PlannedRequest(1, 1, 0, 129, decodes=False, block=4, name="a", prompt_token_count=128)
    ]
    # The report of a step that was in flight comes late. It does not take the new rows away.
    assert requests.take_report(StepReport({1: lost, 2: lost}, {1}), 1) == ([], [])
    assert requests.matched("b", 129, others_running=True) == 128
    assert requests.plan([Scheduled("b", 128, 1, block=5)], []).dropped == []


def test_a_waiting_request_whose_sequence_has_disappeared() -> None:
    """It was preempted, and has no rows any more. No other request begins with them."""
    requests = Requests(4)
    prompt = list(range(128))
    requests.add("a", prompt, 128, "")
    requests.plan([Scheduled("a", 0, 128, block=1)], [])
    requests.add("b", [*prompt, 7], 129, "")
    assert requests.matched("b", 129, others_running=True) == 128
    requests.plan([Scheduled("b", 128, 1, block=2)], ["a"])
    report = StepReport({2: Loss(0, "again", "gone")}, {1})
    assert requests.take_report(report, 1) == (["b"], [])
    assert requests.matched("a", 129, others_running=False) == 0
    assert requests.matched("b", 129, others_running=False) == 0


def test_a_request_does_not_fail_because_all_kept_sequences_have_disappeared() -> None:
    """It tries eight of them, and is then computed from its first token."""
    requests = Requests(32)
    system = list(range(64))
    for key in range(1, 33):
        prompt = [*system, *[1000 + key] * 64]
        requests.add(f"kept {key}", prompt, 128, "")
        requests.plan([Scheduled(f"kept {key}", 0, 128, block=1)], [])
        requests.finish(f"kept {key}", prompt)
    assert len(requests.kept) == 32
    requests.add("a", [*system, *[7] * 64], 128, "")
    for epoch in range(8):
        assert requests.matched("a", 128, others_running=False) == 64
        (planned,) = requests.plan([Scheduled("a", 64, 64, block=2)], []).requests
        assert planned.source is not None
        report = StepReport({33: Loss(epoch, "again", "gone")}, {planned.source.key})
        assert requests.take_report(report, 1) == (["a"], [])
    assert requests.matched("a", 128, others_running=False) == 0


def test_drafts() -> None:
    """They decode as one token does. The rows of rejected ones are not kept."""
    requests = Requests(4)
    prompt = list(range(100))
    requests.add("a", prompt, 100, "")
    requests.plan([Scheduled("a", 0, 100, block=1)], [])
    # One token and three drafts, of which two are right; then another three, which are all wrong.
    (planned,) = requests.plan([Scheduled("a", 100, 4, block=2, draft_count=3)], []).requests
    assert planned == PlannedRequest(
        1, 0, 100, 4, decodes=True, block=2, name="a", prompt_token_count=100
    )
    (planned,) = requests.plan([Scheduled("a", 127, 4, block=2, draft_count=3)], []).requests
    assert planned.decodes
    # The tokens end with the one that was taken instead of the first draft.
    requests.finish("a", [*prompt, *range(200, 228), 7])
    requests.add("b", [*prompt, *range(200, 228), 7, 8], 130, "")
    assert requests.matched("b", 130, others_running=False) == 128
    requests.finish("b", None)
    # Of 128 tokens, the row of the last one is a draft's.
    requests.add("c", [9] * 70, 70, "")
    requests.plan([Scheduled("c", 0, 70, block=1)], [])
    requests.plan([Scheduled("c", 126, 4, block=2, draft_count=3)], [])
    requests.finish("c", [9] * 128)
    requests.add("d", [9] * 140, 140, "")
    assert requests.matched("d", 140, others_running=False) == 64
    # Several tokens without drafts, after the prompt, are not a decode step.
    requests.add("e", [5] * 10, 10, "")
    (planned,) = requests.plan([Scheduled("e", 12, 4, block=1)], []).requests
    assert not planned.decodes


def test_ranks_reports_are_one() -> None:
    """If one rank lacks memory, this counts."""
    report = StepReport({1: Loss(0, "again", "gone")}, {5})
    report.merge(StepReport({1: Loss(0, "memory", "memory"), 2: Loss(0, "again", "gone")}, {6}))
    assert report == StepReport(
        {1: Loss(0, "memory", "memory"), 2: Loss(0, "again", "gone")}, {5, 6}
    )


def test_what_fails_always_ends() -> None:
    """A request ends if the kind of its loss is "failed", or after 16 losses."""
    requests = Requests(4)
    for name in ("a", "b", "c"):
        requests.add(name, [1, 2, 3], 3, "")
    report = StepReport(losses={1: Loss(0, "failed", "K/V that are not finite")})
    assert requests.take_report(report, 3) == ([], ["a"])
    for epoch in range(16):
        report = StepReport(losses={2: Loss(epoch, "again", "gone")})
        assert requests.take_report(report, 2) == (["b"], [])
    report = StepReport(losses={2: Loss(16, "again", "gone")})
    assert requests.take_report(report, 2) == ([], ["b"])
