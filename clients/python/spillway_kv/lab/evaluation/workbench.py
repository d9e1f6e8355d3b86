"""The model, its recordings and the daemon, each created on first use."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from spillway_kv.client import Client
from spillway_kv.connecting import connect
from spillway_kv.indices import MlpHash
from spillway_kv.lab import _console
from spillway_kv.lab.evaluation import calibration, language
from spillway_kv.lab.evaluation.indexing import Index, create_model, write_channels, write_rotations
from spillway_kv.lab.evaluation.recording import Recording, grid_of, record
from spillway_kv.lab.evaluation.serving import running_daemon
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.lab.evaluation.store import Store, digest
from spillway_kv.results import Model
from spillway_kv.transformers.support import Shapes, shapes_of

CALIBRATION_TOKEN_COUNT = 8192


class Workbench:
    """Everything that sections need to measure. Use it as a context manager."""

    def __init__(self, setting: Setting, console: Console) -> None:
        self.setting = setting
        self.console = console
        self._exits = contextlib.ExitStack()
        self._models: dict[Index, Model] = {}
        self._loaded: tuple[float, Any] | None = None
        setting.work.mkdir(parents=True, exist_ok=True)
        (setting.work / ".gitignore").write_text("*\n")
        self.store = Store(setting.work / "parts")

    def __enter__(self) -> Workbench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    # The language model.

    def load(self, factor: float | None = None) -> Any:
        """Returns the language model. Only one is kept at a time.

        Args:
            factor: Factor of YaRN. None means that for the length of the segments.
        """
        factor = self.factor if factor is None else factor
        if self._loaded is None or self._loaded[0] != factor:
            self._loaded = None
            model = language.load_model(self.setting.model, self.setting.device, factor)
            self._loaded = (factor, model)
        return self._loaded[1]

    @cached_property
    def factor(self) -> float:
        """YaRN's factor for the length of the segments."""
        return language.yarn_factor(self.setting.model, self.setting.token_count)

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of the model's attention."""
        return shapes_of(language.load_config(self.setting.model))

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return language.load_tokenizer(self.setting.model)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The whole text, int64 [N]."""
        return language.tokenize(self.tokenizer, self.setting.texts)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are measured."""
        if self.setting.layers is None:
            return tuple(range(self.shapes.layer_count))
        return self.setting.layers

    # Recordings.

    @cached_property
    def first_token(self) -> int:
        """Position at which the evaluated part of the text begins."""
        setting = self.setting
        first = len(self.tokens) - setting.stretch_count * setting.token_count
        if first < 0:
            raise ValueError(
                f"the text has {len(self.tokens):,} tokens, too few for {setting.stretch_count} "
                f"segments of {setting.token_count:,}"
            )
        return first

    @cached_property
    def recordings(self) -> list[Recording]:
        """Recordings of the evaluated segments, which are at the end of the text."""
        count = self.setting.token_count
        made = []
        for stretch in range(self.setting.stretch_count):
            start = self.first_token + stretch * count
            made.append(
                self._record(self.tokens[start : start + count], grid_of(count), self.factor)
            )
        return made

    def _record(self, tokens: torch.Tensor, grid: Sequence[int], factor: float) -> Recording:
        key = {
            "model": self.setting.model,
            "device": torch.device(self.setting.device).type,
            "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            "grid": list(grid),
            "factor": factor,
        }
        folder, name = self.setting.work / "recordings", digest(key)
        if not (folder / name / "recording.json").exists():
            self.console.print(f"The model reads {len(tokens):,} tokens densely, this once ...")
        return record(lambda: self.load(factor), tokens, grid, folder, name)

    @cached_property
    def calibration(self) -> Recording:
        """Recording of a segment for offline choices. No part of it is evaluated."""
        if self.setting.calibration:
            tokens = language.tokenize(self.tokenizer, self.setting.calibration)
        else:
            tokens = self.tokens[: self.first_token]
        tokens = tokens[:CALIBRATION_TOKEN_COUNT]
        if len(tokens) < 256:
            raise ValueError(
                f"{len(tokens)} tokens before the evaluated text are too few to calibrate on; name "
                "other text with --calibration"
            )
        every = max(1, len(tokens) // 256)
        factor = language.yarn_factor(self.setting.model, len(tokens))
        return self._record(tokens, range(every - 1, len(tokens), every), factor)

    # The daemon.

    @cached_property
    def client(self) -> Client:
        """The client of the daemon."""
        target = self.setting.daemon
        if target is None:
            log = self.setting.work / "spillwayd.log"
            target = self._exits.enter_context(running_daemon(log, self.setting.daemon_device))
        return self._exits.enter_context(connect(target, timeout=600))

    @property
    def daemon_told(self) -> dict[str, Any]:
        """What distinguishes the results of this daemon from those of another."""
        info = self.client.server_info
        return {"version": info.version, "device": info.devices[0].name.split(":")[0]}

    def daemon_model(self, index: Index, scaling: float) -> Model:
        """Returns the daemon's model for an index. Creates it if necessary."""
        if index not in self._models:
            made = create_model(self.client, index, self.shapes, scaling, self._upload)
            self._exits.callback(self._delete, made)
            self._models[index] = made
        return self._models[index]

    def _delete(self, model: Model) -> None:
        for info in list(self.client.list_sequences(model)):
            self.client.get_sequence(info.name).delete()
        self.client.delete_model(model)

    def _upload(self, index: Index) -> Path | None:
        """Returns the file that an index needs, or None. Writes it if it does not exist."""
        if index.weights is not None:
            return index.weights
        folder = self.setting.work / "uploads"
        folder.mkdir(exist_ok=True)
        if index.rotation_seed is not None:
            assert isinstance(index.hash_weights, MlpHash)
            name = digest([index.described(), vars(self.shapes)])
            path = folder / f"rotations-{name}.safetensors"
            if not path.exists():
                write_rotations(path, index.hash_weights, self.shapes, index.rotation_seed)
            return path
        count = 0 if index.key_indices is None else index.key_indices.label_channel_count
        if not count:
            return None
        path = folder / f"channels-{count}-{self.calibration.name}.safetensors"
        if not path.exists():
            write_channels(path, calibration.choose_channels(self.calibration, count))
        return path

    # Progress.

    def progress(self, what: str) -> Progress:
        """Returns a progress bar."""
        return _console.progress(what, self.console)
