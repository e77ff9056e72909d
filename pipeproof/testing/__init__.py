"""Public helpers for tests of your own plans, transports and runtimes.

All names here are stable, and imported at first use::

    from pipeproof.testing import assert_plan_sound

Other modules: ``probes`` and ``endpoint_protocol`` for backends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.comm.backends import backend_table
    from pipeproof.comm.channel_models import MODELS, ChannelModel, declared_model
    from pipeproof.testing.assertions import assert_plan_sound

__all__ = [
    "MODELS",
    "ChannelModel",
    "assert_plan_sound",
    "backend_table",
    "declared_model",
]

_HOMES = {
    "MODELS": "comm.channel_models",
    "ChannelModel": "comm.channel_models",
    "assert_plan_sound": "testing.assertions",
    "backend_table": "comm.backends",
    "declared_model": "comm.channel_models",
}
"""Module of each public name; backends that use this package load none of them."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeproof.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
