"""The plugin's settings: environment variables VLLM_SPILLWAY_*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from spillway_kv.quality import policy_of
from spillway_kv.row_types import RowType
from spillway_kv.vllm.appends import BYTES_MAX

PREFIX = "VLLM_SPILLWAY_"


@dataclass(frozen=True)
class KeptRoom:
    """GPU memory of codes of finished requests, where copies of running requests' rows need it.

    Attributes:
        total_bytes: GPU memory for codes and copies.
        code_bytes: Codes of a token, in all layers.
        row_bytes: K/V rows of a token as they are stored, in all layers.
        copy_bytes: Most GPU memory of copies.
    """

    total_bytes: int
    code_bytes: int
    row_bytes: int
    copy_bytes: int

    def tokens(self, running: int) -> int:
        """Returns for how many tokens of finished requests there is room.

        As many as fit beside codes of running requests and copies of all their rows, as far as
        copies may go, but at least those whose codes take a sixteenth of the memory.

        Args:
            running: Tokens of running requests.
        """
        beside = self.total_bytes // 32 * 31 - running * self.code_bytes
        beside -= min(running * self.row_bytes, self.copy_bytes)
        return max(beside, self.total_bytes // 16) // self.code_bytes


@dataclass(frozen=True)
class Settings:
    """Where K/V are kept and how they are attended.

    Attributes:
        target: `embedded:` for an engine in each worker process, or a daemon's gRPC target.
        memory: Host memory of an embedded engine, like `memory.limit` in the daemon's settings
            ("16GiB"). Empty means the engine's default.
        gpu_memory: GPU memory of an embedded engine, like `device.gpu_memory_limit`. Empty means
            the engine's default.
        gpu_resident: The most of it that copies of all K/V rows may take, like
            `device.gpu_resident_limit`. Empty means seven eighths without workspaces, less if codes
            of all requests may need more than the rest, or the engine's default if the engine's
            GPU memory is set.
        reproducible: Whether answers do not depend on which copies there are, like
            `device.reproducible`.
        device: Device of an embedded engine, "cpu" or "cuda:0". Empty means the worker's device.
        quality: How decode steps attend: one of `spillway_kv.quality.QUALITIES`.
        kept_sequence_count: Number of finished requests whose K/V are kept for requests with the
            same prefix.
        reconnect_seconds: How long a worker waits for a daemon that is gone.
        seed: Seed of the sampling of an embedded engine, like `models.sampling_seed`. All ranks
            have the same. -1 means random.
        value_bits: Bits per dimension of the codes of values, as of a `RotationHash`. 0 means none.
        row_type: How K/V are stored, "model" or "int8", as in `Client.create_model`.
        ready_bytes: Host memory of an embedded engine that is pinned at the start, like
            `memory.ready`. No variable sets it.
        append_bytes: Most GPU memory of K/V that wait to be appended. No variable sets it.
        prompt_bytes: GPU memory for K/V of prompts that have further chunks. No variable sets it.
        workspace_bytes: The part of an embedded engine's GPU memory for workspaces, like
            `device.gpu_workspace`. 0 means the engine's default. No variable sets it.
        kept_room: How much GPU memory finished requests may have. None means as much as there is.
            No variable sets it.
    """

    target: str = "embedded:"
    memory: str = ""
    gpu_memory: str = ""
    device: str = ""
    quality: str = "default"
    kept_sequence_count: int = 32
    reconnect_seconds: float = 60.0
    seed: int = -1
    gpu_resident: str = ""
    reproducible: bool = False
    value_bits: int = 0
    row_type: RowType = "model"
    ready_bytes: int = 0
    append_bytes: int = BYTES_MAX
    prompt_bytes: int = 0
    workspace_bytes: int = 0
    kept_room: KeptRoom | None = None

    @property
    def embedded(self) -> bool:
        """Whether each worker has its own engine."""
        return self.target == "embedded:"


_NAMES = {
    "TARGET": "target",
    "MEMORY": "memory",
    "GPU_MEMORY": "gpu_memory",
    "GPU_RESIDENT": "gpu_resident",
    "REPRODUCIBLE": "reproducible",
    "DEVICE": "device",
    "SEED": "seed",
    "QUALITY": "quality",
    "VALUE_BITS": "value_bits",
    "ROW_TYPE": "row_type",
    "KEPT_SEQUENCES": "kept_sequence_count",
    "RECONNECT_SECONDS": "reconnect_seconds",
}

VARIABLES = tuple(PREFIX + name for name in _NAMES)


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Reads the settings.

    Args:
        environment: The environment, such as `os.environ`.

    Raises:
        ValueError: There is an unknown variable with the prefix, or a value is out of range. The
            message names it.
    """
    values: dict[str, str | int | float] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        name = _NAMES.get(variable.removeprefix(PREFIX))
        if name is None:
            known = ", ".join(VARIABLES)
            raise ValueError(f"{variable} is not a setting of Spillway; settings are {known}")
        values[name] = _value(variable, name, text)
    settings = Settings(**values)  # type: ignore[arg-type]
    if not settings.embedded:
        for name in ("MEMORY", "GPU_MEMORY", "GPU_RESIDENT", "REPRODUCIBLE", "DEVICE", "SEED"):
            if values.get(_NAMES[name], "") not in ("", False):
                raise ValueError(
                    f"{PREFIX}{name} is for an embedded engine; the daemon at {settings.target} "
                    "has settings of its own"
                )
    return settings


def _value(variable: str, name: str, text: str) -> str | int | float:
    if name == "reproducible":
        if text.strip() not in ("", "0", "1"):
            raise ValueError(f"{variable} is {text!r}, not 0 or 1")
        return text.strip() == "1"
    if name == "kept_sequence_count":
        return _whole(variable, text, 0, 100_000)
    if name == "value_bits":
        return _whole(variable, text, 0, 3)
    if name == "seed":
        return _whole(variable, text, -1, (1 << 63) - 1)
    if name == "reconnect_seconds":
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= 86_400:
            raise ValueError(f"{variable} is {text!r}, not seconds in [0, 86400]")
        return seconds
    if name == "quality":
        policy_of(text)
    if name == "row_type" and text.strip() not in get_args(RowType):
        raise ValueError(f"{variable} is {text!r}, not {' or '.join(get_args(RowType))}")
    return text.strip()


def _whole(variable: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ValueError(f"{variable} is {text!r}, not a whole number in [{least}, {most}]")
    return number
