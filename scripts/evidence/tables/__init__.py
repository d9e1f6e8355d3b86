"""The tables that are made between marks on the pages, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tables import data, engine, evaluation, folds, serving

# Each gets the folder docs/, and returns the lines of a table.
TABLES: Mapping[str, Callable[[Path], list[str]]] = {
    "bound": evaluation.bound,
    "bound-by-length": evaluation.bound_by_length,
    "errors": evaluation.errors,
    "rows-by-bits": evaluation.rows_by_bits,
    "ablation": evaluation.ablation,
    "next-tokens": evaluation.next_tokens,
    "needles": evaluation.needles,
    "ruler": evaluation.ruler,
    "answers": evaluation.answers,
    "adversarial": evaluation.adversarial,
    "earlier-errors": evaluation.earlier_errors,
    "rankings": evaluation.rankings,
    "methods": evaluation.methods,
    "faster": serving.faster,
    "one-layer": engine.one_layer,
    "same-memory": engine.same_memory,
    "value-codes": data.value_codes,
    "value-codes-by-seed": data.value_codes_by_seed,
    "value-codes-next-tokens": data.value_codes_next_tokens,
    "value-codes-gpu": engine.value_codes,
    "row-types": data.row_types,
    "row-types-gpu": engine.row_types,
    "prompts-layer": engine.prompts_layer,
    "prompts-model": engine.prompts_model,
    "prompts-random": engine.prompts_random,
    "shapes": engine.shapes,
    "folds-tensor-cores": folds.tensor_cores,
    "folds-exact": folds.exact_in_a_graph,
    "folds-warps": folds.dense_by_warps,
    "folds-long": folds.long_sequences,
    "folds-lanes": folds.lanes,
    "folds-scores": folds.scores,
    "vllm": serving.vllm,
    "fairness": serving.fairness,
    "fairness-two-cores": serving.fairness_small,
    "presence": serving.presence,
    "training": serving.training,
    "grpc-floods": data.grpc_floods,
    "http-floods": data.http_floods,
}
