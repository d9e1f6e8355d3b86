"""The changes that the plugin makes to vLLM: the backend's name, and the settings for it.

vLLM loads this module at each start. It imports nothing that vLLM has not loaded already.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

_CUSTOM = AttentionBackendEnum.CUSTOM
_CONNECTOR = "SpillwayConnector"
_MARK = "_spillway_installed"
# The part of vLLM's V2 model runner that loads a draft model.
_DRAFTS = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"


def install() -> None:
    """Registers the backend and the code that selects it, once in a process."""
    register_backend(_CUSTOM, "spillway_kv.vllm.backend.SpillwayBackend")
    if getattr(EngineArgs, _MARK, False):
        return
    setattr(EngineArgs, _MARK, True)
    _configure_with_it()
    _choose_it_by_layer()


def _configure_with_it() -> None:
    """Makes `--attention-backend CUSTOM` set connector and scheduler, and check the options."""
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if not _is_chosen(self):
            return create(self, *args, **kwargs)
        from spillway_kv.vllm.guard import refusals  # noqa: PLC0415
        from spillway_kv.vllm.memory import make_thin  # noqa: PLC0415
        from spillway_kv.vllm.settings import VARIABLES, settings_from  # noqa: PLC0415

        settings_from(os.environ)
        _prepare(self)
        with _known_to_vllm(VARIABLES):
            config = create(self, *args, **kwargs)
        reasons = refusals(config)
        if reasons:
            raise ValueError("Spillway cannot serve this: " + "; ".join(reasons))
        make_thin(config)
        scheduling = "Async" if config.scheduler_config.async_scheduling else ""
        config.scheduler_config.scheduler_cls = (
            f"spillway_kv.vllm.scheduler.Spillway{scheduling}Scheduler"
        )
        return config

    EngineArgs.create_engine_config = create_engine_config


@contextlib.contextmanager
def _known_to_vllm(variables: tuple[str, ...]) -> Iterator[None]:
    """Lets vLLM's check of the environment know variables that have its prefix.

    Only during the check: everything that vLLM knows is part of the key of its compile cache.
    """
    from vllm import envs  # noqa: PLC0415

    added = {name: functools.partial(os.environ.get, name) for name in variables}
    for name in envs.environment_variables:
        added.pop(name, None)
    envs.environment_variables.update(added)
    try:
        yield
    finally:
        for name in added:
            del envs.environment_variables[name]


def _is_chosen(args: EngineArgs) -> bool:
    for named in (args.attention_backend, args.attention_config.backend):
        if named is not None:
            name = named if isinstance(named, str) else named.name
            return name.upper() == _CUSTOM.name
    return False


def _prepare(args: EngineArgs) -> None:
    """Sets the options that the backend needs.

    Raises:
        ValueError: The user has set such an option. The message names it.
    """
    if args.kv_transfer_config is not None:
        raise ValueError(
            "--kv-transfer-config: Spillway's backend brings a connector of its own; leave the "
            "option out"
        )
    if args.enable_prefix_caching:
        raise ValueError(
            "--enable-prefix-caching: Spillway takes equal prefixes' K/V from its own "
            "sequences (VLLM_SPILLWAY_KEPT_SEQUENCES); leave the option out"
        )
    if args.scheduler_cls is not None:
        raise ValueError(
            f"--scheduler-cls {args.scheduler_cls}: Spillway needs a scheduler of its own; "
            "leave the option out"
        )
    # What it becomes is read later; `refusals` looks at the result.
    speculation = (args.speculative_config, args.spec_method, args.spec_model, args.spec_tokens)
    if any(given is not None for given in speculation):
        if args.async_scheduling:
            raise ValueError(
                "--async-scheduling with --speculative-config: Spillway's steps begin where the "
                "accepted drafts end, which is known only after the step before; leave the option "
                "out"
            )
        args.async_scheduling = False
    args.enable_prefix_caching = False
    args.kv_transfer_config = KVTransferConfig(
        kv_connector=_CONNECTOR,
        kv_connector_module_path="spillway_kv.vllm.connector",
        kv_role="kv_both",
        # For all ranks, unless the settings have one.
        kv_connector_extra_config={"seed": secrets.randbits(63)},
    )


def _leave_drafts_to_vllm() -> None:
    """Makes vLLM's V2 model runner choose a draft model's backend itself, once in a process.

    The K/V of a draft model are small, and its drafts are checked: vLLM keeps them as ever. The V1
    model runner does not give the model's backend to the draft model, but the V2 model runner does.
    Its layers cannot be told apart when a backend is chosen, because vLLM remembers the choice for
    all layers that are alike. So the backend is another one while the draft model is loaded.
    """
    try:
        speculator = importlib.import_module(_DRAFTS).StandaloneARSpeculator
    except (ImportError, AttributeError):
        raise ValueError(
            "speculative decoding by draft_model (--speculative-config): Spillway does not "
            f"find what loads the draft model, StandaloneARSpeculator of {_DRAFTS}"
        ) from None
    if getattr(speculator, _MARK, False):
        return
    setattr(speculator, _MARK, True)
    load = speculator.load_draft_model

    @functools.wraps(load)
    def load_draft_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = self.vllm_config.attention_config
        if chosen.backend != _CUSTOM:
            return load(self, *args, **kwargs)
        chosen.backend = self.vllm_config.speculative_config.attention_backend
        try:
            return load(self, *args, **kwargs)
        finally:
            chosen.backend = _CUSTOM

    speculator.load_draft_model = load_draft_model


def _choose_it_by_layer() -> None:
    """Uses the backend for the layers with full attention, and vLLM's own for other layers.

    vLLM's CPU platform has only one backend and ignores the name of another.
    """
    platform = type(current_platform)
    choose = platform.get_attn_backend_cls.__func__

    @functools.wraps(choose)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if selected_backend != _CUSTOM:
            return choose(cls, selected_backend, attn_selector_config, *args, **kwargs)
        from spillway_kv.vllm.guard import has_draft_model  # noqa: PLC0415

        config = get_current_vllm_config_or_none()
        if config is not None and config.use_v2_model_runner and has_draft_model(config):
            # The model's own layers come first.
            _leave_drafts_to_vllm()
        wanted = attn_selector_config
        others = (
            wanted.has_sliding_window or wanted.use_mla or wanted.attn_type != AttentionType.DECODER
        )
        if others:
            return choose(cls, None, attn_selector_config, *args, **kwargs)
        return _CUSTOM.get_path()

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
