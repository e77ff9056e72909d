"""Public helpers for tests of your own plans, transports and runtimes.

All names here are stable, and imported at first use::

    from pipeproof.testing import FakeWorld, assert_plan_sound, assert_same_gradients, check_transport

Other modules: ``strategies`` (needs Hypothesis), ``probes`` and ``endpoint_protocol``
for backends, and ``plugin`` for pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.comm.backends import backend_table
    from pipeproof.comm.channel_models import MODELS, ChannelModel, declared_model
    from pipeproof.testing.assertions import assert_plan_sound, assert_same_gradients
    from pipeproof.testing.fake.fake_operations import (
        DeadlockError,
        FakeWorldError,
        MismatchError,
        NeverComesError,
        RaceError,
        UnmatchedError,
    )
    from pipeproof.testing.fake.fake_rank import FakeRank, FakeWorld, Handle
    from pipeproof.testing.fake.fake_run import FakeRun
    from pipeproof.testing.transport_verdict import TransportVerdict, check_transport

__all__ = [
    "MODELS",
    "ChannelModel",
    "DeadlockError",
    "FakeRank",
    "FakeRun",
    "FakeWorld",
    "FakeWorldError",
    "Handle",
    "MismatchError",
    "NeverComesError",
    "RaceError",
    "TransportVerdict",
    "UnmatchedError",
    "assert_plan_sound",
    "assert_same_gradients",
    "backend_table",
    "check_transport",
    "declared_model",
]

_HOMES = {
    "MODELS": "comm.channel_models",
    "ChannelModel": "comm.channel_models",
    "DeadlockError": "testing.fake.fake_operations",
    "FakeRank": "testing.fake.fake_rank",
    "FakeRun": "testing.fake.fake_run",
    "FakeWorld": "testing.fake.fake_rank",
    "FakeWorldError": "testing.fake.fake_operations",
    "Handle": "testing.fake.fake_rank",
    "MismatchError": "testing.fake.fake_operations",
    "NeverComesError": "testing.fake.fake_operations",
    "RaceError": "testing.fake.fake_operations",
    "TransportVerdict": "testing.transport_verdict",
    "UnmatchedError": "testing.fake.fake_operations",
    "assert_plan_sound": "testing.assertions",
    "assert_same_gradients": "testing.assertions",
    "backend_table": "comm.backends",
    "check_transport": "testing.transport_verdict",
    "declared_model": "comm.channel_models",
}
"""Module of each public name; backends that use this package load none of them."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeproof.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
