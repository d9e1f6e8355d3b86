"""A model of random q, k and v that the plugin's worker attends, and what it should answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from daemon_process import binary, device
from spillway_kv.lab import serving
from spillway_kv.policy import Policy
from spillway_kv.vllm.appends import Appends
from spillway_kv.vllm.prompt_rows import PromptRows
from spillway_kv.vllm.sequences import Shapes
from spillway_kv.vllm.settings import Settings
from spillway_kv.vllm.step_plan import PlannedRequest, StepPlan
from spillway_kv.vllm.worker import Worker

DEVICE = torch.device(device() or "cpu")
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SCALE = 0.3
SHAPES = Shapes(LAYERS, HEADS, KV_HEADS, DIM, torch.float32, SCALE)


class Model:
    """Random q, k and v for each (text, position, layer), and a worker that attends."""

    def __init__(
        self,
        memory: str = "64MiB",
        settings: Settings | None = None,
        sinks: list[torch.Tensor | None] | None = None,
    ) -> None:
        """Starts a worker. sinks: logits [H] of each layer, or None."""
        serving.prefer_library(binary())
        settings = settings or Settings(memory=memory, device=str(DEVICE))
        self.sinks = sinks or []
        self.worker = Worker(settings, SHAPES, DEVICE, Policy(selector="all"), sinks=self.sinks)

    def append_later(self, later: bool, held_tokens: int = 0) -> None:
        """Whether prompts are appended later, as on a GPU, or at once.

        held_tokens: tokens of prompts in chunks that stay in the device's memory.
        """
        sequences = self.worker._sequences
        sequences._appends = Appends(LAYERS, sequences.patiently) if later else None
        sequences._prompt_rows = PromptRows(
            LAYERS,
            KV_HEADS,
            DIM,
            torch.float32,
            DEVICE,
            held_tokens * LAYERS * 2 * KV_HEADS * DIM * 4,
            lambda key: sequences._appends is not None and sequences._appends.reads(key),
        )

    @staticmethod
    def rows(text: int, position: int, layer: int) -> tuple[torch.Tensor, ...]:
        """q [H, d], k and v [H_kv, d]. Texts 100 and up have the first 96 tokens of text 0."""
        if text >= 100 and position < 96:
            text = 0
        draw = torch.Generator().manual_seed(text * 1_000_003 + position * 101 + layer)
        made = torch.randn(HEADS + 2 * KV_HEADS, DIM, generator=draw)
        return made[:HEADS], made[HEADS : HEADS + KV_HEADS], made[HEADS + KV_HEADS :]

    def step(self, plan: StepPlan, texts: dict[int, int]) -> tuple[Any, dict[int, torch.Tensor]]:
        """Runs a step of requests. texts: the text of each key.

        Returns:
            The report, and each request's outputs [layers, T, H, d].
        """
        begins, total = {}, 0
        for request in plan.requests:
            begins[request.key] = total
            total += request.token_count
        self.worker.begin(plan, begins)
        outs = torch.full((LAYERS, total, HEADS, DIM), float("nan"), device=DEVICE)
        for layer in range(LAYERS):
            rows = [
                self.rows(texts[request.key], request.start + i, layer)
                for request in plan.requests
                for i in range(request.token_count)
            ]
            q, k, v = (torch.stack([row[part] for row in rows]).to(DEVICE) for part in range(3))
            self.worker.attend(layer, q, k, v, outs[layer])
        report, outs = self.worker.end(), outs.cpu()
        return report, {
            request.key: outs[:, begins[request.key] : begins[request.key] + request.token_count]
            for request in plan.requests
        }

    def expected(self, text: int, start: int, count: int) -> torch.Tensor:
        """Outputs in double precision, [layers, T, H, d]."""
        made = torch.empty(LAYERS, count, HEADS, DIM)
        for layer in range(LAYERS):
            sinks = self.sinks[layer] if self.sinks else None
            rows = [self.rows(text, position, layer) for position in range(start + count)]
            for i in range(count):
                keys = torch.stack([row[1] for row in rows[: start + i + 1]]).double()
                values = torch.stack([row[2] for row in rows[: start + i + 1]]).double()
                for head in range(HEADS):
                    of = head // (HEADS // KV_HEADS)
                    logits = keys[:, of] @ rows[start + i][0][head].double() * SCALE
                    if sinks is not None:
                        logits = torch.cat([logits, sinks[head : head + 1].cpu().double()])
                    weights = logits.softmax(0)[: start + i + 1]
                    made[layer, i, head] = (weights @ values[:, of]).float()
        return made


class Varlen:
    """A kernel for several prompts, and its calls: ends of queries and keys, and the most of each.

    As vLLM's, it takes keys that have more elements than the last prompt has.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], int, int]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends: torch.Tensor,
        key_ends: torch.Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
        out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(q.shape[:2], device=q.device)
        queries, keys = ends.tolist(), key_ends.tolist()
        self.calls.append((queries, keys, longest, longest_keys))
        for (begin, end), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
            of_group = q.shape[1] // k.shape[1]
            seen = torch.ones(end - begin, last - first, device=q.device)
            seen = seen.tril(last - first - (end - begin)).bool()
            logits = torch.einsum(
                "thd,lhd->htl",
                q[begin:end].double(),
                k[first:last].double().repeat_interleave(of_group, 1),
            )
            logits = (logits * scale).masked_fill(~seen, -torch.inf)
            weights = logits.softmax(-1)
            lse[begin:end] = logits.logsumexp(-1).T.float()
            values = v[first:last].double().repeat_interleave(of_group, 1)
            out[begin:end] = torch.einsum("htl,lhd->thd", weights, values).to(out.dtype)
        return out, lse


def planned(key: int, start: int, count: int, **more: Any) -> PlannedRequest:
    """A request of a step. more: further attributes."""
    decodes = more.pop("decodes", count == 1)
    prompt = more.pop("prompt", 0)
    return PlannedRequest(
        key, more.pop("epoch", 0), start, count, decodes, key, prompt_token_count=prompt, **more
    )


def check(model: Model, outs: torch.Tensor, text: int, start: int) -> None:
    """Compares outputs [layers, T, H, d] of a text's tokens from `start` on."""
    torch.testing.assert_close(outs, model.expected(text, start, outs.shape[1]), rtol=0, atol=2e-5)
