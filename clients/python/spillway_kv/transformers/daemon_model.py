"""The daemon's model of a cache: found or created by the config, and compared with it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any, cast

import torch

from spillway_kv.client import Client
from spillway_kv.indices import HashWeights, RotationHash
from spillway_kv.results import Model
from spillway_kv.row_types import RowType, row_type_number
from spillway_kv.shared_model import shared_model
from spillway_kv.tensors import DTypeName
from spillway_kv.transformers.identity import ModelMismatchError, config_digest
from spillway_kv.transformers.support import Shapes

# Names of models that `DaemonModel` creates: digests of the config and of all that determines them.
_OWN_MODEL = re.compile(r"models/hf-[0-9a-f]{5}-[0-9a-f]{20}")


class DaemonModel:
    """Finds or creates the daemon's model. Not thread-safe.

    Attributes:
        shapes: Shapes by the config.
        config_fields: What the K/V depend on besides the shapes. Models of other configs are other
            models of the daemon.
        found: The model. None: not known yet.
    """

    def __init__(
        self,
        client: Client,
        shapes: Shapes,
        config_fields: dict[str, Any],
        hash_weights: HashWeights | None,
        given: Model | None,
        sink_logits: tuple[tuple[float, ...], ...] = (),
        row_type: RowType = "model",
    ) -> None:
        """Sends nothing.

        Args:
            client: Connection to the daemon.
            shapes: As in the attributes.
            config_fields: As in the attributes.
            hash_weights: How a model that this creates computes codes.
            given: A model to use, which only the caller can create again. None: find or create.
            sink_logits: Learned sink logits of the layers with full attention.
            row_type: How the model stores rows.

        Raises:
            ValueError: There is no such `row_type`.
        """
        row_type_number(row_type)
        self.shapes = shapes
        self.config_fields = config_fields
        self.found = given
        self._client = client
        self._hash_weights = hash_weights
        self._sink_logits = sink_logits
        self._row_type = row_type
        self._is_given = given is not None
        self._checked: tuple[Model, torch.dtype, float] | None = None

    def suitable(self, dtype: torch.dtype, scaling: float, *, anew: bool) -> Model:
        """Returns the model for keys of a dtype, and logits that are multiplied by `scaling`.

        Args:
            dtype: Element type of the keys.
            scaling: Factor on q.k.
            anew: Look it up even if it is known, because the daemon may have restarted.

        Raises:
            ValueError: The model that was given or adopted has other shapes, another dtype,
                another factor, other sinks or another row type.
        """
        if self.found is None or (anew and not self._is_given):
            self.found = self._shared(dtype, scaling)
        if self._checked != (self.found, dtype, scaling):
            self._check(self.found, dtype, scaling)
            self._checked = (self.found, dtype, scaling)
        return self.found

    def _shared(self, dtype: torch.dtype, scaling: float) -> Model:
        """Creates the model, or returns the one that a cache with the same settings created."""
        name = cast(DTypeName, str(dtype).removeprefix("torch."))
        weights = None if self._hash_weights is None else asdict(self._hash_weights)
        if weights is not None and weights.get("value_bits") == 0:
            # As of a client that does not know them, so that both share a model.
            del weights["value_bits"]
        kind = type(self._hash_weights).__name__
        parts: list[Any] = [asdict(self.shapes), name, scaling, kind, weights]
        if self._sink_logits:
            parts.append(self._sink_logits)
        if self._row_type != "model":
            parts.append(self._row_type)
        spec = json.dumps(parts)
        return shared_model(
            self._client,
            self._kind(),
            spec,
            **asdict(self.shapes),
            dtype=name,
            softmax_scale=scaling,
            hash_weights=self._hash_weights,
            sink_logits=self._sink_logits or None,
            row_type=self._row_type,
        )

    def _kind(self) -> str:
        return f"hf-{config_digest(self.config_fields)}"

    def adopt(self, name: str, *, check_config: bool) -> None:
        """Uses the model of sequences that another cache has created.

        Args:
            name: Its resource name.
            check_config: Compare the config with that of the cache that created it.

        Raises:
            NotFound: No such model.
            ModelMismatchError: The configs differ.
            ValueError: The shapes or the row types differ.
        """
        model = self._client.get_model(name)
        self._check_shapes(model)
        self._check_row_type(model)
        if check_config and _OWN_MODEL.fullmatch(name) and self._kind() not in name:
            raise ModelMismatchError(
                f"{name} was created for a model with another config, or by another version "
                f"of transformers; this config is {self._kind()}. With check_model=False its "
                "sequences are used all the same"
            )
        self.found = model
        # Of the same kind are models that this creates later, if their codes need no upload.
        if isinstance(model.hash_weights, RotationHash):
            self._hash_weights = model.hash_weights

    def _check_shapes(self, model: Model) -> None:
        has = Shapes(model.layer_count, model.query_head_count, model.kv_head_count, model.head_dim)
        if has != self.shapes:
            raise ValueError(f"{model.name} has {has}, the config has {self.shapes}")

    def _check_row_type(self, model: Model) -> None:
        if model.row_type != self._row_type:
            raise ValueError(
                f"{model.name} stores rows as row_type {model.row_type!r}, this cache as "
                f"{self._row_type!r}: make the cache with row_type={model.row_type!r}"
            )

    def _check(self, model: Model, dtype: torch.dtype, scaling: float) -> None:
        self._check_shapes(model)
        if f"torch.{model.dtype}" != str(dtype):
            raise ValueError(f"{model.name} holds {model.dtype}, the keys are {dtype}")
        if abs(model.softmax_scale - scaling) > 1e-6 * abs(scaling):
            raise ValueError(
                f"{model.name} scales logits by {model.softmax_scale}, this layer by {scaling}"
            )
        if model.sink_logits != self._sink_logits:
            raise ValueError(f"{model.name} has other learned sinks than the model's layers")
        self._check_row_type(model)
