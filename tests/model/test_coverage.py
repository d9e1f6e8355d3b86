"""Measures how often attends on the model's own K/V exceed the promised error.

The default policy at 8K must keep its promise, over all steps, layers, heads and seeds together.
Other policies and the worst (layer, head) are only reported, in build/coverage/model_8k.json and on
the terminal.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import spillway_kv
import torch
from demonstration.observation import relative_errors
from recording import Trace, exact_attention, record
from spillway_kv import Policy, TopK

TOKEN_COUNT = 8192
# Positions of the queries: in the last 1,024 tokens, and as many as one attend serves sparsely.
POSITIONS = [TOKEN_COUNT - 1 - 64 * i for i in reversed(range(16))]
VISIBLE = [position + 1 for position in POSITIONS]
DEFAULT_SEEDS = range(8)
# The documented values of the default policy.
DEFAULT_EPSILON = 0.1
DEFAULT_DELTA = 0.1
# Upper edges of sizes of certificates. The first is the smallest error that one states.
SIZES = (1 / 64, 0.03, 0.1)
REPORT = Path(__file__).resolve().parents[2] / "build/coverage/model_8k.json"

UNIFORM = {"heavy": TopK(fraction=0.02), "selector": "oracle", "tail": "uniform"}
REPORTED: dict[str, dict[str, Any]] = {
    "default, eps .05": {"epsilon": 0.05},
    "default, eps .2": {"epsilon": 0.2},
    "default, delta .05": {"delta": 0.05},
    "oracle ranks, stratified": {"selector": "oracle"},
    "hamming ranks, stratified": {"selector": "hamming"},
    "oracle 2 %, uniform ratio": {**UNIFORM, "bound": "ratio"},
    "oracle 2 %, uniform paper": {**UNIFORM, "bound": "paper"},
    "oracle 2 %, uniform denominator": {**UNIFORM, "bound": "denominator"},
}


class Draws(NamedTuple):
    """The outcomes of one policy.

    Attributes:
        beyond: Whether the error was above epsilon, [seeds, layers, T, H_q].
        certified: Certified errors, same shape.
        above: Whether the error was above the certified one, same shape.
        rows: Touched rows / visible rows, mean.
        delta: The delta of the policy.
        group: How many query heads share a set of rows.
    """

    beyond: torch.Tensor
    certified: torch.Tensor
    above: torch.Tensor
    rows: float
    delta: float
    group: int

    @property
    def fraction(self) -> float:
        """The share of errors above epsilon."""
        return float(self.beyond.double().mean())

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share.

        Query heads that share rows fail together, so a group counts as one draw. This makes the
        interval too wide rather than too narrow.
        """
        return wilson(self.fraction, self.beyond.numel() // self.group)

    def above_by_size(self) -> dict[float, tuple[int, float]]:
        """By the upper edge of a size of certificates: how many, and the share of errors above."""
        found = {}
        for least, most in itertools.pairwise((0.0, *SIZES)):
            of_size = (self.certified > least) & (self.certified <= most)
            count = int(of_size.sum())
            found[most] = count, float((self.above & of_size).sum()) / max(count, 1)
        return found

    def worst(self) -> tuple[int, int, float, int]:
        """Layer, head, share and count of the (layer, head) with the largest share."""
        shares = self.beyond.double().mean(dim=(0, 2))
        layer, head = divmod(int(shares.argmax()), shares.shape[1])
        count = self.beyond.shape[0] * self.beyond.shape[2]
        return layer, head, float(shares[layer, head]), count


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    half *= z / (1 + z * z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


class Bench(NamedTuple):
    """A trace, the same rows in the daemon, and the exact outputs of each layer."""

    trace: Trace
    sequence: spillway_kv.Sequence
    exact: list[torch.Tensor]

    def draw(self, options: dict[str, Any], seeds: Sequence[int]) -> Draws:
        """Attends with a policy, in every layer, once per seed.

        Compares errors with the epsilon of the policy, not with what the certificates say.
        """
        epsilon = options.get("epsilon", DEFAULT_EPSILON)
        delta = options.get("delta", DEFAULT_DELTA)
        beyond, certified, above, rows = [], [], [], []
        for seed in seeds:
            for layer, q in enumerate(self.trace.queries):
                policy = Policy(seed=seed, **options)
                result = self.sequence.attend(layer, q, policy, VISIBLE, out_dtype="float32")
                certificate = result.certificate
                assert (certificate.visible_token_counts == torch.tensor(VISIBLE)[:, None]).all()
                assert (certificate.epsilon, certificate.delta) == (epsilon, delta)
                errors = relative_errors(result.out, self.exact[layer])
                beyond.append(errors > epsilon)
                certified.append(torch.as_tensor(certificate.relative_errors))
                above.append(errors > certified[-1])
                rows.append((result.touched_row_counts.T / VISIBLE).mean())
        layer_count = len(self.trace.queries)

        def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(parts).reshape(len(seeds), layer_count, *parts[0].shape)

        group = beyond[0].shape[-1] // self.trace.keys[0].shape[0]
        return Draws(
            stacked(beyond),
            stacked(certified),
            stacked(above),
            sum(rows) / len(rows),
            delta,
            group,
        )


@pytest.fixture(scope="module")
def bench(
    client: spillway_kv.Client, loaded: tuple[Any, Any], tokens: torch.Tensor
) -> Iterator[Bench]:
    """Puts the model's K/V of 8,192 tokens into the daemon."""
    model = loaded[0]
    assert len(tokens) >= TOKEN_COUNT
    trace = record(model, tokens[:TOKEN_COUNT], POSITIONS)
    model.set_attn_implementation("sdpa")
    made = client.create_model(
        layer_count=len(trace.keys),
        query_head_count=trace.queries[0].shape[1],
        kv_head_count=trace.keys[0].shape[0],
        head_dim=trace.keys[0].shape[2],
        dtype="float32",
        softmax_scale=trace.scaling,
    )
    sequence = client.create_sequence(made)
    for layer, (k, v) in enumerate(zip(trace.keys, trace.values, strict=True)):
        sequence.append(layer, 0, k, v)
    exact = [exact_attention(trace, layer, VISIBLE) for layer in range(len(trace.keys))]
    yield Bench(trace, sequence, exact)
    sequence.delete()
    client.delete_model(made)


def describe(name: str, draws: Draws) -> dict[str, Any]:
    """The report on a policy."""
    low, high = draws.interval()
    layer, head, share, count = draws.worst()
    return {
        "case": name,
        "fraction": draws.fraction,
        "interval": [low, high],
        "delta": draws.delta,
        "draw_count": draws.beyond.numel(),
        "rows_touched_fraction": draws.rows,
        "above_certificate": {f"{most:.4f}": of for most, of in draws.above_by_size().items()},
        "worst": {"layer": layer, "head": head, "fraction": share, "count": count},
    }


def test_all_is_exact(bench: Bench) -> None:
    for layer, q in enumerate(bench.trace.queries):
        result = bench.sequence.attend(layer, q, Policy(selector="all"), VISIBLE)
        assert relative_errors(result.out, bench.exact[layer]).max() < 2e-5, f"layer {layer}"


def test_default_policy_keeps_its_promise(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    default = bench.draw({}, DEFAULT_SEEDS)
    report = [describe("default", default)]
    report += [describe(name, bench.draw(options, [0])) for name, options in REPORTED.items()]
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    with capsys.disabled():
        print()
        for case in report:
            worst = case["worst"]
            print(
                f"{case['case']:<32} beyond {case['fraction']:.4f} "
                f"[{case['interval'][0]:.4f}, {case['interval'][1]:.4f}] of "
                f"{case['draw_count']}, delta {case['delta']:g}, rows "
                f"{case['rows_touched_fraction']:.3f}, worst layer {worst['layer']} head "
                f"{worst['head']}: {worst['fraction']:.3f} of {worst['count']}"
            )
    assert default.beyond.numel() // default.group >= 2000
    assert default.rows < 0.2, "the policy was not sparse"
    assert default.interval()[1] <= default.delta
    # A certified error is an upper limit at 1 - delta, at every size.
    for size, (count, share) in default.above_by_size().items():
        assert count >= 1000, size
        assert share <= default.delta, size
    assert default.certified[default.certified > 0].min() == SIZES[0]
