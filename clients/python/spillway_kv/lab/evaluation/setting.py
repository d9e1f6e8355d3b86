"""The settings that all sections of an evaluation share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Seed of the sampling of all models in the daemon, so that results can be repeated.
SAMPLING_SEED = 0


@dataclass(frozen=True)
class Setting:
    """A model, a text, and the devices.

    Attributes:
        model: Folder, name on the hub, or `.gguf` file.
        texts: Text files, `.gz` or not, which are concatenated.
        output: Folder for the results.
        token_count: Tokens of a segment (stretch) of the text.
        stretch_count: Number of segments, from the end of the text.
        query_count: Queries of a segment, spread over its last eighth.
        layers: Layers that are measured. None means all.
        seed: Seed of all random choices.
        device: Device of the model, `cpu` or `cuda:0`.
        daemon: Target of a running daemon. None means that one is started.
        daemon_device: `--device` of a daemon that is started.
        calibration: Text files for offline choices. Empty means the text before the segments.
        mlp: File with hash weights of `spillway-lab train-hash`.
        hashattention: File with hash weights in HashAttention's form.
    """

    model: str
    texts: tuple[Path, ...]
    output: Path
    token_count: int = 8192
    stretch_count: int = 1
    query_count: int = 64
    layers: tuple[int, ...] | None = None
    seed: int = 0
    device: str = "cpu"
    daemon: str | None = None
    daemon_device: str = "auto"
    calibration: tuple[Path, ...] = ()
    mlp: Path | None = None
    hashattention: Path | None = None

    @property
    def work(self) -> Path:
        """Folder for large files, and files that can be made again."""
        return self.output / "work"
