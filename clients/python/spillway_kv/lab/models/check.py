"""Decodes with a tiny model and its own cache, and with a SpillwayCache, and compares."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from spillway_kv.client import Client
from spillway_kv.lab.models.tiny import (
    VOCABULARY,
    NotBuiltError,
    default_config,
    tiny_configs,
    tiny_model,
)
from spillway_kv.policy import Policy
from spillway_kv.transformers import AttendEvent, SpillwayCache, UnsupportedModelError
from spillway_kv.transformers.arguments import cache_argument
from spillway_kv.transformers.support import shapes_of

DELTA = 0.1
# Relative difference of logits that rounding explains in models that do not amplify it.
_ROUNDING = 1e-3
# Where models amplify it, two attention implementations of transformers differ by more. How many
# times their difference is allowed.
_OWN_TIMES = 4
# With more of the rows, hardly anything was left to the samples. Flat attention needs half of them.
_ROW_SHARE_MAX = 0.75
# Standard errors by which the share outside of the certificates may exceed delta.
_ERRORS = 3


class Verdict(Enum):
    """What a check has found."""

    SERVED = "served"
    WRONG = "wrong"
    REFUSED = "refused"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Scale:
    """What is decoded, and with which model.

    Attributes:
        prompt: Tokens of the prompt.
        new: Tokens that are generated with quality `exact`.
        forced: Tokens that are decoded with quality `default`; they are random.
        head_dim: Dimensions of a head, where the config has such a field.
        seed: Of the model's weights, the tokens and the samples.
    """

    prompt: int = 3000
    new: int = 64
    forced: int = 64
    head_dim: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Finding:
    """What is known of one architecture.

    Attributes:
        model_type: Its name in transformers.
        verdict: Whether it is served.
        words: Why not, what is wrong, or what the numbers do not say.
        changes: Fields of the config that differ from its defaults, apart from sizes.
        layer_count: Layers of the model.
        served_layer_count: Layers whose K/V are in the engine, and that were attended there.
        equal_tokens: Generated tokens before the first that differs from those of the own cache.
        logit_error: Largest relative difference of the logits of these tokens.
        chunk_error: The same for the first token, after a prompt in two chunks.
        own_error: The same between two of transformers' own attention implementations.
        row_share: Rows that were read with quality `default`, of all.
        outside: Outputs with an error above their certificate, of `output_count`.
        output_count: Outputs of quality `default` that were compared.
        seconds: How long the check took.
    """

    model_type: str
    verdict: Verdict
    words: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    layer_count: int = 0
    served_layer_count: int = 0
    equal_tokens: int = 0
    logit_error: float = 0
    chunk_error: float = 0
    own_error: float = 0
    row_share: float = 0
    outside: int = 0
    output_count: int = 0
    seconds: float = 0


def check(model_type: str, client: Client, scale: Scale) -> Finding:
    """Finds out whether an architecture is served right."""
    begin = time.perf_counter()
    refused = None
    try:
        for changes, config in tiny_configs(model_type, head_dim=scale.head_dim):
            try:
                shapes_of(config)
            except UnsupportedModelError as error:
                refused = refused or _refusal(error)
                continue
            found = _decode(tiny_model(config, scale.seed), client, scale)
            seconds = time.perf_counter() - begin
            return Finding(model_type, **found, changes=changes, seconds=seconds)
    except NotBuiltError as error:
        # If the default config is refused, nothing needs to be built.
        refused = refused or _refused_by_default(model_type)
        if refused is None:
            return Finding(model_type, Verdict.NOT_BUILT, str(error))
    assert refused is not None
    return Finding(model_type, Verdict.REFUSED, refused)


def _refused_by_default(model_type: str) -> str | None:
    try:
        shapes_of(default_config(model_type))
    except UnsupportedModelError as error:
        return _refusal(error)
    except NotBuiltError:
        pass
    return None


def _refusal(error: UnsupportedModelError) -> str:
    return str(error).partition(" cannot be served: ")[2] or str(error)


@torch.inference_mode()
def _decode(model: torch.nn.Module, client: Client, scale: Scale) -> dict[str, Any]:
    """What is found, by the names of Finding's fields."""
    generator = torch.Generator().manual_seed(scale.seed + 1)
    ids = torch.randint(3, VOCABULARY, (1, scale.prompt), generator=generator, device="cpu")
    found: dict[str, Any] = {}
    try:
        own = _generate(model, ids, scale.new, {})
        found["own_error"] = _own_error(model, ids, own)
    except Exception as error:
        words = f"its own forward pass ends in {type(error).__name__}: {error}"
        raise NotBuiltError(words[:160]) from error
    try:
        _set_attention(model, "spillway")
        with SpillwayCache(model, client, quality="exact") as cache:
            made = _generate(model, ids, scale.new, cache_argument(cache))
            attended = [each.visible_row_count > 0 for each in cache.statistics.layers]
            found |= {"layer_count": len(cache), "served_layer_count": sum(attended)}
        found["equal_tokens"], found["logit_error"] = _compare(made, own)
        found["chunk_error"], chunk_words = _in_chunks(model, client, ids, own[1][:1])
        outside = _Outside()
        with SpillwayCache(model, client, quality="default", on_attend=outside) as cache:
            given = cache_argument(cache)
            model(input_ids=ids, use_cache=True, **given)
            for _ in range(scale.forced):
                token = torch.randint(3, VOCABULARY, (1, 1), generator=generator, device="cpu")
                model(input_ids=token, use_cache=True, **given)
            found["row_share"] = cache.statistics.rows_touched_fraction
        found |= {"outside": outside.outside, "output_count": outside.count}
    except Exception as error:
        words = f"{type(error).__name__} while it decodes: {error}"
        return found | {"verdict": Verdict.WRONG, "words": words[:240]}
    if faults := _faults(found, attended, outside):
        return found | {"verdict": Verdict.WRONG, "words": "; ".join(faults)}
    words = chunk_words
    if found["own_error"] > _ROUNDING:
        words = f"logits of transformers' own attentions differ by {found['own_error']:.2g}"
    return found | {"verdict": Verdict.SERVED, "words": words}


def _in_chunks(
    model: Any, client: Client, ids: torch.Tensor, own: torch.Tensor
) -> tuple[float, str]:
    """The relative difference of the logits after a prompt in two chunks, or why it is refused."""
    half = ids.shape[1] // 2
    with SpillwayCache(model, client, quality="exact") as cache:
        more = {**cache_argument(cache), "prefill_chunk_size": half}
        try:
            _, made = _generate(model, ids, 1, more)
        except UnsupportedModelError:
            return 0.0, "no prompts in chunks and no later turns"
    return float((made - own).norm() / own.norm()), ""


def _faults(found: dict[str, Any], attended: list[bool], outside: _Outside) -> list[str]:
    faults = []
    allowed = max(_ROUNDING, _OWN_TIMES * found["own_error"])
    if found["logit_error"] > allowed:
        faults.append(f"logits differ by {found['logit_error']:.2g}")
    if found["chunk_error"] > allowed:
        faults.append(f"logits differ by {found['chunk_error']:.2g} after a prompt in two chunks")
    if not all(attended):
        faults.append(f"layers {[i for i, has in enumerate(attended) if not has]} did not attend")
    if found["row_share"] > _ROW_SHARE_MAX:
        faults.append(f"{found['row_share']:.0%} of the rows were read")
    share, error = outside.share()
    if share - _ERRORS * error > DELTA:
        faults.append(f"{share:.1%} of the outputs have larger errors than certified")
    return faults


class _Outside:
    """Counts outputs with an error above their certificate, by layer and head."""

    def __init__(self) -> None:
        self.by_head: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])

    def __call__(self, event: AttendEvent) -> None:
        exact = event.sequence.attend(event.layer, event.query, Policy(selector="all"))
        mine, right = (torch.as_tensor(x.out, device="cpu").float() for x in (event.result, exact))
        errors = (mine - right).norm(dim=-1) / right.norm(dim=-1)
        certified = torch.as_tensor(event.result.certificate.relative_errors, device="cpu")
        # Rounding: an exact output has a certificate of 0.
        above = (errors > certified + 1e-5).sum(0).tolist()
        for head, count in enumerate(above):
            of_head = self.by_head[event.layer, head]
            of_head[0] += count
            of_head[1] += len(errors)

    @property
    def outside(self) -> int:
        return sum(above for above, _ in self.by_head.values())

    @property
    def count(self) -> int:
        return sum(count for _, count in self.by_head.values())

    def share(self) -> tuple[float, float]:
        """The share, and its standard error if heads are independent and their steps are not."""
        shares = torch.tensor(
            [above / count for above, count in self.by_head.values()], device="cpu"
        )
        if len(shares) < 2:
            return float(shares.mean()) if len(shares) else 0.0, 1.0
        return float(shares.mean()), float(shares.std()) / len(shares) ** 0.5


def _set_attention(model: Any, name: str) -> None:
    if model.config.get_text_config(decoder=True) is model.config:
        model.set_attn_implementation(name)
    else:
        model.set_attn_implementation({"text_config": name})


def _generate(
    model: Any, ids: torch.Tensor, count: int, more: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens with those of the prompt [1, n], and the logits [count, V] that chose them."""
    made = model.generate(
        ids,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )
    return made.sequences, torch.cat(made.logits).float()


def _own_error(model: Any, ids: torch.Tensor, own: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The difference between `own` and the same with another attention, which the model keeps."""
    used = model.config.get_text_config(decoder=True)._attn_implementation
    try:
        _set_attention(model, "sdpa" if used == "eager" else "eager")
    except ValueError:
        return 0.0  # The model has only one.
    return _compare(_generate(model, ids, len(own[1]), {}), own)[1]


def _compare(
    mine: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> tuple[int, float]:
    """Tokens before the first that differs, and the largest relative difference of logits to it."""
    count = len(right[1])
    equal = int((mine[0] == right[0])[0, -count:].long().cumprod(0).sum())
    a, b = mine[1][: equal + 1], right[1][: equal + 1]
    return equal, float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
