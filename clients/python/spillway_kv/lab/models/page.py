"""Writes findings as a page and as data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from spillway_kv.lab.evaluation.markdown import table
from spillway_kv.lab.models.check import Finding, Scale, Verdict


def write(folder: Path, version: str, scale: Scale, findings: Sequence[Finding]) -> None:
    """Writes `models-VERSION.json` and `models-VERSION.md` to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "transformers": version,
        "scale": dataclasses.asdict(scale),
        "findings": [
            {**dataclasses.asdict(each), "verdict": each.verdict.value} for each in findings
        ],
    }
    (folder / f"models-{version}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"models-{version}.md").write_text(page(version, scale, findings))


def page(version: str, scale: Scale, findings: Sequence[Finding]) -> str:
    """The findings as Markdown."""
    of = {verdict: [each for each in findings if each.verdict is verdict] for verdict in Verdict}
    lines = [
        f"# Architectures of transformers {version}",
        "",
        f"`spillway-lab models` has made a tiny random model of each causal architecture. It has "
        f"decoded {scale.new} tokens after a prompt of {scale.prompt:,} with quality `exact`, "
        f"and compared them with those of the model's own cache; and {scale.forced} random "
        "tokens with quality `default`, and compared each output with attention to all rows.",
        "",
        f"{len(of[Verdict.SERVED])} are served, {len(of[Verdict.REFUSED])} are refused when the "
        f"cache is made, {len(of[Verdict.WRONG])} are wrong, and of {len(of[Verdict.NOT_BUILT])} "
        "no tiny model could be made.",
    ]
    lines += _section(
        "Served",
        [
            "architecture",
            "layers in the engine",
            "equal tokens",
            "rows read",
            "above certificate",
            "notes",
        ],
        [
            [
                _name(each),
                f"{each.served_layer_count} of {each.layer_count}",
                f"{each.equal_tokens} of {scale.new}",
                f"{each.row_share:.0%}",
                f"{each.outside / max(each.output_count, 1):.1%}",
                each.words,
            ]
            for each in of[Verdict.SERVED]
        ],
    )
    for title, verdict in (
        ("Wrong", Verdict.WRONG),
        ("Refused", Verdict.REFUSED),
        ("Not built", Verdict.NOT_BUILT),
    ):
        rows = [[_name(each), each.words.replace("|", "\\|")] for each in of[verdict]]
        lines += _section(title, ["architecture", "words"], rows)
    return "\n".join(lines) + "\n"


def _name(finding: Finding) -> str:
    changes = ", ".join(f"`{name}={value}`" for name, value in finding.changes.items())
    return f"{finding.model_type} ({changes})" if changes else finding.model_type


def _section(title: str, header: list[str], rows: list[list[str]]) -> list[str]:
    return ["", f"## {title}", "", *table(header, rows)] if rows else []
