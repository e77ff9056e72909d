"""What the rules of this family share: the verdict on a subject, found once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeproof.comm.channel_models import ChannelModel, Connections, declared_model
from pipeproof.verify.deadlock.classify import Fault, Judge, Verdict, blamed, deadlocks
from pipeproof.verify.subject import Subject


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A deadlock under what is declared: the model to show it by, and which promise is at fault."""

    model: ChannelModel
    fault: Fault


def promised(subject: Subject) -> ChannelModel:
    """The model that the subject's backend and plan declare; connections are warm where nothing is said."""
    connections: Connections = "warm"
    if subject.lowered is not None:
        connections = subject.lowered.spec.transport.connections
    return declared_model(subject.backend, connections)


def _verdict(subject: Subject) -> Verdict:
    return Judge(subject.graph).verdict(promised(subject))


def declared_deadlock(subject: Subject) -> Deadlock | None:
    """The deadlock under the declared model, if there is one."""
    if not subject.once(_verdict).declared:
        return None
    return Deadlock(*blamed(subject.graph, promised(subject)))


def conditions(subject: Subject) -> tuple[ChannelModel, ...]:
    """The models under which a subject deadlocks that does not as declared; none where it does."""
    verdict = subject.once(_verdict)
    return () if verdict.declared else verdict.failing


def opened_late(subject: Subject) -> ChannelModel | None:
    """The declared model with connections opened at first use, where that deadlocks and nothing rules it out."""
    if subject.lowered is not None or subject.once(_verdict).declared:
        return None
    model = replace(promised(subject), connections="lazy")
    return model if deadlocks(subject.graph, model) else None
