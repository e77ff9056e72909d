"""Keyword arguments of stages, by the signatures of all stages, which the ranks exchange at start."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from torch import nn

from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import Boundaries, Form

_FIRST, _TARGET = "input_ids", "labels"
"""Names in a collator's dict that only the first stage and the loss read, unless another stage names them."""
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes of wrappers that hold the module whose signature counts."""


class StepInputs(NamedTuple):
    """Arguments that a script passes to a step."""

    args: Sequence[Any]
    target: Any
    kwargs: Mapping[str, Any]
    stage_kwargs: Mapping[int, Mapping[str, Any]]
    loss_kwargs: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class AssignedInputs:
    """Arguments that a script passes to a step, by their names in messages and in ``split_dims``.

    ``args`` are the positional arguments of the first stage in order; ``target`` is empty without one.
    """

    args: Mapping[str, Any]
    target: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    stage_kwargs: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a module's forward: by position, by keyword, and positional parameters without a default.

    ``more_args`` is the name of ``*args``, if it has them.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    required: tuple[str, ...]
    more_args: str
    has_more_kwargs: bool

    @classmethod
    def of(cls, module: nn.Module) -> Signature:
        """The signature of a stage, without its wrappers."""
        for attribute in _WRAPPED:
            while isinstance(inner := getattr(module, attribute, None), nn.Module):
                module = inner
        every = inspect.signature(module.forward).parameters.values()
        by_position = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return cls(
            tuple(p.name for p in by_position),
            tuple(p.name for p in every if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
            tuple(p.name for p in by_position if p.default is p.empty),
            next((p.name for p in every if p.kind is p.VAR_POSITIONAL), ""),
            any(p.kind is p.VAR_KEYWORD for p in every),
        )

    def names_of(self, num_args: int) -> list[str]:
        """Names of positional arguments; arguments in ``*args`` are numbered from 0, such as ``args.1``."""
        rest = range(max(0, num_args - len(self.positional)))
        return [*self.positional[:num_args], *(f"{self.more_args or 'args'}.{index}" for index in rest)]


class StageKeywords:
    """The signatures of all stages, and the names that the boundary before each stage binds.

    ``has_loss_fn`` is False if the last stage returns the loss.
    """

    def __init__(
        self, signatures: Sequence[Signature], bound: Sequence[frozenset[str]] = (), *, has_loss_fn: bool
    ) -> None:
        self._signatures, self._has_loss_fn = signatures, has_loss_fn
        self._bound = bound or [frozenset[str]()] * len(signatures)

    @classmethod
    def gathered(cls, agreement: Agreement, stages: Mapping[int, nn.Module], *, has_loss_fn: bool) -> StageKeywords:
        """The signatures of the stages of all ranks; ``stages`` are this rank's, without DDP."""
        every: dict[int, Signature] = {}
        for answer in agreement.gather(
            "signatures", lambda: [[n, astuple(Signature.of(m))] for n, m in stages.items()]
        ):
            for number, (positional, keywords, required, more_args, has_more) in answer:
                every[number] = Signature(tuple(positional), tuple(keywords), tuple(required), more_args, has_more)
        return cls([every[number] for number in sorted(every)], has_loss_fn=has_loss_fn)

    def with_boundaries(self, boundaries: Mapping[int, Boundaries]) -> StageKeywords:
        """The same signatures, with the boundaries of all stages."""
        bound = [frozenset[str]()]
        for number in range(1, len(self._signatures)):
            form = boundaries[number].input_form
            assert form is not None
            bound.append(self.bound(number, form, len(boundaries[number - 1].outputs)))
        return StageKeywords(self._signatures, bound, has_loss_fn=self._has_loss_fn)

    def bound(self, number: int, form: Form, num_leaves: int) -> frozenset[str]:
        """Names of the arguments that a stage gets from the stage before it."""
        by_position = {str(index): name for index, name in enumerate(self._signatures[number].positional)}
        return frozenset(by_position.get(key, key) for key in form.keys or map(str, range(num_leaves)))

    def require_named(self, paths: Iterable[str], argument: str) -> None:
        """Refuse names that no stage has; ``argument`` is the argument of ``Pipeline`` that lists them.

        Raises:
            PipelineError: names the path, and the names that exist.
        """
        signatures = self._signatures
        names = {name for each in signatures for name in (*each.positional, *each.keywords, each.more_args) if name}
        for path in paths:
            if path.partition(".")[0] not in {*names, "target", _FIRST, _TARGET} and not any(
                each.has_more_kwargs for each in signatures
            ):
                raise PipelineError(
                    f"{argument} names {path!r}, and no stage has such an argument; there are "
                    f"{', '.join(sorted(names))} and target"
                )

    def assigned(self, inputs: StepInputs) -> AssignedInputs:
        """Name the values of a step, as every stage would get them.

        ``input_ids`` is the first positional argument if there is none and the first stage does not name it;
        ``labels`` is the target if there is none.

        Raises:
            PipelineError: no stage accepts a keyword argument.
        """
        kwargs, first = dict(inputs.kwargs), self._signatures[0]
        args = dict(zip(first.names_of(len(inputs.args)), inputs.args, strict=True))
        target = {} if inputs.target is None else {"target": inputs.target}
        if _FIRST in kwargs and not args and _FIRST not in first.keywords and first.positional:
            args = {_FIRST: kwargs[_FIRST]}
            self._drop_unread(kwargs, _FIRST, args)
        if kwargs.get(_TARGET) is not None and not target:
            target = {_TARGET: kwargs[_TARGET]}
            if self._has_loss_fn:
                self._drop_unread(kwargs, _TARGET, args)
        for name in kwargs:
            if not any(self._accepts(number, name, args) for number in range(len(self._signatures))):
                raise self._unaccepted(name)
        for number, named in inputs.stage_kwargs.items():
            self._require_stage(number, named, args)
        return AssignedInputs(args, target, kwargs, inputs.stage_kwargs)

    def names_of(self, number: int, names: Iterable[str], args: Iterable[str] = ()) -> list[str]:
        """The names that a stage gets; ``args`` are names of the positional arguments of the first stage."""
        return [name for name in names if self._accepts(number, name, args)]

    def missing(self, assigned: AssignedInputs) -> list[str]:
        """Arguments without which the first stage cannot be called."""
        own = {*assigned.args, *assigned.kwargs, *assigned.stage_kwargs.get(0, {})}
        return [] if assigned.args else [name for name in self._signatures[0].required if name not in own]

    def _accepts(self, number: int, name: str, args: Iterable[str]) -> bool:
        signature = self._signatures[number]
        if name in (self._bound[number] if number else args):
            return False
        if name in signature.keywords:
            return True
        is_last = number == len(self._signatures) - 1
        reads = {_FIRST: number == 0, _TARGET: is_last and not self._has_loss_fn}.get(name, True)
        return signature.has_more_kwargs and reads

    def _drop_unread(self, kwargs: dict[str, Any], name: str, args: Iterable[str]) -> None:
        """Keep a value that has become an argument or the target only if a stage also names it."""
        if not any(self._accepts(number, name, args) for number in range(len(self._signatures))):
            del kwargs[name]

    def _require_stage(self, number: object, named: Mapping[str, Any], args: Iterable[str]) -> None:
        if not isinstance(number, int) or number not in range(len(self._signatures)):
            raise PipelineError(
                f"stage_kwargs has the key {number!r}: stages are numbered from 0 to {len(self._signatures) - 1}"
            )
        for name in named:
            if not self._accepts(number, name, args):
                raise PipelineError(f"stage_kwargs has {name!r} for stage {number}, which {self._reason(number, name)}")

    def _reason(self, number: int, name: str) -> str:
        if name in self._bound[number]:
            return f"gets {name!r} from the stage before it"
        return f"accepts the keyword arguments {', '.join(self._signatures[number].keywords) or '(none)'}"

    def _unaccepted(self, name: str) -> PipelineError:
        signatures = self._signatures
        names = sorted(
            {each for n, one in enumerate(signatures) for each in one.keywords if each not in self._bound[n]}
        )
        text = f"no stage accepts the keyword argument {name!r}; the stages accept {', '.join(names) or 'none'}"
        if name == _TARGET:
            text += ". It is the target where `target` is not given"
        return PipelineError(text)
