"""The presets of `spillway-lab eval all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spillway_kv.lab.evaluation import ablation, fidelity, guarantee, needle, perplexity, retrieval

Section = tuple[Callable[..., None], dict[str, Any]]

_SMALL_CURVES = (
    "oracle-top-k,oracle-top-p,twilight-oracle,vattention-oracle,vattention-paper-oracle,quest,"
    "twilight-quest,vattention-quest,double-sparsity,twilight-double-sparsity,lsh,twilight-lsh,"
    "vattention-lsh,codes,ours,ours-2-bits,ours-4-bits"
)
_SMALL_PROMISES = (
    "denominator-oracle,denominator-codes,paper-oracle,paper-codes,ratio-oracle,ratio-codes,"
    "stratified-oracle,stratified-codes,stratified-2-bits"
)
_SMALL_ASKED = "ours,codes=0.08,quest=0.08,twilight-quest=0.95"

PRESETS: dict[str, tuple[Section, ...]] = {
    "small": (
        (fidelity.run, {"names": _SMALL_CURVES}),
        (guarantee.run, {"names": _SMALL_PROMISES, "deltas": (0.05, 0.1, 0.2)}),
        (retrieval.run, {}),
        (ablation.run, {}),
        (
            perplexity.run,
            {
                "names": "oracle-top-k,quest,twilight-quest,lsh,codes,ours",
                "token_count": 64,
                "budget_count": 2,
            },
        ),
        (
            needle.run_needle,
            {
                "names": _SMALL_ASKED,
                "lengths": (4096,),
                "depths": (0.1, 0.5, 0.9),
                "sample_count": 1,
            },
        ),
        (needle.run_ruler, {"names": _SMALL_ASKED, "lengths": (4096,), "sample_count": 1}),
    ),
    "full": (
        (fidelity.run, {}),
        (guarantee.run, {"seed_count": 2}),
        (retrieval.run, {}),
        (ablation.run, {}),
        (perplexity.run, {"token_count": 512}),
        (needle.run_needle, {"sample_count": 4}),
        (needle.run_ruler, {"lengths": (4096, 8192, 16384, 32768), "sample_count": 10}),
    ),
}
