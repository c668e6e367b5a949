"""footplate's inference engine. The public names are exported lazily: importing this package doesn't import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.commands import Command as Command
    from engine.commands import Ticket as Ticket
    from engine.config import EngineConfig as EngineConfig
    from engine.engine import Engine as Engine
    from engine.errors import FootplateError as FootplateError
    from engine.request import Completion as Completion
    from engine.request import RequestHandle as RequestHandle
    from engine.sampling import SamplingParams as SamplingParams
    from engine.view import EngineView as EngineView

_HOMES = {
    "Command": "engine.commands",
    "Completion": "engine.request",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineView": "engine.view",
    "FootplateError": "engine.errors",
    "RequestHandle": "engine.request",
    "SamplingParams": "engine.sampling",
    "Ticket": "engine.commands",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
