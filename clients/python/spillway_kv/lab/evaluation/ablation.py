"""`spillway-lab eval ablation`: measures what each part of the default policy contributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spillway_kv.indices import RotationHash
from spillway_kv.lab.evaluation import intervals, results, summary
from spillway_kv.lab.evaluation.attends import EXACT, Case, measure, rows_in_daemon
from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX, Index, stacked_rotations
from spillway_kv.lab.evaluation.methods import DEFAULT_BITS
from spillway_kv.lab.evaluation.recording import Recording
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy, TopK
from spillway_kv.sequence import Sequence as DaemonSequence

EPSILON = 0.1
DELTA = 0.1
BANDS = (0.0, 0.01, 0.0625)
LAGS = (1, 8)
TAIL_STRATUM = 3
# The part with codes of values, which no model has by default.
VALUE_CODES = "bits of keys and values"
# The daemon's default.
DEFAULT_PILOT = 24
# Heavy counts: of a group, chosen by the sum of scores; and of each head, whose sets are united.
SUM_COUNTS = (32, 64, 128, 256, 512)
UNION_COUNTS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Variant:
    """The default policy with one thing changed.

    Attributes:
        part: The part that is changed.
        label: The change.
        case: Index and policy.
    """

    part: str
    label: str
    case: Case


def variants(head_dim: int) -> list[Variant]:
    """Returns all variants. Most parts include the default itself."""

    def bits(count: int, raw_keys: bool = False) -> Index:
        return Index(RotationHash(bits_per_dim=count, raw_keys=raw_keys))

    made = [Variant("bits per dimension", str(b), Case(bits(b), Policy())) for b in (1, 2, 3, 4)]
    for raw, label in ((False, "centred"), (True, "raw keys")):
        made.append(Variant("centring", f"codes, {label}", Case(bits(DEFAULT_BITS, raw), Policy())))
        lsh = Case(stacked_rotations(128, head_dim, raw), Policy(selector="hamming"))
        made.append(Variant("centring", f"LSH of 128 bits, {label}", lsh))
    for count in (1, 2, 4, 8):
        width = max(32, count * head_dim // 32 * 32)
        hamming = Case(stacked_rotations(width, head_dim), Policy(selector="hamming"))
        made.append(Variant("stacked rotations", f"{width} bits, Hamming", hamming))
    made.append(
        Variant("stacked rotations", f"{DEFAULT_BITS}-bit codes", Case(DEFAULT_INDEX, Policy()))
    )
    for label, policy in (("1", Policy(tail="uniform", bound="ratio")), ("all", Policy())):
        made.append(Variant("strata", label, Case(DEFAULT_INDEX, policy)))
    for count in (16, DEFAULT_PILOT, 48, 96, 192):
        policy = Policy() if count == DEFAULT_PILOT else Policy(pilot_token_count=count)
        made.append(Variant("pilot rows per stratum", str(count), Case(DEFAULT_INDEX, policy)))
    for factor in (1.0, 1.25, 1.5, 2.0):
        policy = Policy() if factor == 1.25 else Policy(inflation=factor)
        made.append(Variant("inflation", f"{factor:g}", Case(DEFAULT_INDEX, policy)))
    return made


def value_variants() -> list[Variant]:
    """Returns the variants with codes of values, by bits of keys and values."""
    return [
        Variant(
            VALUE_CODES,
            f"{keys} and {values}",
            Case(Index(RotationHash(bits_per_dim=keys, value_bits=values)), Policy()),
        )
        for keys in (2, 3, 4)
        for values in (0, 1, 2, 3)
    ]


def parts() -> list[str]:
    """Returns the parts that are measured unless `--parts` names others."""
    return [*dict.fromkeys(variant.part for variant in variants(64)), "bands", "group"]


def run(bench: Workbench, names: str = "") -> None:
    """Measures the variants and writes `ablation.json`."""
    wanted = names.split(",") if names else parts()
    known = [*parts(), VALUE_CODES]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    every = [*variants(bench.shapes.head_dim), *value_variants()]
    chosen = [variant for variant in every if variant.part in wanted]
    outcomes = measure(bench, [variant.case for variant in chosen], "ablation") if chosen else []
    found: dict[str, Any] = {
        "variants": [
            {
                "part": variant.part,
                "label": variant.label,
                **summary.errors(outcome, bench.setting.seed),
                "violations": summary.violations(outcome, EPSILON, summary.positions_of(outcome)),
            }
            for variant, outcome in zip(chosen, outcomes, strict=True)
        ]
    }
    if "bands" in wanted:
        found["bands"] = _bands(bench)
    if "group" in wanted:
        found["group"] = _group(bench)
    results.write(bench, "ablation", {"epsilon": EPSILON, "delta": DELTA, "parts": wanted}, found)


# Bands: do the errors of neighbouring steps resemble each other?


def _bands(bench: Workbench) -> list[dict[str, Any]]:
    """Compares resident samples of several sizes with new samples for each step."""
    kinds: list[tuple[str, Index, Policy, bool]] = [
        (
            f"resident sample of {100 * fraction:g} %" if fraction else "no resident sample",
            Index(RotationHash(), resident_sample_fraction=fraction),
            Policy(),
            False,
        )
        for fraction in BANDS
    ]
    kinds.append(("another seed for each step", kinds[0][1], Policy(), True))
    kinds.append(("no tail", kinds[0][1], Policy(tail="none"), False))
    told = []
    with bench.progress("bands") as progress:
        bar = progress.add_task("", total=len(bench.recordings) * len(kinds))
        for label, index, policy, fresh in kinds:
            measured = []
            for recording in bench.recordings:
                measured.append(_steps(bench, recording, index, policy, fresh))
                progress.advance(bar)
            told.append({"label": label, **_repeats(bench, measured)})
    return told


def _steps(
    bench: Workbench, recording: Recording, index: Index, policy: Policy, fresh: bool
) -> dict[str, npt.NDArray[Any]]:
    """Cosines between errors of steps, and shares of common samples, [L, lags, steps]."""
    key = {
        "steps": recording.name,
        "layers": list(bench.layers),
        "index": index.described(),
        "policy": str(policy),
        "fresh": fresh,
        "daemon": bench.daemon_told,
    }
    if not bench.store.has(key):
        cosines, shared, errors = [], [], []
        with rows_in_daemon(bench, recording, index, bench.layers) as sequence:
            for layer in bench.layers:
                off, norms, samples = _layer_steps(recording, sequence, layer, policy, fresh)
                cosines.append([_cosines(off, lag) for lag in LAGS])
                shared.append([_shared(samples, lag) for lag in LAGS])
                errors.append(norms)
        bench.store.put(
            key,
            {
                "cosines": np.array(cosines),
                "shared": np.array(shared),
                "errors": np.array(errors),
            },
        )
    return bench.store.get(key)


def _layer_steps(
    recording: Recording, sequence: DaemonSequence, layer: int, policy: Policy, fresh: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], list[list[npt.NDArray[Any]]]]:
    """Returns errors as vectors [steps, H_q, d], their relative norms, and each step's samples."""
    queries = recording.queries(layer)[-len(recording.run) :].numpy()
    outs, exact, samples = [], [], []
    for step, position in enumerate(recording.run):
        query = queries[step : step + 1]
        # Seeds that differ from the default's.
        used = Policy(**{**vars(policy), "seed": 1000 + step}) if fresh else policy
        visible = position + 1
        outs.append(sequence.attend(layer, query, used, [visible], out_dtype="float32").out[0])
        exact.append(sequence.attend(layer, query, EXACT, [visible], out_dtype="float32").out[0])
        chosen = sequence.select(layer, query, used, visible)
        samples.append(
            [
                chosen.indices[first:last][chosen.strata[first:last] >= TAIL_STRATUM]
                for first, last in zip(chosen.offsets[:-1], chosen.offsets[1:], strict=True)
            ]
        )
    truth = np.stack(exact)
    off = np.stack(outs) - truth
    norms = np.linalg.norm(off, axis=-1) / np.maximum(np.linalg.norm(truth, axis=-1), 1e-30)
    return off, norms, samples


def _cosines(off: npt.NDArray[Any], lag: int) -> npt.NDArray[np.float64]:
    """Returns, for each pair of steps, the mean over heads of the cosine of their errors."""
    first, second = off[:-lag].astype(np.float64), off[lag:].astype(np.float64)
    sizes = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    cosines = (first * second).sum(-1) / np.maximum(sizes, 1e-30)
    means = np.full(len(off), np.nan)
    means[: len(cosines)] = cosines.mean(-1)
    return means


def _shared(samples: Sequence[Sequence[npt.NDArray[Any]]], lag: int) -> npt.NDArray[np.float64]:
    """Share of a step's sampled tokens that the earlier step also sampled, mean over KV heads."""
    means = np.full(len(samples), np.nan)
    for step in range(len(samples) - lag):
        pairs = zip(samples[step], samples[step + lag], strict=True)
        shares = [len(np.intersect1d(a, b)) / len(b) for a, b in pairs if len(b)]
        means[step] = np.mean(shares) if shares else np.nan
    return means


def _repeats(bench: Workbench, measured: list[dict[str, npt.NDArray[Any]]]) -> dict[str, Any]:
    told: dict[str, Any] = {"error": float(np.mean([part["errors"].mean() for part in measured]))}
    for name in ("cosines", "shared"):
        # The bootstrap resamples positions: [lags, steps of all segments].
        steps = np.concatenate([_known_mean(part[name]) for part in measured], axis=1)
        for lag, values in zip(LAGS, steps, strict=True):
            known = values[~np.isnan(values)]
            told[f"{name}_{lag}"] = {
                "mean": known.mean() if len(known) else None,
                "interval": intervals.of_mean(known, bench.setting.seed) if len(known) else None,
            }
    return told


def _known_mean(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Mean over layers of the known values. NaN if none is known."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    total = np.where(known, values, 0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# Group: one heavy set by the sum of the heads' scores, or the union of the heads' own sets.


def _group(bench: Workbench) -> list[dict[str, Any]]:
    """Errors without a tail, for two ways in which the heads of a group choose their heavy set."""
    rules = (
        ("sum", DEFAULT_INDEX, SUM_COUNTS),
        ("union", Index(RotationHash(), ungrouped=True), UNION_COUNTS),
    )
    told = []
    with bench.progress("group") as progress:
        bar = progress.add_task("", total=len(bench.recordings) * len(rules))
        for rule, index, counts in rules:
            rows: list[npt.NDArray[Any]] = []
            errors: list[npt.NDArray[Any]] = []
            for recording in bench.recordings:
                found = _heavy_alone(bench, recording, index, counts)
                rows.append(found["rows"])
                errors.append(found["errors"])
                progress.advance(bar)
            # [counts, queries of all segments], means over layers and heads.
            all_rows, all_errors = (np.concatenate(parts, axis=1) for parts in (rows, errors))
            told.append(
                {
                    "rule": rule,
                    "points": [
                        {
                            "count": count,
                            "rows": all_rows[i].mean(),
                            "error": all_errors[i].mean(),
                            "interval": intervals.of_mean(all_errors[i], bench.setting.seed),
                        }
                        for i, count in enumerate(counts)
                    ],
                }
            )
    return told


def _heavy_alone(
    bench: Workbench, recording: Recording, index: Index, counts: Sequence[int]
) -> dict[str, npt.NDArray[Any]]:
    """Rows of a group and errors of its heads, [counts, Q], for heavy sets of the daemon."""
    positions = recording.spread(bench.setting.query_count)
    key = {
        "heavy alone": recording.name,
        "layers": list(bench.layers),
        "positions": list(positions),
        "index": index.described(),
        "counts": list(counts),
        "daemon": bench.daemon_told,
    }
    if not bench.store.has(key):
        shape = (len(counts), len(positions), len(bench.layers))
        rows, errors = np.zeros(shape), np.zeros(shape)
        with rows_in_daemon(bench, recording, index, bench.layers) as sequence:
            for at, layer in enumerate(bench.layers):
                seen = recording.layer(layer)
                keys, values = seen.keys.float(), seen.values.float()
                for number, position in enumerate(positions):
                    query = seen.queries[recording.positions.index(position)]
                    heads = query.unflatten(0, (keys.shape[0], -1))
                    visible = position + 1
                    logits = recording.scaling * heads @ keys[:, :visible].mT
                    exact = torch.softmax(logits, -1) @ values[:, :visible]
                    for i, count in enumerate(counts):
                        policy = Policy(tail="none", heavy=TopK(count=count))
                        chosen = sequence.select(layer, query[None].numpy(), policy, visible)
                        size = (len(chosen.offsets) - 1, visible)
                        marks = torch.zeros(size, dtype=torch.bool, device="cpu")
                        pairs = zip(chosen.offsets[:-1], chosen.offsets[1:], strict=True)
                        for head, (first, last) in enumerate(pairs):
                            tokens = chosen.indices[first:last].astype(np.int64)
                            marks[head, torch.from_numpy(tokens)] = True
                        shared = marks.unflatten(0, (keys.shape[0], -1)).any(1)
                        kept = logits.masked_fill(~shared[:, None], -torch.inf)
                        out = torch.softmax(kept, -1) @ values[:, :visible]
                        off = (out - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
                        rows[i, number, at] = float(shared.sum(-1).float().mean())
                        errors[i, number, at] = float(off.mean())
        bench.store.put(key, {"rows": rows.mean(-1), "errors": errors.mean(-1)})
    return bench.store.get(key)
