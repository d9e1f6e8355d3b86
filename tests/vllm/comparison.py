"""Compares tokens of the plugin with those of stock vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hardware import EXACT, ON_GPU, ROUNDED

# Where the logits of two tokens are closer than this, rounding may decide between the two.
#
# float32: the logits of the random models (`models.py`), after prompts of up to 900 tokens, are off
# by up to 1.2e-4 against float64, in torch on a CPU. So two engines may differ by 5e-4 about two
# logits. Kernels of a GPU approximate exponentials and sum in other orders, so they get more room.
# If they multiplied as TF32, logits would be off by 0.1.
#
# bfloat16: the difference of a token's logit and the best one, of Qwen2.5-Coder-1.5B in torch on a
# CPU, is off by 0.04 in the median against float32, and by up to 0.8. So two engines may differ by
# 1.6. After a single token it is off by up to 1.5, so prompts have two tokens at least. Logits of
# the random Gemma 3 are off by up to 0.22. Those of the other random models are off by up to 2.5,
# so these only run in float32.
TIE = {EXACT: 1e-2 if ON_GPU else 1e-3, ROUNDED: 1.6}
TIE_OF_GEMMA = 0.5
# Sampled tokens may be that much further off. At vLLM's lowest temperature (0.01), 0.25 are odds of
# e^-25.
MORE_DRAWN = 0.25


@dataclass
class Comparison:
    """Sums over requests.

    Attributes:
        tie: Where the logits of two tokens are closer than this, either may be taken.
        greedy: Requests whose greedy tokens were compared.
        cut: How many of these had another token at a tie. Tokens after it do not count.
        drawn: Sequences of sampled tokens (n > 1) that were compared.
        token_count: Tokens that were compared.
        differing: Descriptions of the differences.
    """

    tie: float = TIE[EXACT]
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
            tie = self.tie if greedy else self.tie + MORE_DRAWN
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
                if at < end:
                    # More than two tokens may be as good as each other.
                    near = stock["near"][index][part][at]
                    good = {token for token, distance in near if distance < tie}
                    if {expected[at], got[at]} <= good:
                        self.cut += greedy
                        continue
                    # Rounding cannot explain a token that is far from the best.
                    far = f"; stock's best tokens there are {near[:5]}"
                self.differing.append(
                    f"a prompt of {len(request['prompt'])} tokens: stock {expected}, ours {got}, "
                    f"from token {at}{far if at < end else ''}"
                )
