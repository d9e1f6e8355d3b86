"""A decode loop of a small Llama on Spillway's engine, in this process.

The model is random, and is written out here to show what a runner needs besides the weights. On a
GPU the prompt's K/V are appended straight from GPU memory to pages in host memory, and one CUDA
graph serves all steps. On a CPU the same layers run eagerly. Prints greedy tokens. With --check,
also prints how many of them attention over all K/V would choose too.

    python clients/python/examples/decode.py [--device cuda] [--check]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import spillway_kv
import torch
from torch.nn import functional

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY = 4, 8, 2, 64, 512, 1024
# Attention of new tokens: (layer, q [1, T, H_q, d], k and v [1, H_kv, T, d]) -> [1, T, H_q, d].
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(NamedTuple):
    """A layer's weights, [out, in]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """A random model. Its norms have no weights: they would all be 1."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int) -> torch.Tensor:
            shape, kind = (rows, columns), torch.float32
            made = torch.randn(shape, generator=generator, dtype=kind, device="cpu")
            return (made / columns**0.5).to(device, dtype)

        self.embedding = weight(VOCABULARY, HIDDEN) * HIDDEN**0.5
        self.head = weight(VOCABULARY, HIDDEN)
        self.layers = [
            Layer(
                qkv=2 * weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                o=weight(HIDDEN, HEADS * DIM),
                gate_up=weight(4 * HIDDEN, HIDDEN),
                down=weight(HIDDEN, 2 * HIDDEN),
            )
            for _ in range(LAYERS)
        ]
        steps = torch.arange(0, DIM, 2, dtype=torch.float32, device=device)
        self.frequencies = 500000.0 ** (-steps / DIM)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [1, T, H, d]."""
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(x.dtype)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Returns the next token [1] after ids [T] at positions [T]."""
        x = self.embedding[ids]
        for index, layer in enumerate(self.layers):
            normed = functional.rms_norm(x, (HIDDEN,))
            heads = (normed @ layer.qkv.T).view(1, len(ids), -1, DIM)
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 2)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            out = attend(index, q, k.transpose(1, 2), v.transpose(1, 2))
            x = x + out.reshape(len(ids), -1) @ layer.o.T
            gate, up = (functional.rms_norm(x, (HIDDEN,)) @ layer.gate_up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ layer.down.T
        logits = functional.rms_norm(x[-1:], (HIDDEN,)) @ self.head.T
        return logits.argmax(-1)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens over all K and V, in PyTorch."""
    if q.shape[1] == 1:
        out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True)
    else:
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True
        )
    return out.transpose(1, 2)


def prefill(model: Llama, ids: torch.Tensor, sequence: spillway_kv.Sequence) -> torch.Tensor:
    """Reads the prompt: attends to the K/V in the model's memory, and appends them to Spillway."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sequence.append(layer, 0, k[0], v[0])
        return causal(q, k, v)

    return model.forward(ids, torch.arange(len(ids), device=ids.device), attend)


def decode_eagerly(
    model: Llama,
    client: spillway_kv.Client,
    sequence: spillway_kv.Sequence,
    token: torch.Tensor,
    n: int,
) -> list[int]:
    """Decodes n tokens, one step for each."""
    tokens = []
    for _ in range(n):
        position = torch.tensor([sequence.token_count], device=token.device)
        with client.begin_step([sequence]) as step:

            def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
                out, _ = step.attend(layer, *qkv)  # noqa: B023  (of this step)
                return out

            token = model.forward(token, position, attend)
        tokens.append(int(token))
    return tokens


def decode_by_graph(
    model: Llama,
    client: spillway_kv.Client,
    sequence: spillway_kv.Sequence,
    token: torch.Tensor,
    n: int,
) -> list[int]:
    """The same with a CUDA graph, which runs the whole step on the same tensors each time."""
    token = token.clone()
    position = torch.tensor([sequence.token_count], device=token.device)
    tokens = torch.empty(n, dtype=torch.int64, device=token.device)
    graph = torch.cuda.CUDAGraph()
    with client.open_decoder([sequence]) as decoder:

        def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            out, _ = decoder.attend(layer, *qkv)
            return out

        def step() -> None:
            token.copy_(model.forward(token, position, attend))
            position.add_(1)

        for i in range(n):
            # True for the first step, and when the sequence no longer fits the captured launches.
            if decoder.next():
                # Run the step once without a graph, so that torch allocates what it needs, and then
                # restore the inputs. The replay below serves the same step again.
                before = token.clone(), position.clone()
                step()
                token.copy_(before[0])
                position.copy_(before[1])
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
            graph.replay()
            tokens[i : i + 1].copy_(token)
        decoder.finish()  # raises errors of the GPU
    return tokens.tolist()


def next_tokens_over_all(model: Llama, ids: torch.Tensor, tokens: list[int]) -> list[int]:
    """Returns what attention over all K/V chooses after the prompt's token and each of `tokens`."""
    cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = k, v
        return causal(q, k, v)

    token = model.forward(ids, torch.arange(len(ids), device=ids.device), attend)
    wanted = []
    for i, decoded in enumerate(tokens):
        position = torch.tensor([len(ids) + i], device=ids.device)
        wanted.append(int(model.forward(token, position, attend)))
        token = torch.tensor([decoded], device=ids.device)
    return wanted


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--prompt", type=int, default=3000, help="tokens, random")
    parser.add_argument("--tokens", type=int, default=64, help="to decode")
    parser.add_argument("--check", action="store_true", help="compare with all K/V")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Llama(device, dtype)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (options.prompt,), generator=generator, device="cpu")
    ids = ids.to(device)
    settings = {"device.name": "cuda:0" if device.type == "cuda" else "cpu"}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        shapes = client.create_model(
            layer_count=LAYERS,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16" if device.type == "cuda" else "float32",
        )
        sequence = client.create_sequence(shapes)
        token = prefill(model, ids, sequence)
        decode = decode_by_graph if device.type == "cuda" else decode_eagerly
        tokens = decode(model, client, sequence, token, options.tokens)
        print(*tokens)
        if options.check:
            wanted = next_tokens_over_all(model, ids, tokens)
            same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
            print(f"{same} of {len(tokens)} tokens follow by attention over all K/V too")


if __name__ == "__main__":
    main()
