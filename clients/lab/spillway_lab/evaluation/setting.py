"""What all sections of an evaluation share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """A model, a text, and where things run.

    Attributes:
        model: Folder, name on the hub, or `.gguf` file.
        texts: Text files, `.gz` or not, read one after the other.
        output: Folder of the results.
        token_count: Tokens of a stretch of text.
        stretch_count: Stretches, the last of the text.
        query_count: Queries of a stretch, spread over its last eighth.
        layers: Layers that are measured; None is all.
        seed: Of everything drawn at random.
        device: Of the model, `cpu` or `cuda:0`.
        daemon: Target of a running daemon; None starts one.
        daemon_device: What a daemon started here runs on, as its `--device`.
        calibration: Text that offline choices learn from; empty is the
            evaluated text's beginning, before the stretches.
        mlp: Hash weights of `spillway-lab train-hash`.
        hashattention: Hash weights in HashAttention's form.
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
        """Where what is large, or can be made again, is kept."""
        return self.output / "work"
