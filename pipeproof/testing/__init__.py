"""Public helpers for tests of your own plans, transports and runtimes.

All names here are stable, and imported at first use::

    from pipeproof.testing import assert_plan_sound

Other modules: ``probes`` and ``endpoint_protocol`` for backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.lazy_exports import lazy_exports

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

__getattr__ = lazy_exports(__name__, _HOMES)
