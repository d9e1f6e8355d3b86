"""Lets a model write long texts with dense and with sparse attention, from the same random numbers.

    python bench/long_generation.py MODEL TEXT --way dense --output DIR
    python bench/long_generation.py MODEL TEXT --way default --output DIR
    python bench/long_generation.py --report DIR

The prompts are pieces of the text. Tokens are sampled at temperature 1 by the Gumbel-max trick:
each prompt has noise of its own, which is the same for all ways, so that two ways write the same
text until their logits differ by enough. The end of text is never sampled. Afterwards dense
attention reads what was written. A record (JSON, one for each way) has for each prompt and each
block of BLOCK tokens:

- `nll`: mean of -log p(token) by dense attention, in nats;
- `own_nll`: the same by the way itself, as it wrote. The mean of nll - own_nll estimates the KL
  divergence of the way's distribution from that of dense attention, on the way's own text;
- `repeated`: share of the tokens that end a run of RUN tokens which the text already had.

The tokens are in a .npy file beside it, [prompts, tokens].
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import environment
import numpy as np
import numpy.typing as npt
import torch

BLOCK = 1024
RUN = 32
CHUNK = 2048


def repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token: whether it ends a run of RUN tokens that stands earlier in the text."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(tokens) + 1):
        run = tuple(tokens[end - RUN : end]) if end >= RUN else ()
        found.append(bool(run) and run in seen)
        seen.add(run)
    return found


def divergence(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def blocks(values: Sequence[float]) -> list[float]:
    """Means over whole blocks of BLOCK values."""
    whole = len(values) // BLOCK * BLOCK
    return [statistics.fmean(values[i : i + BLOCK]) for i in range(0, whole, BLOCK)]


class Writer:
    """A model that continues some prompts."""

    def __init__(self, model: Any, prompts: torch.Tensor, seed: int) -> None:
        """prompts: token ids [B, n]."""
        self.model = model
        self.prompts = prompts.to(model.device)
        ends = model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.noise = [
            torch.Generator(model.device).manual_seed(1000 * seed + i) for i in range(len(prompts))
        ]
        self.tokens: list[torch.Tensor] = []  # [B] each
        self.own_nll: list[torch.Tensor] = []

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        own = torch.log_softmax(logits, dim=-1)
        logits[:, self.ends] = -math.inf
        gumbel = torch.stack(
            [
                torch.empty_like(row).exponential_(generator=noise)
                for row, noise in zip(logits, self.noise, strict=True)
            ]
        )
        token = (logits - gumbel.log()).argmax(dim=-1)
        self.own_nll.append(-own.gather(1, token[:, None])[:, 0])
        self.tokens.append(token)
        return token

    @torch.inference_mode()
    def write(self, cache: Any, count: int, seconds: float) -> None:
        """Writes up to `count` tokens, as many as `seconds` allow; 0: no limit."""
        for first in range(0, self.prompts.shape[1], CHUNK):
            some = self.prompts[:, first : first + CHUNK]
            logits = self.model(some, past_key_values=cache, logits_to_keep=1).logits
        token = self._sample(logits[:, -1])
        end = time.monotonic() + seconds if seconds else math.inf
        while len(self.tokens) < count and time.monotonic() < end:
            logits = self.model(token[:, None], past_key_values=cache).logits
            token = self._sample(logits[:, -1])

    @torch.inference_mode()
    def nll_by_dense(self) -> torch.Tensor:
        """-log p of the tokens by dense attention, [B, tokens]."""
        written = torch.stack(self.tokens, dim=1)
        whole = torch.cat((self.prompts, written), dim=1)
        first, found = self.prompts.shape[1], []
        for row, wanted in zip(whole, written, strict=True):
            hidden = self.model.model(row[None, :-1], use_cache=False).last_hidden_state[0]
            parts = [
                torch.nn.functional.cross_entropy(
                    self.model.lm_head(hidden[first - 1 + i : first - 1 + i + BLOCK]).float(),
                    wanted[i : i + BLOCK],
                    reduction="none",
                )
                for i in range(0, len(wanted), BLOCK)
            ]
            found.append(torch.cat(parts))
        return torch.stack(found)


def measure(arguments: argparse.Namespace) -> None:
    from spillway_kv import connect
    from spillway_kv.lab.training.traces import read_text
    from spillway_kv.transformers import SpillwayCache
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(arguments.device)
    text = tokenizer(" ".join(read_text([arguments.text]).split()), return_tensors="pt")
    tokens, size = text["input_ids"][0], arguments.prompt_tokens
    if len(tokens) < arguments.prompts * size:
        raise SystemExit(
            f"--prompts: the text has {len(tokens):,} tokens, {size:,} each are needed"
        )
    starts = np.linspace(0, len(tokens) - size, arguments.prompts).round().astype(int)
    prompts = torch.stack([tokens[i : i + size] for i in starts])
    writer = Writer(model, prompts, arguments.seed)
    begin, share, certified = time.monotonic(), 1.0, 0.0
    if arguments.way == "dense":
        writer.write(DynamicCache(config=model.config), arguments.new, 60 * arguments.minutes)
    else:
        model.set_attn_implementation("spillway")
        quality = None if arguments.way == "default" else arguments.way
        with (
            connect("embedded:") as client,
            SpillwayCache(
                model.config, client, quality=quality, row_type=arguments.row_type
            ) as cache,
        ):
            writer.write(cache, arguments.new, 60 * arguments.minutes)
            share = float(cache.statistics.rows_touched_fraction)
            certified = float(cache.statistics.certified_error_mean)
        model.set_attn_implementation("sdpa")
    seconds = time.monotonic() - begin
    written = torch.stack(writer.tokens, dim=1).cpu().numpy()
    nll = writer.nll_by_dense().cpu().tolist()
    own = torch.stack(writer.own_nll, dim=1).cpu().tolist()
    name = arguments.way if arguments.row_type == "model" else f"{arguments.way}-int8"
    told = {
        **environment.describe(),
        "model": Path(arguments.model).name,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "way": name,
        "seed": arguments.seed,
        "prompt_tokens": size,
        "written": written.shape[1],
        "seconds": round(seconds, 1),
        "rows_touched_fraction": round(share, 4),
        "certified_error_mean": round(certified, 4),
        "nll": [[round(x, 4) for x in blocks(row)] for row in nll],
        "own_nll": [[round(x, 4) for x in blocks(row)] for row in own],
        "repeated": [[round(x, 4) for x in blocks(repeated(row))] for row in written.tolist()],
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    np.save(arguments.output / f"{name}.npy", written.astype(np.int32))
    (arguments.output / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")


def summary(records: Sequence[dict[str, Any]], texts: dict[str, npt.NDArray[np.int32]]) -> str:
    """A table of Markdown: one row for each way, over the blocks that all ways have written."""
    common = min(len(record["nll"][0]) for record in records)
    dense = next(record for record in records if record["way"] == "dense")
    header = (
        "attention",
        "rows read",
        "tokens written",
        "-log p by dense attention",
        "less that of what dense attention wrote (standard error)",
        "KL divergence, first and last block",
        "runs repeated",
        "tokens until the text differs from dense's, quartiles",
    )
    lines = [
        f"| {' | '.join(header)} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record in records:
        nll, own = (np.array(record[name])[:, :common] for name in ("nll", "own_nll"))
        by_prompt = nll.mean(axis=1) - np.array(dense["nll"])[:, :common].mean(axis=1)
        error = by_prompt.std(ddof=1) / math.sqrt(len(by_prompt))
        kl = (nll - own).mean(axis=0)
        way = record["way"]
        apart = [divergence(a, b) for a, b in zip(texts[way], texts["dense"], strict=True)]
        quartiles = ", ".join(f"{x:,.0f}" for x in np.quantile(apart, (0.25, 0.5, 0.75)))
        same = way == "dense"
        lines.append(
            f"| {way} | {record['rows_touched_fraction']:.1%} | {len(nll)} x {common * BLOCK:,} "
            f"| {nll.mean():.3f} | {'' if same else f'{by_prompt.mean():+.3f} ({error:.3f})'} "
            f"| {kl[0]:.4f}, {kl[-1]:.4f} "
            f"| {np.array(record['repeated'])[:, :common].mean():.1%} "
            f"| {'' if same else quartiles} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="folder of a transformers model")
    parser.add_argument("text", nargs="?", type=Path, help="text of the prompts, also .gz")
    parser.add_argument("--way", default="dense", help="dense, exact, high, default or fast")
    parser.add_argument("--row-type", default="model", choices=("model", "int8"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--new", type=int, default=8192, help="tokens to write")
    parser.add_argument("--minutes", type=float, default=0, help="write no longer than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="folder of the records")
    parser.add_argument("--report", type=Path, help="folder of records of all ways")
    arguments = parser.parse_args()
    if arguments.report is not None:
        records = [json.loads(path.read_text()) for path in sorted(arguments.report.glob("*.json"))]
        records.sort(key=lambda record: -record["rows_touched_fraction"])
        texts = {r["way"]: np.load(arguments.report / f"{r['way']}.npy") for r in records}
        print(summary(records, texts))
    elif arguments.text is None or arguments.output is None:
        parser.error("MODEL, TEXT and --output are needed, or --report")
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
