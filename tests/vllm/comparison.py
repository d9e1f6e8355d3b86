"""Compares tokens of the plugin with those of stock vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# If the two best logits of stock vLLM are closer than this, rounding may decide.
TIE = 1e-3
# The same for sampled tokens, at vLLM's lowest temperature (0.01): odds of e^-25.
TIE_DRAWN = 0.25


@dataclass
class Comparison:
    """Sums over requests.

    Attributes:
        greedy: Requests whose greedy tokens were compared.
        cut: How many of these had a tie. Tokens from the tie on do not count.
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
        """The share of greedy requests with a tie."""
        return self.cut / max(self.greedy, 1)

    def add(
        self, schedule: list[dict[str, Any]], stock: dict[str, Any], ours: dict[str, Any]
    ) -> None:
        """Compares the answers to a schedule."""
        for index, request in enumerate(schedule):
            tie = TIE if request.get("n", 1) == 1 else TIE_DRAWN
            aborted = request.get("aborted") is not None
            pairs = list(zip(stock["tokens"][index], ours["tokens"][index], strict=not aborted))
            for part, (expected, got) in enumerate(pairs):
                gaps = stock["gaps"][index][part]
                end = next((i for i, gap in enumerate(gaps) if gap < tie), len(gaps))
                if request.get("n", 1) == 1:
                    self.greedy += 1
                    self.cut += end < len(gaps)
                else:
                    self.drawn += 1
                if aborted:
                    # An aborted request may have fewer or more tokens.
                    end = min(end, len(expected), len(got))
                self.token_count += end
                if expected[:end] != got[:end]:
                    self.differing.append(
                        f"a prompt of {len(request['prompt'])} tokens: stock {expected[:end]}, "
                        f"ours {got[:end]}"
                    )
