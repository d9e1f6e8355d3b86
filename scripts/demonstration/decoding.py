"""Runs the model, with any attention and cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from spillway_kv.transformers import cache_argument
from transformers import TextStreamer

NEW_TOKEN_COUNT_MAX = 96


class ConsoleStreamer(TextStreamer):
    """Prints the answer while it is generated, without the prompt."""

    def __init__(
        self, tokenizer: Any, console: Console, on_token: Callable[[int], None] | None
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = console
        self._on_token = on_token
        # -1, because the first call of `put` has the prompt.
        self._number = -1

    def put(self, value: Any) -> None:
        """Takes the prompt, and then each token."""
        super().put(value)
        if self._on_token is not None and self._number >= 0:
            self._on_token(self._number)
        self._number += 1

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Prints the next part of the text."""
        self._console.print(
            text, end="\n" if stream_end else "", style="green", markup=False, highlight=False
        )


def progress_of(console: Console, what: str) -> Progress:
    """A progress bar."""
    columns = (TextColumn(f"  {what:9}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@torch.inference_mode()
def prefill(model: Any, cache: Any, tokens: torch.Tensor, console: Console) -> float:
    """Reads tokens [n] into the cache, with a progress bar; returns the seconds."""
    layers = model.get_decoder().layers
    with progress_of(console, "reading") as progress:
        task = progress.add_task("", total=len(layers))
        hooks = [layer.register_forward_hook(lambda *_: progress.advance(task)) for layer in layers]
        try:
            start = time.perf_counter()
            # Copy the result to the host, because otherwise a GPU may still be computing.
            model(input_ids=tokens[None], **cache_argument(cache), logits_to_keep=1).logits.cpu()
            return time.perf_counter() - start
        finally:
            for hook in hooks:
                hook.remove()


@torch.inference_mode()
def answer(
    model: Any,
    cache: Any,
    tokenizer: Any,
    tokens: torch.Tensor,
    console: Console,
    on_token: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Generates greedily after the prompt [n]. The cache must hold all its tokens but the last.

    Prints the answer while it is generated, and returns its tokens. Calls `on_token` at each token,
    with its number.
    """
    made = model.generate(
        input_ids=tokens[None],
        attention_mask=torch.ones_like(tokens[None]),
        **cache_argument(cache),
        max_new_tokens=NEW_TOKEN_COUNT_MAX,
        do_sample=False,
        streamer=ConsoleStreamer(tokenizer, console, on_token),
    )
    return made[0, len(tokens) :].cpu()


@torch.inference_mode()
def forced_steps(
    model: Any,
    cache: Any,
    tokens: torch.Tensor,
    start: int,
    count: int,
    console: Console,
    what: str = "decoding",
) -> tuple[torch.Tensor, float]:
    """Decodes the given tokens [n] one by one, from the position `start` on.

    First drops everything from this position on from the cache.

    Returns:
        Logits [count, vocabulary] after each token, on the host, and the seconds.
    """
    cache.crop(start - cache.get_seq_length())
    logits = []
    begin = time.perf_counter()
    with progress_of(console, what) as progress:
        for token in progress.track(tokens[start : start + count], description=""):
            logits.append(model(input_ids=token[None, None], **cache_argument(cache)).logits[0, -1])
    made = torch.stack(logits).cpu()
    return made, time.perf_counter() - begin
