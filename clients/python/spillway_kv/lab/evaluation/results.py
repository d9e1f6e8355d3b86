"""Result files: measurements, with their software, hardware and date."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spillway_kv.lab.evaluation import intervals
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.server import ServerInfo

FORMAT = 1
SECTIONS = (
    "fidelity",
    "guarantee",
    "adversarial",
    "retrieval",
    "ablation",
    "perplexity",
    "needle",
    "ruler",
    "longctx",
    "tasks",
    "reuse",
)


def machine(info: ServerInfo) -> dict[str, Any]:
    """Returns the head of every result file: the command, versions and hardware."""
    return {
        # The same for every way to start it: as an executable, or as a module with python.
        "command": shlex.join(["spillway-lab", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {
            "daemon": info.version,
            "spillway": _own_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
        },
        "hardware": {
            "processor": _processor(),
            "core_count": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "daemon_devices": [device.description for device in info.devices],
        },
    }


def environment(bench: Workbench) -> dict[str, Any]:
    """Returns the head of a file that was measured with a model and a text."""
    setting = bench.setting
    head = machine(bench.client.server_info)
    head["hardware"]["model_device"] = _device(setting.device)
    return {
        **head,
        "model": {"name": Path(setting.model).name, **vars(bench.shapes)},
        "text": {
            "files": [
                {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}
                for text in setting.texts
            ],
            "token_count": len(bench.tokens),
        },
        "setting": {
            "token_count": setting.token_count,
            "stretch_count": setting.stretch_count,
            "first_token": len(bench.tokens) - setting.stretch_count * setting.token_count,
            "query_count": setting.query_count,
            "layers": list(bench.layers),
            "seed": setting.seed,
            "yarn_factor": bench.factor,
        },
    }


def _own_version() -> str:
    try:
        return metadata.version("spillway-kv")
    except metadata.PackageNotFoundError:
        return "a checkout"


def write(bench: Workbench, section: str, parameters: Mapping[str, Any], found: Any) -> Path:
    """Writes a section's file.

    Args:
        bench: The workbench that was used.
        section: One of SECTIONS.
        parameters: Parameters of this section.
        found: Results of this section, for JSON.
    """
    head = environment(bench)
    explanation = intervals.EXPLANATION
    return write_file(bench.setting.output, section, head, parameters, found, explanation)


def write_file(
    output: Path,
    section: str,
    head: Mapping[str, Any],
    parameters: Mapping[str, Any],
    found: Any,
    explanation: str,
) -> Path:
    """Writes a section's file.

    Args:
        output: Folder of the results.
        section: One of SECTIONS.
        head: Where and with what it was measured.
        parameters: Parameters of this section.
        found: Results of this section, for JSON.
        explanation: Explanation of its intervals.
    """
    told = {
        "format": FORMAT,
        "section": section,
        **head,
        "parameters": dict(parameters),
        "intervals": explanation,
        "found": found,
    }
    path = output / f"{section}.json"
    part = path.with_suffix(".part")
    part.write_text(_dump(_rounded(told)) + "\n")
    part.replace(path)
    return path


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Reads the sections of a folder. Keys are their names."""
    found = {}
    for section in SECTIONS:
        path = folder / f"{section}.json"
        if path.exists():
            told = json.loads(path.read_text())
            if told["format"] != FORMAT:
                raise ValueError(f"{path} has format {told['format']}, this reads {FORMAT}")
            found[section] = told
    return found


def _rounded(value: Any) -> Any:
    """Rounds floats to four digits to keep files small; values that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{float(value):.4g}") if np.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value


def _dump(value: Any, indent: str = "") -> str:
    """JSON with one line per entry. An entry without dictionaries is on one line."""
    deeper = indent + " "
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {_dump(item, deeper)}" for key, item in value.items()]
        return "{\n" + deeper + f",\n{deeper}".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        entries = [_dump(item, deeper) for item in value]
        return "[\n" + deeper + f",\n{deeper}".join(entries) + f"\n{indent}]"
    return json.dumps(value)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _device(name: str) -> str:
    device = torch.device(name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else name
