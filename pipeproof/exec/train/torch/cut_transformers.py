"""Stages of an unchanged causal language model of Hugging Face ``transformers``, run by the model's own forward.

A stage is the model with less inside: copies of the two outer modules, the causal LM and its base model, which share
the model's submodules and parameters. Where the base model calls a block or the final norm that another stage holds,
the copy has a module that returns its input. So each stage computes position ids, rotary embeddings and masks (full,
sliding or chunked) with the model's own code, hidden states alone cross the boundaries, and names of parameters are the
model's.

This is correct for a base model whose forward does nothing to the hidden states outside of its embedding, its blocks
and its final norm, and passes nothing else from one block to the next. ``_check_forward`` observes both on the model:
it calls the forward with all blocks and the norm replaced by modules that record what they get.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pipeproof.exec.train.torch.cut_sizes import chosen_sizes, shared_weights, stage_ranges
from pipeproof.exec.train.torch.meta_buffers import compute_buffers, kept_ties
from pipeproof.exec.train.torch.model_stages import ModelStages

KNOWN_MODELS = ("Gemma 3", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3-MoE")
"""Models whose stages are tested; others of the same structure pass the same checks."""

_BLOCK_ARGUMENTS = {
    "attention_mask", "cache_position", "output_attentions", "past_key_value", "past_key_values", "position_embeddings",
    "position_ids", "use_cache",
}  # fmt: skip
"""Keyword arguments of a block that every stage computes from the hidden states, a mask and position ids alone."""


def stages_of_transformers(
    model: nn.Module, num_stages: int, *, blocks_per_stage: Sequence[int] | None = None
) -> ModelStages:
    """Cut a causal LM of ``transformers`` into stages that hold its own submodules; the model itself is not changed.

    Stage 0 has the embedding and takes ``input_ids`` (batch, sequence). The last stage has the final norm and the head,
    and returns logits (batch, sequence, vocabulary); use ``causal_lm_loss`` on them. Every stage takes
    ``attention_mask`` and ``position_ids``, both (batch, sequence), as optional keyword arguments. Caches are off. On
    the meta device the mask is ignored, and shapes are right.

    A parameter has the same name in its stage as in the model, so that state dicts of stages are parts of the model's.
    A weight that several stages use, as with ``tie_word_embeddings``, is listed in ``ModelStages.tied``. Gradient
    checkpointing of the blocks works as in the model, if it is enabled on the model before or after the cut.

    ``blocks_per_stage`` gives the number of blocks of each stage. A stage may have none; one between others then
    returns its input. Without it they differ by one at most, and the first stages have more.

    Raises:
        ValueError: The sizes do not fit, the structure is not known, the forward does more than stages would compute,
            ``config.output_router_logits`` is set, or something has replaced a forward.
    """
    _know_consecutive_positions()
    parts = _parts_of(model)
    _refuse_options(model, parts)
    chosen = chosen_sizes(num_stages, blocks_per_stage, argument="blocks_per_stage")
    ranges = stage_ranges(parts.num_blocks, chosen, argument="blocks_per_stage", may_be_empty=True)
    _check_forward(model, parts)
    stages = [
        TransformersStage(model, parts, numbers, is_first=number == 0, is_last=number == num_stages - 1)
        for number, numbers in enumerate(ranges)
    ]
    return ModelStages(stages, shared_weights(stages), model)


def causal_lm_loss(
    output: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | float | None = None
) -> torch.Tensor:
    """The loss of ``model(input_ids, labels=labels)``, bit for bit: position i predicts label i + 1.

    ``output`` is logits (batch, sequence, vocabulary), or what the model returns: ``Pipeline.compare`` takes the model
    itself. ``labels`` are (batch, sequence); -100 is ignored. The mean is over the labels of the micro-batch that
    count. If their number differs between micro-batches, the mean over micro-batches is not the mean over all labels:
    pass the number of labels in the whole step, ``step(.., loss_kwargs={"num_items_in_batch": number})``. Then the
    loss is a sum divided by it, as in transformers.
    """
    if num_items_in_batch is None:
        return _cross_entropy(output, labels, "mean")
    return _cross_entropy(output, labels, "sum") / num_items_in_batch


def causal_lm_sum(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum that ``causal_lm_loss`` is a mean of, and the number of its labels: for ``normalize="tokens"``."""
    return _cross_entropy(output, labels, "sum"), (labels[..., 1:] != -100).sum()


def _cross_entropy(output: Any, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), shifted.view(-1).to(logits.device), reduction=reduction
    )


class _Consecutive:
    """Position ids of which it is known that a row has one sequence.

    Without a mask, models look for packed sequences: they read the ids, for which the host waits, and where they
    cannot (in a compiled or captured stage) they make a mask, with which attention has no fast kernel. They compare
    the object, so that a stage in another thread never takes its own ids for these. A plain attribute, which Dynamo
    can follow. Some versions also make a mask wherever they are compiled, because an exported program may be called
    with other lengths; a stage is compiled for its lengths.
    """

    positions: torch.Tensor | None = None


_consecutive = _Consecutive()


def _know_consecutive_positions() -> None:
    """Have models neither look for packed sequences in the ids of ``_consecutive`` nor make a causal mask for them."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    can_ignore = masking_utils._ignore_causal_mask_sdpa  # noqa: SLF001 - no argument of a model has this effect
    if getattr(find, "__module__", "") == __name__:
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if position_ids is _consecutive.positions:
            return None
        found: torch.Tensor | None = find(position_ids)
        return found

    def ignore_causal_mask_sdpa(
        padding_mask: torch.Tensor | None, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any,
        local_attention_size: int | None = None,
    ) -> bool:  # fmt: skip
        is_whole = padding_mask is None and q_length == kv_length
        if _consecutive.positions is not None and is_whole:
            return local_attention_size is None or kv_length < local_attention_size
        return bool(can_ignore(padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size))

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
    if "q_offset" in signature(can_ignore).parameters:
        masking_utils._ignore_causal_mask_sdpa = ignore_causal_mask_sdpa  # noqa: SLF001


class TransformersStage(nn.Module):  # type: ignore[misc]  # torch is untyped
    """Consecutive blocks of a causal LM; the first stage also has the embedding, the last the final norm and the head.

    Names of parameters are those of the model, such as ``model.layers.3.mlp.up_proj.weight``.
    """

    def __init__(self, model: nn.Module, parts: _Parts, numbers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        blocks, whole = nn.ModuleList(), getattr(model, parts.base)
        for number, block in enumerate(getattr(whole, parts.blocks)):
            blocks.append(block if number in numbers else _PassThrough())
        replaced: dict[str, nn.Module | None] = {parts.blocks: blocks}
        if not is_first:
            replaced[parts.embedding] = None
        if parts.norm is not None and not is_last:
            replaced[parts.norm] = _PassThrough()
        base = _with_children(whole, replaced)
        outside = {name: None for name, _ in model.named_children() if name != parts.base and not is_last}
        causal = _with_children(model, {**outside, parts.base: base})
        self.is_first, self.is_last = is_first, is_last
        self._base, self._blocks, self._numbers = parts.base, parts.blocks, numbers
        # The causal LM is no submodule, or its name would be part of all names: this module has the same submodules.
        self._modules = vars(causal)["_modules"]
        self.__dict__["_causal"] = causal
        self.training = model.training

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The blocks of this stage by number, for example to compile or to shard each."""
        blocks = getattr(getattr(self, self._base), self._blocks)
        return {number: blocks[number] for number in self._numbers}

    @property
    def pretrained(self) -> Any:
        """The ``PreTrainedModel`` whose submodules are those of this stage."""
        return self._causal

    def to_empty(self, *, device: Any, recurse: bool = True) -> TransformersStage:
        """Give the stage memory on a device, and compute the buffers that no state dict has.

        A weight that two modules of the stage share stays one Parameter.
        """
        with kept_ties([self]):
            super().to_empty(device=device, recurse=recurse)
        if recurse and torch.device(device).type != "meta":
            compute_buffers(self.pretrained, self.state_dict(keep_vars=True).values())
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states (batch, sequence, hidden), or logits on the last stage; the first stage takes token ids."""
        arguments = {
            "input_ids" if self.is_first else "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "use_cache": False,
            "return_dict": True,
        }
        if hidden_states.is_meta:
            with _experts_without_values(self._causal.config):
                return self._call({**arguments, "attention_mask": _ready_mask(hidden_states)})
        if attention_mask is not None or position_ids is not None:
            return self._call(arguments)
        batch, length = hidden_states.shape[:2]
        positions = torch.arange(length, device=hidden_states.device).expand(batch, -1)
        _consecutive.positions = positions
        try:
            return self._call({**arguments, "position_ids": positions})
        finally:
            _consecutive.positions = None

    def _call(self, arguments: dict[str, Any]) -> torch.Tensor:
        module, result = (self._causal, "logits") if self.is_last else (getattr(self, self._base), "last_hidden_state")
        output: torch.Tensor = getattr(module(**arguments), result)
        return output


class _PassThrough(nn.Module):  # type: ignore[misc]  # torch is untyped
    """A block or a norm that another stage holds: it returns its input."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class _Recorder(_PassThrough):
    """A pass-through that appends its name and its arguments to a list that several share."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        self._name, self._calls = name, calls

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._calls.append((self._name, args, kwargs))
        return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class _Parts:
    """Attribute names: of the base model and the head in the causal LM, of the others in the base model."""

    base: str
    head: str
    embedding: str
    blocks: str
    norm: str | None
    num_blocks: int


def _ready_mask(hidden_states: torch.Tensor) -> torch.Tensor:
    """A mask that models take as it is. Of any other, they read values, which the meta device does not have."""
    batch, length = hidden_states.shape[:2]
    return torch.ones(batch, 1, length, length, dtype=torch.bool, device=hidden_states.device)


@contextmanager
def _experts_without_values(config: Any) -> Iterator[None]:
    """Use the one product of experts that takes any type on the meta device: PyTorch's grouped one takes bfloat16."""
    name = "_experts_implementation"
    before = getattr(config, name, None)
    if before is None:
        yield
        return
    setattr(config, name, "batched_mm")
    try:
        yield
    finally:
        setattr(config, name, before)


def _with_children(module: nn.Module, children: Mapping[str, nn.Module | None]) -> nn.Module:
    """A copy that shares parameters, buffers and submodules, with some submodules replaced, or removed if None."""
    result = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict | set):  # hooks of the copy, for example, are not hooks of the model
            vars(result)[name] = copy.copy(value)
    kept = {**dict(module.named_children()), **children}
    vars(result)["_modules"] = {name: child for name, child in kept.items() if child is not None}
    return result


# --- what cannot be cut ---


def _parts_of(model: nn.Module) -> _Parts:
    """Find the parts by their role.

    Raises:
        ValueError: There is no such part, or a module with parameters that is none of them.
    """
    children = dict(model.named_children())
    prefix = getattr(model, "base_model_prefix", "")
    base_name = prefix if prefix in children else "model"
    base = children.get(base_name)
    num_blocks = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if base is None or num_blocks is None:
        raise _unknown(model, "no base model with `config.num_hidden_layers` blocks (pass the ...ForCausalLM itself)")
    head = _name_of(model, _embeddings(model, "get_output_embeddings"))
    if head is None:
        raise _unknown(model, "no head of its own, such as `lm_head`")
    embedding = _name_of(base, _embeddings(base, "get_input_embeddings"))
    if embedding is None:
        raise _unknown(model, f"no token embedding in `{base_name}`, such as `{base_name}.embed_tokens`")
    lists = [name for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    blocks = [name for name in lists if len(getattr(base, name)) == num_blocks]
    if len(blocks) != 1:
        raise _unknown(model, f"no one list of {num_blocks} blocks, such as `{base_name}.layers`; found {lists}")
    norms = _with_parameters(base, {embedding, *blocks})
    others = _with_parameters(model, {base_name, head}) + (norms if len(norms) > 1 else [])
    if others:
        raise _unknown(model, f"parameters outside of embedding, blocks, one final norm and head: {', '.join(others)}")
    return _Parts(base_name, head, embedding, blocks[0], norms[0] if norms else None, num_blocks)


def _embeddings(module: nn.Module, getter: str) -> nn.Module | None:
    try:
        result: nn.Module | None = getattr(module, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return result


def _name_of(parent: nn.Module, module: nn.Module | None) -> str | None:
    return next((name for name, child in parent.named_children() if child is module), None)


def _with_parameters(parent: nn.Module, known: set[str]) -> list[str]:
    """The children that have parameters, and the direct parameters, without those that are known."""
    names = [name for name, child in parent.named_children() if any(True for _ in child.parameters())]
    return [name for name in (*names, *dict(parent.named_parameters(recurse=False))) if name not in known]


def _refuse_options(model: nn.Module, parts: _Parts) -> None:
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "config.output_router_logits is set: the router loss needs the router logits of all blocks, and stages "
            "pass hidden states alone. Set model.config.output_router_logits = False and train without that loss"
        )
    for module in (model, getattr(model, parts.base)):
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of this {type(module).__name__} was replaced, as accelerate does for a `device_map`: "
                "cut the model before that, or load it without a `device_map`"
            )


def _check_forward(model: nn.Module, parts: _Parts) -> None:
    """Call the base model's forward with recorders for blocks and norm, and compare what they get with what is assumed.

    The hidden states are compared as objects, so that this works for a model on the meta device, too.

    Raises:
        ValueError: The forward changes hidden states itself, or passes more than hidden states from block to block.
    """
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    names = [f"{parts.blocks}.{number}" for number in range(parts.num_blocks)]
    children: dict[str, nn.Module | None] = {parts.blocks: nn.ModuleList(_Recorder(name, calls) for name in names)}
    if parts.norm is not None:
        names.append(parts.norm)
        children[parts.norm] = _Recorder(parts.norm, calls)
    children[parts.embedding] = None
    whole = getattr(model, parts.base)
    weight = getattr(whole, parts.embedding).weight
    hidden = torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype, device=weight.device)
    forward = f"{type(whole).__name__}.forward"
    try:
        with torch.no_grad():
            mask = _ready_mask(hidden) if hidden.is_meta else None
            probe = _with_children(whole, children)
            result = probe(inputs_embeds=hidden, attention_mask=mask, use_cache=False, return_dict=True)
            output = result.last_hidden_state
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unknown(model, f"no {forward} that takes hidden states as `inputs_embeds` ({error})") from error
    if output is not hidden or any(args and args[0] is not hidden for _, args, _ in calls):
        raise _unknown(model, f"no {forward} that leaves hidden states as blocks return them")
    if [name for name, _, _ in calls] != names:
        raise _unknown(model, f"no {forward} that calls each block once, and then the norm")
    for name, args, kwargs in calls:
        more = [key for key, value in kwargs.items() if key not in _BLOCK_ARGUMENTS and not _is_constant(value)]
        if len(args) != 1 or more:
            found = ", ".join(more) or f"{len(args)} positional arguments"
            raise _unknown(
                model, f"no {forward} that passes hidden states, masks and positions alone: {name} gets {found}"
            )


def _is_constant(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _unknown(model: nn.Module, missing: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} cannot be cut: it has {missing}. Known models: {', '.join(KNOWN_MODELS)}, and others "
        "of their structure. For other models, pass your own modules as stages"
    )
