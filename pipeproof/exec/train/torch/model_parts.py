"""Parts of a model of ``transformers``: chains of blocks, and the modules outside of them, as a forward uses them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from pipeproof.exec.train.torch.partial_modules import BlockOutput, hidden_of
from pipeproof.exec.train.torch.product_counter import ProductCounter


class NotCutError(ValueError):
    """The model has something that stages would not compute, or an unknown structure."""


@dataclass
class Part:
    """A module outside of the blocks, with the numbers of blocks that had run when it was called, and its outputs."""

    module: nn.Module
    names: list[str]
    calls: set[int] = field(default_factory=set)
    output: Any = None

    @property
    def has_weights(self) -> bool:
        """True if it has a parameter."""
        return any(True for _ in self.module.parameters())


@dataclass
class Chain:
    """Blocks that a forward calls one after the other, and what was observed of that forward.

    Observed tensors are on the meta device: they have shapes and types alone.
    """

    name: str
    """The name of the list of blocks in the model."""
    blocks: list[nn.Module]
    inner: str
    """The name of the encoder or decoder; empty for the model itself."""
    runs: str
    """The name of the module that a stage without the head runs."""
    parts: list[Part] = field(default_factory=list)
    outputs: list[BlockOutput] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """The tensors of each block's output."""
    entry: torch.Tensor | None = None
    """The hidden states that the first block gets."""
    work: list[int] = field(default_factory=list)
    """FLOPs before the first block, of each block, and after the last one."""


def chains_of(model: nn.Module) -> list[Chain]:
    """The chain of blocks of a model; of an encoder and a decoder with cross attention, both.

    Raises:
        NotCutError: There is no such list.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise NotCutError("it is not a model of transformers with a `config`")
    if getattr(config, "output_router_logits", False):
        raise NotCutError(
            "config.output_router_logits is set: the router loss needs the router logits of all blocks, which stages "
            "do not pass on. Set model.config.output_router_logits = False and train without that loss"
        )
    if getattr(config, "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        encoder, decoder = model.get_encoder(), model.get_decoder()
        names = {id(module): name for name, module in model.named_modules()}
        if id(encoder) in names and id(decoder) in names and encoder is not decoder:
            first, second = names[id(encoder)], names[id(decoder)]
            return [_chain(model, first, first), _chain(model, second, _base_of(model, second))]
    return [_chain(model, "", "")]


def _base_of(model: nn.Module, name: str) -> str:
    """The name of the base model, if it contains the module of that name; else empty, the name of the model."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if prefix and name.startswith(f"{prefix}.") else ""


def _chain(model: nn.Module, root: str, runs: str) -> Chain:
    candidates = [(name, blocks) for name, blocks in _lists(model.get_submodule(root), root)]
    sizes = _numbers_of_blocks(model.config, is_decoder=not root or model.get_submodule(root) is model.get_decoder())
    exact = [each for each in candidates if len(each[1]) in sizes]
    if len(exact) > 1:  # images and sound have encoders of their own
        inner = model.get_decoder() if hasattr(model, "get_decoder") else None
        within = {id(module) for module in inner.modules()} if inner is not None else set()
        exact = [each for each in exact if id(each[1]) in within] or exact
    if len(exact) != 1:
        lists = ", ".join(f"`{name}` of {len(blocks)}" for name, blocks in candidates) or "none"
        number = " or ".join(map(str, sorted(sizes))) or "config.num_hidden_layers"
        raise NotCutError(f"it needs one list of {number} blocks, such as `model.layers`; its lists: {lists}")
    name, blocks = exact[0]
    if len({id(block) for block in blocks}) < len(blocks):
        raise NotCutError(f"a block is in `{name}` more than once")
    return Chain(name, list(blocks), root, runs or _base_of(model, name))


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(child, nn.ModuleList) and len(child):
            yield full, child
        else:
            yield from _lists(child, full)


def _numbers_of_blocks(config: Any, *, is_decoder: bool) -> set[int]:
    text = config.get_text_config(decoder=is_decoder) if hasattr(config, "get_text_config") else config
    names = ("num_hidden_layers", *(("decoder_layers", "num_decoder_layers") if is_decoder else ("encoder_layers",)))
    values = [getattr(text, name, None) for name in names]
    return {value for value in values if isinstance(value, int)}


def add_parts(model: nn.Module, chains: list[Chain]) -> None:
    """Find the modules outside of the blocks: all that contain no chain, the outermost ones.

    Raises:
        NotCutError: A module around the blocks has a parameter of its own.
    """
    lists = {chain.name for chain in chains}
    around = {""}
    for name in lists:
        pieces = name.split(".")
        around |= {".".join(pieces[:end]) for end in range(1, len(pieces))}
    parts: dict[int, tuple[nn.Module, list[str]]] = {}
    for name in sorted(around, key=len):
        module = model.get_submodule(name)
        if "forward" in vars(module):
            raise NotCutError(
                f"the forward of `{name or type(module).__name__}` was replaced, as accelerate does for a `device_map`"
                ": cut the model before that, or load it without a `device_map`"
            )
        if getattr(module, "layerdrop", 0.0) > 0:
            raise NotCutError(f"it leaves out blocks at random: set model.{name}.layerdrop = 0.0 before the cut")
        own = list(module._parameters)  # noqa: SLF001 - its own, not those inside
        if own:
            raise NotCutError(f"`{name or type(model).__name__}` has parameters of its own: {', '.join(own)}")
        for child, part in module.named_children():
            full = f"{name}.{child}" if name else child
            if full not in around and full not in lists:
                parts.setdefault(id(part), (part, []))[1].append(full)
    for chain in chains:
        chain.parts = [Part(part, names) for part, names in parts.values()]


@contextmanager
def observed(chain: Chain) -> Iterator[None]:
    """Within it, one forward of the model fills the chain's outputs and FLOPs, and its parts' calls.

    Raises:
        NotCutError: The blocks were called in another order, or a module with weights was called between blocks.
    """
    numbers = {id(block): number for number, block in enumerate(chain.blocks)}
    parts = {id(part.module): part for part in chain.parts}
    called: list[int] = []
    counter = ProductCounter()
    marks = [0]
    chain.outputs, chain.tensors, chain.entry = [], [], None

    def before(module: nn.Module, args: Any) -> None:
        number = numbers.get(id(module))
        if number is not None:
            called.append(number)
            marks.append(counter.total)
            if not number:
                chain.entry = _form(hidden_of(args, {}))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in numbers:
            if numbers[id(module)] == len(chain.blocks) - 1:
                marks.append(counter.total)
            form = BlockOutput.of(output)
            chain.outputs.append(form)
            chain.tensors.append(tuple(map(_form, form.tensors_of(output))))
        elif id(module) in parts:
            parts[id(module)].calls.add(len(called))
            if parts[id(module)].output is None:
                parts[id(module)].output = tree_map(_form, output)

    handles = [global_hooks.register_module_forward_pre_hook(before), global_hooks.register_module_forward_hook(after)]
    try:
        with counter:
            yield
    finally:
        for handle in handles:
            handle.remove()
    chain.work = [after - before for before, after in pairwise((*marks, counter.total))]
    if called != list(range(len(chain.blocks))):
        raise NotCutError(f"its forward does not call each block of `{chain.name}` once, in order")
    between = [part.names[0] for part in chain.parts if part.has_weights and part.calls - {0, len(chain.blocks)}]
    if between:
        raise NotCutError(f"its forward calls modules with weights between blocks: {', '.join(between)}")


def _form(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


_OF_THE_FORM = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "zeros_like",
}  # fmt: skip
"""Operations that read only shape and type of their first argument."""


class OperationTrace(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped
    """A mode in which each tensor gets a digest of the operation that made it, and of the operation's inputs.

    Two runs give tensors of one digest exactly if they apply the same operations to the same weights and inputs,
    ``named``. Values do not matter: this works on the meta device, with zeros among the weights, and with dropout.
    """

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._digests = WeakTensorKeyDictionary()
        self._written: dict[int, tuple[torch.UntypedStorage, str]] = {}
        """Memory that operations wrote to, with the digest of all writes."""
        for name, tensor in named.items():
            self._digests.setdefault(tensor, _digest("named", name))

    def digest_of(self, tensor: torch.Tensor) -> str:
        """The digest of a tensor; for a constant of the code, the digest of its values."""
        digest = self._digests.get(tensor)
        if digest is None:
            values = None if tensor.is_meta else tensor.detach().cpu().flatten().tolist()
            digest = self._digests[tensor] = _digest("constant", tensor.dtype, tuple(tensor.shape), values)
        written = self._written.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - identity of the memory
        return digest if written is None else _digest(digest, written[1])

    def digests_of(self, value: Any) -> list[str]:
        """The digests of all tensors in a value."""
        return [self.digest_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read: Any = tree_map(self._described, (args, kwargs))
        if func.__name__.split(".")[0] in _OF_THE_FORM:
            read = (tuple(args[0].shape), args[0].dtype, read[0][1:], read[1])
        digest = _digest(func, read)
        result = func(*args, **kwargs)
        before = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in before:
                self._digests[leaf] = _digest(digest, position)
        for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001 - no public query
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._write(value, digest)
        for argument in func._schema.arguments:  # noqa: SLF001
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._write(kwargs[argument.name], digest)
        return result

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.digest_of(leaf)
        return "generator" if isinstance(leaf, torch.Generator) else leaf

    def _write(self, value: Any, digest: str) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                earlier = self._written.get(storage._cdata, (storage, ""))[1]  # noqa: SLF001
                self._written[storage._cdata] = storage, _digest(earlier, digest)  # noqa: SLF001


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


# --- Numbers of blocks that balance the work of the stages ---


@dataclass(frozen=True, order=True, slots=True)
class Balance:
    """Sizes of stages; smaller is better. The work of the largest stage is compared first.

    Then come the number of stages without blocks, the sum of the squares of the stages' work, and the number of blocks
    in stages that also have work around the blocks. ``negated`` are the sizes times -1: earlier stages are larger.
    """

    largest: int
    num_empty: int
    squares: int
    at_edges: int
    negated: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return tuple(-size for size in self.negated)


def balanced(work: Sequence[int], num_stages: int) -> Balance:
    """The best numbers of blocks of at most as many stages as blocks.

    ``work`` has the work before the blocks (in the first stage), of each block, and after the blocks (in the last
    stage). A stage has no blocks only if this reduces the work of the largest stage.
    """
    before, *blocks, after = work
    sums, last = [*accumulate(blocks, initial=0)], num_stages - 1

    def load(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + before * (stage == 0) + after * (stage == last)

    def larger(stage: int, begin: int, end: int, rest: int) -> int:
        return max(load(stage, begin, end), rest)

    def within(stage: int, begin: int, end: int, rest: tuple[Any, ...]) -> tuple[Any, ...] | None:
        own, size = load(stage, begin, end), end - begin
        if own > limit:
            return None
        has_edge = (stage == 0 and before > 0) or (stage == last and after > 0)
        num_empty, squares, at_edges, negated = rest
        return num_empty + (not size), squares + own * own, at_edges + size * has_edge, (-size, *negated)

    limits = [_least(len(blocks), num_stages, fewest, larger, 0) for fewest in (1, 0)]
    fewest, limit = (0, limits[1]) if limits[1] < limits[0] else (1, limits[0])
    return Balance(limit, *_least(len(blocks), num_stages, fewest, within, (0, 0, 0, ())))


def _least(num_blocks: int, num_stages: int, fewest: int, value: Callable[..., Any], of_none: Any) -> Any:
    """The least value of all cuts into stages of ``fewest`` blocks at least.

    ``value`` combines a stage's blocks ``begin`` to ``end - 1`` with the value of all stages after it; None if the
    stage may not have them.
    """
    rest = {num_blocks: of_none}
    for stage in reversed(range(num_stages)):
        minima = {}
        for begin in range(num_blocks + 1) if stage else [0]:
            values = [value(stage, begin, end, rest[end]) for end in rest if end - begin >= fewest]
            values = [each for each in values if each is not None]
            if values:
                minima[begin] = min(values)
        rest = minima
    return rest[0]
