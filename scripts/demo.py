"""Decodes a real document with a real model, through transformers and through Spillway.

Reads the document with transformers' own attention and then with Spillway's, answers the question
with both, and measures how accurate and how sparse Spillway's attention was. The engine runs in
this process. With --daemon it runs in spillwayd; --restart kills spillwayd between the prompt and
a second answer. With --cluster it runs in two daemons on two Ray nodes, which share the KV heads;
one of them is killed in the middle of a second answer.
Writes summary.json and report.png to build/demo.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import spillway_kv
import torch
import typer
from demonstration import decoding, document, engines, model, report
from demonstration.observation import Observer, worst_head
from rich.console import Console
from spillway_kv.transformers import SpillwayCache
from transformers import DynamicCache

ROOT = Path(__file__).resolve().parents[1]
# The number of tokens of the document after which both sides predict the next token.
FORCED_TOKEN_COUNT = 256
# Printed at the end.
NEXT = """
Next:
  make demo FILE=book.txt QUESTION='Who ...?'  your own document and question
  make demo DAEMON=1 RESTART=1                 a daemon, killed midway
  make wheels                                  to install: docs/quickstart.md"""
# How many attends of each layer are recomputed exactly.
RECOMPUTED_COUNT = 48


@dataclasses.dataclass
class Side:
    """The results with one kind of attention.

    Attributes:
        answer: Text of the answer.
        new_token_count: Tokens of the answer.
        logits: Logits after each forced token.
        tokens_per_second: Rate of the forced steps.
        prefill_seconds: Time to read the prompt.
    """

    answer: str
    new_token_count: int
    logits: torch.Tensor
    tokens_per_second: float
    prefill_seconds: float


def run_side(
    language_model: Any,
    tokenizer: Any,
    cache: Any,
    prompt: document.Prompt,
    console: Console,
    trouble: engines.Trouble | None = None,
) -> Side:
    """Reads the prompt, answers, and decodes the document's last tokens again.

    With `trouble`, it answers a second time, and the answers must be the same.
    """
    # The prompt's last token is left out, because it is the first that is decoded.
    seconds = decoding.prefill(language_model, cache, prompt.tokens[:-1], console)
    made = decoding.answer(language_model, cache, tokenizer, prompt.tokens, console)
    if trouble is not None:
        cache.crop(len(prompt.tokens) - 1 - cache.get_seq_length())
        trouble.before(console)
        again = decoding.answer(
            language_model, cache, tokenizer, prompt.tokens, console, trouble.on_token
        )
        if not torch.equal(again, made):
            console.print("[red]Not met:[/] the same answer after a restart")
            raise typer.Exit(1)
    logits, forced_seconds = decoding.forced_steps(
        language_model, cache, prompt.tokens, forced_start(prompt), FORCED_TOKEN_COUNT, console
    )
    return Side(
        answer=tokenizer.decode(made, skip_special_tokens=True).strip(),
        new_token_count=len(made),
        logits=logits,
        tokens_per_second=FORCED_TOKEN_COUNT / forced_seconds,
        prefill_seconds=seconds,
    )


def forced_start(prompt: document.Prompt) -> int:
    """Position of the first forced token. The last forced one predicts the document's last."""
    return prompt.document_end - 1 - FORCED_TOKEN_COUNT


def observe(
    language_model: Any,
    cache: SpillwayCache,
    prompt: document.Prompt,
    seed: int,
    console: Console,
) -> Observer:
    """Repeats the forced steps without timing, and recomputes a part of their attends exactly."""
    layer_count = language_model.config.num_hidden_layers
    observer = Observer(seed, layer_count, FORCED_TOKEN_COUNT, RECOMPUTED_COUNT)
    cache.on_attend = observer
    decoding.forced_steps(
        language_model,
        cache,
        prompt.tokens,
        forced_start(prompt),
        FORCED_TOKEN_COUNT,
        console,
        "checking",
    )
    cache.on_attend = None
    return observer


def summarize(
    prompt: document.Prompt,
    seed: int,
    dense: Side,
    sparse: Side,
    observer: Observer,
    daemon_model: spillway_kv.Model,
    device: str,
    info: spillway_kv.SequenceInfo,
) -> dict[str, Any]:
    """Collects the fields of summary.json."""

    def found(text: str) -> bool | None:
        return None if prompt.code_word is None else prompt.code_word in text

    policy = dataclasses.asdict(daemon_model.policy)
    policy |= {name: v for name, v in dataclasses.asdict(info.policy).items() if v is not None}
    observed = np.stack([np.stack(errors) for errors in observer.observed])
    certified = np.concatenate([np.concatenate(errors) for errors in observer.certified])
    finite = certified[np.isfinite(certified)]
    ratios = observer.certificate_ratios()
    fractions = np.stack([np.stack(steps) for steps in observer.fractions])
    beyond = observed > observer.epsilon
    known = ~np.isnan(ratios)
    dense_log, sparse_log = (
        torch.log_softmax(side.logits.double(), dim=-1) for side in (dense, sparse)
    )
    agreement = (dense.logits.argmax(dim=-1) == sparse.logits.argmax(dim=-1)).double().mean()
    divergence = (dense_log.exp() * (dense_log - sparse_log)).sum(dim=-1).mean()
    return {
        "model": model.NAME,
        "context_tokens": len(prompt.tokens),
        "new_tokens": sparse.new_token_count,
        "policy": policy,
        "dense_answer": dense.answer,
        "answer": sparse.answer,
        "needle_found": found(sparse.answer),
        "dense_needle_found": found(dense.answer),
        "rows_touched_fraction": float(fractions.mean()),
        "epsilon": observer.epsilon,
        "delta": observer.delta,
        # Over the certificates that have an error; uncertified_count says how many have none.
        "certified_error_mean": float(finite.mean()),
        "observed_error_mean": float(observed.mean()),
        "observed_violation_fraction": float(beyond.mean()),
        # Only over outputs whose certificate has an error that can be exceeded.
        "certificate_exceeded_fraction": report.exceeded_fraction(ratios),
        "certificate_exceeded_worst": worst_head(ratios > 1, known),
        "certificate_count": int(known.sum()),
        "top1_agreement": float(agreement),
        "top1_tokens": FORCED_TOKEN_COUNT,
        "dense_tokens_per_second": dense.tokens_per_second,
        "tokens_per_second": sparse.tokens_per_second,
        "kv_bytes_host": info.row_bytes,
        "index_bytes": info.index_bytes,
        "seed": seed,
        "document": prompt.source.name,
        "document_cut": prompt.cut,
        "question": prompt.question,
        "code_word": prompt.code_word,
        "kl_divergence_mean": float(divergence),
        "dense_prefill_seconds": dense.prefill_seconds,
        "prefill_seconds": sparse.prefill_seconds,
        "rows_touched_fraction_by_layer": fractions.mean(axis=(1, 2)).tolist(),
        "observed_count": observed.size,
        "observed_violation_worst": worst_head(beyond, np.ones_like(beyond)),
        "uncertified_count": certified.size - finite.size,
        "promises": observer.promises,
        "device": device,
        "processor": processor_name(),
        "core_count": len(os.sched_getaffinity(0)),
        "torch_thread_count": torch.get_num_threads(),
    }


def processor_name() -> str:
    """The processor's name, as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


@contextmanager
def engine(
    device: str, daemon: bool, restart: bool, cluster: bool, output: Path, console: Console
) -> Iterator[tuple[Any, engines.Trouble | None]]:
    """Yields a client of the engine, daemon or cluster, and what happens to it, if anything."""
    if cluster:
        with engines.cluster(ROOT, device, output / "cluster", console) as made:
            yield made
    elif daemon:
        with engines.daemon(ROOT, device, output / "spillwayd.log", restart) as served:
            yield served
    else:
        with engines.embedded(ROOT, device) as client:
            yield client, None


def main(
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None,
    question: Annotated[str | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option(min=0, help="code word, sampling, recomputed share")] = 0,
    device: Annotated[str, typer.Option(help="of the model and the engine: cpu or cuda:N")] = "cpu",
    daemon: Annotated[bool, typer.Option("--daemon", help="the engine runs in spillwayd")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="spillwayd is killed after the prompt")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="two daemons on nodes of Ray, one of which is killed")
    ] = False,
    output: Annotated[Path, typer.Option(help="folder of the results")] = ROOT / "build/demo",
) -> None:
    """Decodes a document through transformers and through Spillway, and compares."""
    console = Console(highlight=False)
    if restart and not daemon:
        console.print("--restart is of a daemon: --daemon")
        raise typer.Exit(2)
    if cluster and daemon:
        console.print("--cluster has daemons of its own, and --daemon is another one")
        raise typer.Exit(2)
    output.mkdir(parents=True, exist_ok=True)
    models = ROOT / "build/models"
    if not model.is_converted(models):
        console.print(f"Converting {model.NAME} to safetensors, this once ...")
    language_model, tokenizer = model.load(models, device)
    room = language_model.config.max_position_embeddings - decoding.NEW_TOKEN_COUNT_MAX
    prompt = document.make_prompt(tokenizer, file, question, seed, room)
    prompt = dataclasses.replace(prompt, tokens=prompt.tokens.to(device))
    if forced_start(prompt) < 1:
        console.print(f"{prompt.source} has fewer than {FORCED_TOKEN_COUNT + 2} tokens")
        raise typer.Exit(2)
    console.print(
        f"[bold]{model.NAME}[/] reads {prompt.source}{' up to what fits' if prompt.cut else ''}: "
        f"{len(prompt.tokens):,} tokens with the question"
    )
    if prompt.code_word:
        console.print("Planted in the middle of it:\n")
        console.print(f"{document.passage(prompt)}\n", style="dim", markup=False)
    console.print(f"Question: {prompt.question}", markup=False)

    console.print("\n[bold]transformers' own attention[/]")
    cache = DynamicCache(config=language_model.config)
    dense = run_side(language_model, tokenizer, cache, prompt, console)
    del cache

    where = "spillwayd" if daemon else "Spillway's engine in this process"
    if cluster:
        where = "two daemons, which share the KV heads"
    console.print(f"\n[bold]attention through {where}[/]")
    language_model.set_attn_implementation("spillway")
    policy = spillway_kv.Policy(seed=seed)
    log = output / "spillwayd.log"
    with (
        engine(device, daemon, restart, cluster, output, console) as (client, trouble),
        SpillwayCache(language_model.config, client, policy=policy) as cache,
    ):
        sparse = run_side(language_model, tokenizer, cache, prompt, console, trouble)
        console.print(
            "  the same steps once more, a share of the attends checked by dense attention:"
        )
        observer = observe(language_model, cache, prompt, seed, console)
        assert cache.model is not None
        info = cache.sequences[0].refresh()
        served_by = client.server_info.devices[0].description
        summary = summarize(prompt, seed, dense, sparse, observer, cache.model, served_by, info)

    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.draw(observer, summary, output / "report.png")
    console.print()
    report.print_table(summary, console)
    ratio = sparse.tokens_per_second / dense.tokens_per_second
    if ratio < 1:
        console.print(f"Decoding through Spillway was slower here: {ratio:.2f} times the rate.")
    failed = [check.text for check in report.requirements(summary) if not check.met]
    for text in failed:
        console.print(f"[red]Not met:[/] {text}")
    written = [output / "summary.json", output / "report.png", *([log] if daemon else [])]
    console.print("Written: " + ", ".join(os.path.relpath(file) for file in written))
    if failed:
        raise typer.Exit(1)
    console.print(NEXT, markup=False)


if __name__ == "__main__":
    sys.exit(typer.run(main))
