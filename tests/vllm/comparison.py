"""Compares tokens of the plugin with those of stock vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hardware import ON_GPU

# If the two best logits of stock vLLM are closer than this, rounding may decide between the two. In
# bfloat16 a logit of 16 to 32 is a multiple of 0.125.
TIE = 0.5 if ON_GPU else 1e-3
# The same for sampled tokens, at vLLM's lowest temperature (0.01): odds of e^-25.
TIE_DRAWN = 0.75 if ON_GPU else 0.25


@dataclass
class Comparison:
    """Sums over requests.

    Attributes:
        greedy: Requests whose greedy tokens were compared.
        cut: How many of these had another token at a tie. Tokens after it do not count.
        drawn: Sequences of sampled tokens (n > 1) that were compared.
        token_count: Tokens that were compared.
        differing: Descriptions of the differences.
    """

    greedy: int = 0
    cut: int = 0
    drawn: int = 0
    token_count: int = 0
    differing: list[str] = field(default_factory=list)

    @property
    def cut_share(self) -> float:
        """The share of greedy requests that had another token at a tie."""
        return self.cut / max(self.greedy, 1)

    def add(
        self, schedule: list[dict[str, Any]], stock: dict[str, Any], ours: dict[str, Any]
    ) -> None:
        """Compares the answers to a schedule."""
        for index, request in enumerate(schedule):
            greedy = request.get("n", 1) == 1
            tie = TIE if greedy else TIE_DRAWN
            aborted = request.get("aborted") is not None
            pairs = list(zip(stock["tokens"][index], ours["tokens"][index], strict=not aborted))
            for part, (expected, got) in enumerate(pairs):
                both, end = list(zip(expected, got, strict=False)), min(len(expected), len(got))
                at = next((i for i, (one, other) in enumerate(both) if one != other), end)
                self.greedy += greedy
                self.drawn += not greedy
                self.token_count += at
                # An aborted request may have fewer or more tokens.
                if at == end and (aborted or len(expected) == len(got)):
                    continue
                best = (
                    {stock[name][index][part][at] for name in ("best", "second")}
                    if at < end
                    else ()
                )
                if at < end and stock["gaps"][index][part][at] < tie and got[at] in best:
                    self.cut += greedy
                    continue
                self.differing.append(
                    f"a prompt of {len(request['prompt'])} tokens: stock {expected}, ours {got}, "
                    f"from token {at}"
                )
