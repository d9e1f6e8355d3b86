"""A model that is shared by all callers with the same specification."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from spillway_kv.client import Client
from spillway_kv.errors import AlreadyExists, NotFound
from spillway_kv.results import Model

# How long another caller may take to create the model.
_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


def shared_model(client: Client, kind: str, spec: str, **options: Any) -> Model:
    """Creates a model, or returns the one that another caller with the same `spec` created.

    Args:
        client: Client of the engine.
        kind: Kind of the caller. The id of the model begins with it.
        spec: Text that determines the model. The id contains its hash.
        **options: As for `Client.create_model`.

    Raises:
        SpillwayError: As for `Client.create_model`, except that the id may be taken.
    """
    model_id = f"{kind}-{hashlib.sha256(spec.encode()).hexdigest()[:20]}"
    end = time.monotonic() + _SECONDS
    while True:
        try:
            return client.create_model(model_id, **options)
        except AlreadyExists:
            try:
                return client.get_model(f"models/{model_id}")
            except NotFound:
                # The model was deleted in between, or not all daemons of a cluster have it yet.
                if time.monotonic() > end:
                    raise
        time.sleep(_PAUSE_SECONDS)
