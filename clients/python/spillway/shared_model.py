"""A model that all who mean the same share."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from spillway.errors import AlreadyExists, NotFound
from spillway.results import Model

if TYPE_CHECKING:
    from spillway.client import Client

# How long another caller may take to create it.
_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


def shared_model(client: Client, kind: str, spec: str, **options: Any) -> Model:
    """Creates a model, or takes the one that an equal caller created.

    Args:
        client: The engine.
        kind: Of the caller; the id begins with it.
        spec: All that makes the model what it is; the id has its hash.
        **options: As of `Client.create_model`.

    Raises:
        SpillwayError: As of `Client.create_model`, but for an id that is taken.
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
                # It was deleted meanwhile, or not all of a cluster's daemons have it yet.
                if time.monotonic() > end:
                    raise
        time.sleep(_PAUSE_SECONDS)
