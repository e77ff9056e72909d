"""Stages of an unchanged model of Hugging Face ``transformers``, run by the model's own forward.

A stage is a copy of the model with less inside. It shares submodules and parameters with the model. Blocks and modules
with weights that another stage holds are replaced (``partial_modules``). The replacement of the last block before
the stage's own returns what the stage received. So each stage computes position ids, rotary embeddings and
masks with the model's own code, only what blocks return crosses the boundaries, and parameters have the model's names.

Not every forward can be run in this way. The cut runs the model and its stages on a small batch and compares the
operations that led to the result, weight by weight (``OperationTrace``). It refuses a model whose stages would compute
something else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.exec.train.torch.block_layers import CutLayers
from pipeproof.exec.train.torch.boundary_inference import unchanged_buffers
from pipeproof.exec.train.torch.meta_buffers import compute_buffers, kept_ties
from pipeproof.exec.train.torch.model_parts import (
    Balance,
    Chain,
    NotCutError,
    OperationTrace,
    Part,
    add_parts,
    balanced,
    chains_of,
    observed,
)
from pipeproof.exec.train.torch.model_stages import ModelStages, chosen_sizes, shared_weights, stage_ranges
from pipeproof.exec.train.torch.partial_modules import (
    AbsentBlock,
    AbsentModule,
    EdgeBlock,
    Link,
    Shape,
    with_children,
    with_same_values,
    without_values,
)

KNOWN_MODELS = (
    "BERT", "BLOOM", "DeepSeek-V3", "DeepSeek-V4", "Falcon", "Gemma 3", "GLM-4", "GPT-2", "GPT-NeoX", "gpt-oss",
    "Granite", "Llama", "Llava", "Mistral", "Mixtral", "OPT", "Qwen2", "Qwen2-VL", "Qwen3", "Qwen3-MoE", "T5", "ViT",
    "Whisper",
)  # fmt: skip
"""Models that tests train. ``validation/results/families.md`` has the results of all families of the library."""

_OPTIONAL = ("attention_mask", "position_ids", "token_type_ids", "decoder_attention_mask")
"""Keyword arguments that the cut is checked with, if the model takes them."""

_FIRST_ALONE = ("pixel_values", "pixel_values_videos", "image_features", "input_features", "input_values")
"""Inputs of encoders in the first stage, which later stages do not use."""


def stages_of_transformers(
    model: nn.Module,
    num_stages: int,
    *,
    blocks_per_stage: Sequence[int] | Literal["even"] | None = None,
    example: Mapping[str, Any] | None = None,
) -> ModelStages:
    """Cut a model of ``transformers`` into stages that hold its own submodules; the model itself is not changed.

    Stage 0 has the embeddings, and encoders of images, and takes the model's main input, such as ``input_ids`` (batch,
    sequence). The last stage has the final norm and the head, and returns logits; for a causal LM use
    ``causal_lm_loss``. Every stage takes the keyword arguments of the model that the cut was checked with:
    ``attention_mask``, ``position_ids`` and ``token_type_ids`` (batch, sequence) if the model has them, and all names
    in ``example``. Caches are off. On the meta device the mask is ignored; shapes are right.

    An encoder and a decoder with cross attention are cut one after the other: some stages have encoder blocks, the
    others decoder blocks, and the encoder's output crosses all boundaries after it. Every stage takes
    ``decoder_input_ids``.

    A parameter has the same name in its stage as in the model: state dicts of stages are parts of the model's. A weight
    that several stages use, as with ``tie_word_embeddings``, is listed in ``ModelStages.tied``. Gradient checkpointing
    of the blocks works as in the model, if it is enabled on the model before or after the cut. For a compiled model or
    a ``PeftModel``, the model inside is cut.

    Args:
        model: A model with a head, such as ``LlamaForCausalLM``, on the CPU, a GPU or the meta device.
        num_stages: The number of stages.
        blocks_per_stage: The number of blocks of each stage. A stage may have none; a middle stage without blocks
            returns its input. With ``even`` the numbers differ by one at most, and the first stages have more. Default:
            the largest stage has as few FLOPs as possible. FLOPs of matrix products and attention are counted in a
            forward on ``example``, or on a few tokens, where attention counts little. A backward has twice as many in
            every layer. The head counts by its logits.
        example: Keyword arguments of the model for a small batch, with which the cut is checked. Needed if the steps
            have more than tokens, masks and positions: images, for example.

    Raises:
        ValueError: The sizes do not fit, the structure is unknown, stages would not compute the same as the forward,
            ``config.output_router_logits`` is set, or something has replaced a forward.
    """
    _know_consecutive_positions()
    model = _unwrapped(model)
    try:
        return _cut(
            model, chosen_sizes(num_stages, blocks_per_stage, argument="blocks_per_stage"), example,
            balances=blocks_per_stage is None,
        )  # fmt: skip
    except NotCutError as error:
        raise ValueError(
            f"{type(model).__name__} cannot be cut: {error}. Known models: {', '.join(KNOWN_MODELS)}, and others of "
            "their structure. For other models, pass your own modules as stages"
        ) from error


def causal_lm_loss(
    output: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | float | None = None
) -> torch.Tensor:
    """The loss of ``model(input_ids, labels=labels)``, bit for bit: position i predicts label i + 1.

    ``output`` is logits (batch, sequence, vocabulary), or the model's output: ``Pipeline.compare`` runs the model
    itself. ``labels`` are (batch, sequence); -100 is ignored. The mean is over the labels of the micro-batch that
    count. If their number differs between micro-batches, the mean over micro-batches is not the mean over all labels:
    pass the number of labels in the whole step, ``step(.., loss_kwargs={"num_items_in_batch": number})``. Then the loss
    is a sum divided by it, as in transformers.
    """
    if num_items_in_batch is None:
        return _cross_entropy(output, labels, "mean")
    return _cross_entropy(output, labels, "sum") / num_items_in_batch


def causal_lm_sum(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses and the number of labels, whose quotient is ``causal_lm_loss``: for ``normalize="tokens"``."""
    return _cross_entropy(output, labels, "sum"), (labels[..., 1:] != -100).sum()


def _cross_entropy(output: Any, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), shifted.view(-1).to(logits.device), reduction=reduction
    )


class _Consecutive:
    """Position ids that are known to have one sequence in each row.

    Without a mask, models look for packed sequences: they read the ids, for which the host waits. Where they cannot
    read them (in a compiled or captured stage), they make a mask, with which attention has no fast kernel. The object
    itself is compared: a stage in another thread never takes its own ids for these. It is a plain attribute, which
    Dynamo can follow. Some versions also make a mask wherever they are compiled, because an exported program may be
    called with other lengths; a stage is compiled for its lengths.
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
        indices: torch.Tensor | None = find(position_ids)
        return indices

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
    """Consecutive blocks of a model; the first stage also has the embeddings, the last the final norm and the head.

    Parameters have the model's names, such as ``model.layers.3.mlp.up_proj.weight``.
    """

    def __init__(self, model: nn.Module, cut: _Cut, number: int) -> None:
        super().__init__()
        chain, numbers = cut.chain_of(number), cut.ranges[number]
        self.is_first, self.is_last = number == 0, number == len(cut.ranges) - 1
        self._inputs, self._list, self._numbers = cut.inputs, chain.name, numbers
        self._begins, self._ends = cut.begins(number), cut.ends(number)
        self._runs = "" if self.is_last else chain.runs
        self._is_encoder, self._is_decoder = cut.is_encoder(number), cut.is_decoder(number)
        link = Link()
        part = with_children(model, _replaced(model, cut, number, link))
        # The model is not a submodule, or its name would be part of all names. This module has the submodules of a copy
        # with the blocks themselves, which may be sharded one by one. Forwards run the copy with edges.
        edges = {name: child.block for name, child in part.named_modules() if isinstance(child, EdgeBlock)}
        shown = with_same_values(part, edges)
        self._modules = vars(shown)["_modules"]
        self.__dict__["_model"], self.__dict__["_pretrained"], self.__dict__["_link"] = part, shown, link
        called = part.get_submodule(self._runs)
        self._takes = _arguments_of(called, model.config)
        self._embeds = None if self._begins else cut.embeds_of(number)
        self._outputs = [chain.outputs[index] for index in numbers]
        self._late = [name for part in chain.parts if 0 not in part.calls for name in part.names]
        self.training = model.training

    @property
    def blocks(self) -> dict[int, nn.Module]:
        """The blocks of this stage by number, for example to compile or to shard each."""
        blocks = self.get_submodule(self._list)
        return {number: blocks[number] for number in self._numbers}

    def plan_layers(self) -> CutLayers | None:
        """The stage's blocks as layers of a plan, and what is before and after them; None if it has none of these."""
        if not (self._begins or self._ends or len(self._numbers)):
            return None
        prefix = "encoder." if self._is_encoder else "decoder." if self._is_decoder else ""
        names = ["embed"] * self._begins + [f"layer.{n}" for n in self._numbers] + ["head"] * self._ends
        blocks = [(f"{self._list}.{number}", block) for number, block in self.blocks.items()]
        late = self._late if self._ends else ()
        return CutLayers(
            tuple(f"{prefix}{name}" for name in names), blocks, int(self._begins), tuple(late), int(self._is_decoder)
        )

    def boundary_of(self, position: int, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors that cross after a block, see ``CutStage``."""
        return self._outputs[position].tensors_of(output)

    def train(self, mode: bool = True) -> TransformersStage:  # noqa: FBT002 - as of nn.Module
        """Set the mode of all modules."""
        self.__dict__["_model"].train(mode)
        super().train(mode)
        return self

    @property
    def pretrained(self) -> Any:
        """The ``PreTrainedModel`` with the submodules of this stage."""
        return self.__dict__["_pretrained"]

    def to_empty(self, *, device: Any, recurse: bool = True) -> TransformersStage:
        """Give the stage memory on a device, and compute the buffers that no state dict has.

        A weight that two modules of the stage share stays one Parameter.
        """
        with kept_ties([self]):
            super().to_empty(device=device, recurse=recurse)
        if recurse and torch.device(device).type != "meta":
            compute_buffers(self.pretrained, self.state_dict(keep_vars=True).values())
        return self

    def forward(self, *received: torch.Tensor, input_ids: torch.Tensor | None = None, **batch: Any) -> Any:
        """Return what the stage's last block returns: hidden states (batch, sequence, hidden), or a tuple of tensors.

        The first stage takes the main input, such as token ids, by position or by name. The last stage returns logits,
        or the model's output where it has none. ``batch`` are keyword arguments of the model. Later stages read
        ``input_ids`` if the model does outside of its embedding.

        Raises:
            ValueError: The cut was not checked with such a keyword argument, or the stage needs one more.
        """
        batch = {name: value for name, value in {"input_ids": input_ids, **batch}.items() if value is not None}
        self._require(batch)
        if not (self._begins or self._ends or len(self._numbers)):
            return received if len(received) > 1 else received[0]
        shared = received[:1] if self._is_decoder else ()
        arguments = self._arguments(received, batch)
        link = self.__dict__["_link"]
        link.begin(() if self.is_first else received[len(shared) :])
        try:
            output = self._call(arguments, received[0] if received else batch[self._inputs.main])
            sent = (*shared, *link.sent)
            if self._ends:  # of the model, or of its encoder
                sent = (result_of(output) if self.is_last else output[0],)
            if link.num_reads != (not self._begins) or not (link.sent or self._ends):
                raise RuntimeError(
                    f"the forward did not run the blocks {list(self._numbers)} of this stage as it did at the cut: it "
                    "left some out (layerdrop), or one was replaced. Replace a block of the model before the cut"
                )
        finally:
            link.begin(())
        return sent if len(sent) > 1 else sent[0]

    def _require(self, batch: Mapping[str, Any]) -> None:
        # Lists: Dynamo of PyTorch 2.11 follows no difference of the keys of a dict and a set.
        unknown = [name for name in batch if name not in self._inputs.accepted]
        if unknown:
            raise ValueError(
                f"the cut was not checked with {', '.join(map(repr, sorted(unknown)))}: pass a small batch that has "
                "it as `example` of stages_of_transformers"
            )
        input_names = {*batch, self._inputs.main} if self.is_first else batch
        missing = [name for name in self._inputs.needed if name not in input_names]
        if missing:
            name = min(missing)
            raise ValueError(
                f"every stage of this model reads {name!r}: pass it by name, as in step({name}=..), and in "
                "`example_kwargs`"
            )

    def _arguments(self, received: tuple[torch.Tensor, ...], batch: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the module that this stage runs."""
        main = self._inputs.main
        values = {name: value for name, value in batch.items() if self.is_first or name not in _FIRST_ALONE}
        if self._is_decoder:
            from transformers.modeling_outputs import BaseModelOutput

            values.pop(main, None)
            values["encoder_outputs"] = BaseModelOutput(last_hidden_state=received[0])
        elif self.is_first:
            if received:
                values[main] = received[0]
        elif main not in self._inputs.needed and self._embeds is not None:
            values.pop(main, None)
            name, shape = self._embeds
            values[name] = shape.like(received[0])
        if self._is_encoder:
            values = {name: value for name, value in values.items() if name in self._takes}
        if "use_cache" in self._takes:
            values["use_cache"] = False
        return values

    def _call(self, arguments: dict[str, Any], first: torch.Tensor) -> Any:
        called = self.__dict__["_model"].get_submodule(self._runs)
        if first.is_meta:
            if self._inputs.has_ready_mask:
                arguments["attention_mask"] = _ready_mask(first)
            with _experts_without_values(self.__dict__["_model"].config, is_needed=True):
                return called(**arguments)
        has_own = "attention_mask" in arguments or "position_ids" in arguments
        if has_own or not self._inputs.knows_positions:
            return called(**arguments)
        batch, length = first.shape[:2]
        positions = torch.arange(length, device=first.device).expand(batch, -1)
        _consecutive.positions = positions
        try:
            return called(**arguments, position_ids=positions)
        finally:
            _consecutive.positions = None


def result_of(output: Any) -> Any:
    """The logits of a model's output; its only tensor, or all of it, where it has none."""
    logits = getattr(output, "logits", None)
    if logits is not None:
        return logits
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return tensors[0] if len(tensors) == 1 else output


@dataclass(frozen=True)
class _Inputs:
    """Arguments that stages take. ``needed`` are those that every stage must be given by name."""

    main: str
    accepted: frozenset[str]
    in_place: tuple[str, torch.Tensor]
    """The argument that later stages pass in the place of the main input, with a tensor of its shape."""
    free: frozenset[int]
    """Numbers of rows and lengths of the observed batch."""
    needed: frozenset[str] = frozenset()
    has_ready_mask: bool = False
    knows_positions: bool = False
    """True if the default position ids mean one sequence per row."""


@dataclass(frozen=True)
class _Cut:
    """The blocks of each stage, as numbers in its chain; ``of`` has the number of the chain of each stage."""

    chains: Sequence[Chain]
    ranges: Sequence[range]
    of: Sequence[int]
    inputs: _Inputs

    def chain_of(self, number: int) -> Chain:
        return self.chains[self.of[number]]

    def begins(self, number: int) -> bool:
        """True for the first stage of a chain."""
        return number == 0 or self.of[number - 1] != self.of[number]

    def ends(self, number: int) -> bool:
        """True for the last stage of a chain."""
        return number == len(self.of) - 1 or self.of[number + 1] != self.of[number]

    def is_encoder(self, number: int) -> bool:
        return len(self.chains) > 1 and self.of[number] == 0

    def is_decoder(self, number: int) -> bool:
        return len(self.chains) > 1 and self.of[number] == 1

    def calls(self, module: nn.Module) -> bool:
        """True if the forward of some chain calls a module outside of the blocks."""
        return any(part.calls for chain in self.chains for part in chain.parts if part.module is module)

    def received_by(self, number: int) -> torch.Tensor:
        """The first tensor that a stage gets from the block before its own, with the observed shape."""
        chain, start = self.chain_of(number), self.ranges[number].start
        return chain.tensors[start - 1][0] if start else chain.entry

    def embeds_of(self, number: int) -> tuple[str, Shape]:
        """The argument in the place of the main input, which later stages do not have, and its shape."""
        name, tensor = self.inputs.in_place
        return name, Shape.of(tensor, self.received_by(number), self.inputs.free)


def _replaced(model: nn.Module, cut: _Cut, number: int, link: Link) -> dict[str, nn.Module]:
    """The modules of a stage that differ from the model's, by name."""
    chain, numbers = cut.chain_of(number), cut.ranges[number]
    begins, ends = cut.begins(number), cut.ends(number)
    replaced: dict[str, nn.Module] = {}
    for index, block in enumerate(chain.blocks):
        output = chain.outputs[index]
        is_entry = not begins and index == numbers.start - 1
        is_exit = begins and not ends and not len(numbers) and not index
        if index not in numbers:
            replaced[f"{chain.name}.{index}"] = AbsentBlock(block, output, link, is_entry=is_entry, is_exit=is_exit)
            continue
        enters, leaves = not begins and not index, index == numbers[-1] and not ends
        if enters or leaves:
            edge = EdgeBlock(block, output if leaves else None, link, is_entry=enters)
            replaced[f"{chain.name}.{index}"] = edge
    others = [other for other in cut.chains if other is not chain]
    for other in others:
        replaced[other.inner] = AbsentModule(model.get_submodule(other.inner), None, link)
    for part in chain.parts:
        module = _replacement(part, cut, number, link)
        for name in part.names:
            if module is not None and not any(name.startswith(f"{other.inner}.") for other in others):
                replaced[name] = module
    return replaced


def _replacement(part: Part, cut: _Cut, number: int, link: Link) -> nn.Module | None:
    """The module in the place of one outside of the blocks; None if the stage has the module itself."""
    chain, begins, ends = cut.chain_of(number), cut.begins(number), cut.ends(number)
    if (begins and 0 in part.calls) or (ends and len(chain.blocks) in part.calls):
        return None
    if not part.has_weights:  # every stage may need it, except dropout of embeddings
        return (
            nn.Identity().train(part.module.training)
            if isinstance(part.module, nn.Dropout) and part.calls == {0}
            else None
        )
    if not number and not cut.calls(part.module):
        return None
    if 0 not in part.calls or begins:
        return AbsentModule(part.module, None, link)
    received = cut.received_by(number)
    shapes = tree_map_only(torch.Tensor, lambda x: Shape.of(x, received, cut.inputs.free), part.output)
    return AbsentModule(part.module, shapes, link)


def _ready_mask(hidden_states: torch.Tensor) -> torch.Tensor:
    """A mask that models take as it is. Of any other, they read values, which the meta device does not have."""
    batch, length = hidden_states.shape[:2]
    return torch.ones(batch, 1, length, length, dtype=torch.bool, device=hidden_states.device)


@contextmanager
def _experts_without_values(config: Any, *, is_needed: bool) -> Iterator[None]:
    """Use the only expert product that takes any type on the meta device: PyTorch's grouped product takes bfloat16."""
    name = "_experts_implementation"
    before = getattr(config, name, None)
    if before is None or not is_needed:
        yield
        return
    setattr(config, name, "batched_mm")
    try:
        yield
    finally:
        setattr(config, name, before)


# --- the cut ---


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of a compiled one and of a ``PeftModel``."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # noqa: SLF001 - the public way to it is this name
    if any(base.__name__ == "PeftModel" for base in type(model).__mro__):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{type(model).__name__} adds tokens to the prompt outside of the model, which stages would not do: "
                "use an adapter inside of the blocks, such as LoRA"
            )
        return _unwrapped(model.get_base_model())
    return model


def _cut(
    model: nn.Module, sizes: int | Sequence[int], example: Mapping[str, Any] | None, *, balances: bool
) -> ModelStages:
    """Find the parts, observe them in a forward, and check the stages with every batch."""
    chains = chains_of(model)
    ranges, of = _stage_blocks(chains, sizes)
    add_parts(model, chains)
    with _probing(model):
        bare = dict(example) if example is not None else _small_batch(model)
        inputs = _observed(model, chains, bare)
        if balances:
            ranges, of = _stage_blocks(chains, _balanced_sizes(_work(model, chains, bare), len(ranges), of.count(0)))
        cut = _Cut(chains, ranges, of, inputs)
        cut = replace(cut, inputs=_checked_inputs(model, cut, bare))
    stages = [TransformersStage(model, cut, number) for number in range(len(ranges))]
    return ModelStages(stages, shared_weights(stages), model)


def _stage_blocks(chains: Sequence[Chain], sizes: int | Sequence[int]) -> tuple[list[range], list[int]]:
    """The blocks of each stage, and the number of the chain that has them."""
    numbers, argument = [len(chain.blocks) for chain in chains], "blocks_per_stage"
    if len(chains) == 1:
        ranges = stage_ranges(numbers[0], sizes, argument=argument, may_be_empty=True)
        return ranges, [0] * len(ranges)
    encoder, decoder = numbers
    if isinstance(sizes, int):
        if sizes < 2:
            raise ValueError(f"num_stages is {sizes}: an encoder and a decoder need at least 2 stages")
        first = min(max(1, round(sizes * encoder / (encoder + decoder))), sizes - 1)
        parts: list[int | Sequence[int]] = [first, sizes - first]
    else:
        ends = [end for end in range(1, len(sizes)) if sum(sizes[:end]) == encoder]
        if not ends:
            raise ValueError(
                f"{argument} {list(sizes)}: no stage ends with the last of the {encoder} encoder blocks, which "
                f"{decoder} decoder blocks follow"
            )
        parts = [sizes[: ends[0]], sizes[ends[0] :]]
    both = [stage_ranges(n, part, argument=argument, may_be_empty=True) for n, part in zip(numbers, parts, strict=True)]
    return [*both[0], *both[1]], [0] * len(both[0]) + [1] * len(both[1])


def _balanced_sizes(works: Sequence[Sequence[int]], num_stages: int, usual: int) -> list[int]:
    """The number of blocks of each stage by the work of each chain; ``usual`` is the first chain's number of stages."""
    if len(works) == 1:
        return [*balanced(works[0], num_stages).sizes]

    def both(first: int) -> list[Balance]:
        return [balanced(work, num) for work, num in zip(works, (first, num_stages - first), strict=True)]

    def rank(first: int) -> tuple[int, ...]:
        encoder, decoder = both(first)
        largest = max(encoder.largest, decoder.largest)
        return largest, encoder.num_empty + decoder.num_empty, encoder.squares + decoder.squares, abs(first - usual)

    most = [len(work) - 2 for work in works]
    firsts = [n for n in range(1, num_stages) if n <= most[0] and num_stages - n <= most[1]]
    return [size for part in both(min(firsts, key=rank)) for size in part.sizes]


def _work(model: nn.Module, chains: Sequence[Chain], batch: Mapping[str, Any]) -> list[list[int]]:
    """The FLOPs of each chain, see ``Chain.work``.

    They are counted on a copy of the model without values, whose operations are the same on every device. For a model
    that needs values, the observed FLOPs are used.
    """
    try:
        copy = without_values(model)
        counted = chains_of(copy)
        add_parts(copy, counted)
        _observed(copy, counted, tree_map_only(torch.Tensor, lambda x: x.to("meta"), dict(batch)))
    except Exception:  # noqa: BLE001 - its forward reads values
        counted = [*chains]
    return [chain.work for chain in counted]


@contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """Run the model as in training, with dropout, and put modes, buffers and generators back."""
    from transformers import logging

    modes = {module: module.training for module in model.modules()}
    dropouts = {module: module.p for module in modes if isinstance(module, nn.Dropout)}
    verbosity = logging.get_verbosity()
    with ExitStack() as stack:
        stack.enter_context(unchanged_buffers(model))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        try:
            for module in modes:
                module.training = True
            for module in dropouts:
                module.p = 0.5
            yield
        finally:
            logging.set_verbosity(verbosity)
            for module, training in modes.items():
                module.training = training
            for module, p in dropouts.items():
                module.p = p


def _small_batch(model: nn.Module) -> dict[str, torch.Tensor]:
    """A batch of 3 rows: 11 tokens each, or one image or sound; and 7 tokens for a decoder."""
    main, config = getattr(model, "main_input_name", "input_ids"), model.config
    device = next(model.parameters()).device
    special = {value for name, value in vars(config).items() if name.endswith("token_id")}

    def tokens(length: int) -> torch.Tensor:
        ids = [number for number in range(3, 3 + 3 * length) if number not in special]
        num = getattr(config.get_text_config(), "vocab_size", 0) or len(ids)
        return torch.tensor([ids[i % len(ids)] % num for i in range(3 * length)], device=device).view(3, length)

    if main == "input_ids":
        batch = {main: tokens(11)}
    elif main == "pixel_values" and hasattr(config, "image_size"):
        sides = config.image_size if isinstance(config.image_size, Sequence) else (config.image_size,) * 2
        batch = {main: torch.randn(3, config.num_channels, *sides, device=device)}
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        batch = {main: torch.randn(3, config.num_mel_bins, 2 * config.max_source_positions, device=device)}
    else:
        raise NotCutError(f"its main input is {main!r}: pass a small batch as `example`")
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens(7)
    return {
        name: value.to(next(model.parameters()).dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }


def _arguments_of(module: nn.Module, config: Any) -> frozenset[str]:
    """Names of arguments of a forward; ``use_cache`` is among any number of others, if the config has it."""
    parameters = signature(module.forward).parameters
    is_open = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    return frozenset({*parameters, *(["use_cache"] if is_open and hasattr(config, "use_cache") else [])})


def _run(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    options = {"use_cache": False} if "use_cache" in _arguments_of(model, model.config) else {}
    with _experts_without_values(model.config, is_needed=next(model.parameters()).is_meta):
        return model(**batch, **options)


def _observed(model: nn.Module, chains: Sequence[Chain], batch: Mapping[str, Any]) -> _Inputs:
    """Run the forward on a batch and fill the chains."""
    main = getattr(model, "main_input_name", "input_ids")
    if main not in batch:
        raise NotCutError(f"`example` has no {main!r}")
    names = signature(model.forward).parameters
    masks = next(model.parameters()).is_meta and len(chains) == 1 and "attention_mask" in names
    try:
        _observe(model, chains, {**batch, "attention_mask": _ready_mask(batch[main])} if masks else batch)
    except NotCutError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {list(getattr(value, 'shape', []))}" for name, value in batch.items())
        where = " on the meta device, which has no values" if next(model.parameters()).is_meta else ""
        raise NotCutError(
            f"its forward does not run on {shapes}{where}; pass a batch that it takes as `example`, or cut the model "
            "on the CPU"
        ) from error
    chain = chains[0]
    embedded = (
        "inputs_embeds" if "inputs_embeds" in signature(model.get_submodule(chain.runs).forward).parameters else main
    )
    if embedded == main:
        in_place = batch[main].to("meta")
    else:
        table = model.get_input_embeddings() if main == "input_ids" else None
        in_place = next((part.output for part in chain.parts if part.module is table), None)
        in_place = chain.entry if in_place is None else in_place
    free = {size for value in batch.values() if isinstance(value, torch.Tensor) for size in value.shape[:2]}
    accepted = {*batch, main, *((name for name in _OPTIONAL if name in names) if masks else ())}
    needed = {"decoder_input_ids"} if len(chains) > 1 else set()
    return _Inputs(main, frozenset(accepted), (embedded, in_place), frozenset(free), frozenset(needed), masks)


def _observe(model: nn.Module, chains: Sequence[Chain], batch: Mapping[str, Any]) -> None:
    more: dict[str, Any] = {}
    for chain in chains:
        is_encoder = len(chains) > 1 and chain is chains[0]
        with observed(chain):
            if not is_encoder:
                _run(model, {**batch, **more})
                continue
            encoder = model.get_submodule(chain.inner)
            taken = signature(encoder.forward).parameters
            more["encoder_outputs"] = encoder(**{name: value for name, value in batch.items() if name in taken})
        batch = {name: value for name, value in batch.items() if name != getattr(model, "main_input_name", "")}


def _checked_inputs(model: nn.Module, cut: _Cut, bare: Mapping[str, Any]) -> _Inputs:
    """The arguments with which the stages compute the same as the forward."""
    inputs, accepted = cut.inputs, {*cut.inputs.accepted}
    batches: list[Mapping[str, Any]] = [bare]
    optional = {} if next(model.parameters()).is_meta else _optional(model, bare)
    if optional:
        batches.append({**bare, **optional})
    for named in (frozenset(), frozenset({inputs.main})):
        tried = replace(
            cut, inputs=replace(inputs, needed=inputs.needed | named, accepted=frozenset({*accepted, *optional}))
        )
        if all(_is_same(model, tried, batch) for batch in batches):
            return replace(tried.inputs, knows_positions=_knows_positions(model, tried, bare))
    raise NotCutError(
        "its stages would not compute what its forward does, which reads more between blocks than what blocks return, "
        "masks and positions"
    )


def _optional(model: nn.Module, bare: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Masks, positions and types of tokens that the model takes, each tried alone."""
    names, main = signature(model.forward).parameters, bare.get("input_ids")
    extra_inputs: dict[str, torch.Tensor] = {}
    for name in _OPTIONAL:
        tokens = bare.get("decoder_input_ids") if name.startswith("decoder") else main
        if name not in names or name in bare or tokens is None:
            continue
        value = torch.ones_like(tokens)
        if name == "position_ids":
            value = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).clone()
        elif name == "token_type_ids":
            value = torch.zeros_like(tokens)
        else:
            value[-1, -2:] = 0
        try:
            _run(model, {**bare, **extra_inputs, name: value})
        except Exception:  # noqa: BLE001, S112 - it does not take this one
            continue
        extra_inputs[name] = value
    return extra_inputs


def _is_same(model: nn.Module, cut: _Cut, batch: Mapping[str, Any]) -> bool:
    """True if the stages apply the operations of the model to its weights and to the batch."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    other = tree_map_only(torch.Tensor, torch.clone, batch)
    named = {**weights, **_named("batch", batch), **_named("other", other)}
    with OperationTrace(named) as trace:
        mask = {"attention_mask": _ready_mask(batch[cut.inputs.main])} if cut.inputs.has_ready_mask else {}
        expected = trace.digests_of(result_of(_run(model, {**batch, **mask})))
    stages = [TransformersStage(model, cut, number) for number in range(len(cut.ranges))]
    try:
        with OperationTrace(named) as trace:
            actual = trace.digests_of(_run_stages(stages, cut.inputs, batch, other)[0])
    except Exception:  # noqa: BLE001 - a forward that reads something that a stage does not have
        return False
    return bool(actual == expected)


def _named(prefix: str, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{prefix} {name}": value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _run_stages(stages: Sequence[TransformersStage], inputs: _Inputs, *batches: Mapping[str, Any]) -> list[Any]:
    """The results of batches that run alternately, as in a pipeline: blocks may then read values of another batch."""
    values = [stages[0](**batch) for batch in batches]
    for stage in stages[1:]:
        for number, batch in enumerate(batches):
            rest = {k: v for k, v in batch.items() if k != inputs.main or k in inputs.needed}
            received = values[number] if isinstance(values[number], tuple) else (values[number],)
            values[number] = stage(*received, **rest)
    return values


def _knows_positions(model: nn.Module, cut: _Cut, bare: Mapping[str, Any]) -> bool:
    """True if the model's own position ids mean one sequence per row, and no table is read with them."""
    chain = cut.chains[0]
    first = [part.module for part in chain.parts if 0 in part.calls]
    tables = [module for part in first for module in part.modules() if isinstance(module, nn.Embedding)]
    takes = "position_ids" in signature(model.get_submodule(chain.runs).forward).parameters
    is_text = set(bare) == {"input_ids"} and model.config.get_text_config() is model.config
    if not (len(cut.chains) == 1 and len(tables) == 1 and takes and is_text):
        return False
    if bare["input_ids"].is_meta:
        return True
    results = []
    for knows in (False, True):
        torch.manual_seed(0)
        inputs = replace(cut.inputs, knows_positions=knows)
        stages = [TransformersStage(model, replace(cut, inputs=inputs), number) for number in range(len(cut.ranges))]
        try:
            results += _run_stages(stages, inputs, bare)
        except Exception:  # noqa: BLE001 - its forward takes position ids of another form
            return False
    return bool(torch.equal(*results))
