"""Public helpers for tests of plans, transports and runtimes of one's own.

Everything named here is stable, and imported when it is first used::

    from pipeproof.testing import FakeWorld, assert_plan_sound, assert_same_gradients, check_transport

Beside it: ``strategies`` (needs Hypothesis), ``conformance`` and ``endpoint``
for backends, ``fake_backend`` and ``delivery``, and ``plugin`` for pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.comm.backends import backend_table
    from pipeproof.comm.channel_models import MODELS, ChannelModel, declared_model
    from pipeproof.testing.fake.errors import (
        DeadlockError,
        FakeWorldError,
        MismatchError,
        NeverComesError,
        RaceError,
        UnmatchedError,
    )
    from pipeproof.testing.fake.rank import FakeRank, Handle
    from pipeproof.testing.fake.world import FakeRun, FakeWorld
    from pipeproof.testing.gradients import assert_same_gradients
    from pipeproof.testing.plans import assert_plan_sound
    from pipeproof.testing.transports import TransportVerdict, check_transport

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
    "DeadlockError": "testing.fake.errors",
    "FakeRank": "testing.fake.rank",
    "FakeRun": "testing.fake.world",
    "FakeWorld": "testing.fake.world",
    "FakeWorldError": "testing.fake.errors",
    "Handle": "testing.fake.rank",
    "MismatchError": "testing.fake.errors",
    "NeverComesError": "testing.fake.errors",
    "RaceError": "testing.fake.errors",
    "TransportVerdict": "testing.transports",
    "UnmatchedError": "testing.fake.errors",
    "assert_plan_sound": "testing.plans",
    "assert_same_gradients": "testing.gradients",
    "backend_table": "comm.backends",
    "check_transport": "testing.transports",
    "declared_model": "comm.channel_models",
}
"""Public name to the module that holds it: the backends' own use of this package loads none of them."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeproof.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeproof.{_HOMES[name]}"), name)
