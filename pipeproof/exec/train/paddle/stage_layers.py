"""The layers of a rank's stages, from a Fleet ``PipelineLayer`` or from a list that this module cuts and builds.

A list is built as a ``PipelineLayer`` builds it: layer I after ``paddle.seed(1234 + I)``. Its weights then have the
same values on any partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SegmentLayers
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import kind_text
from pipeproof.exec.train.stage_edges import PassedEdges

Tensor: TypeAlias = paddle.Tensor
LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
_FIRST_SEED = 1234
"""``PipelineLayer._base_seed``."""


@dataclass(frozen=True, slots=True)
class LayerItem:
    """One entry of the list of layers on this rank: its position in the list, and its layer (None for a function).

    ``shared`` has the weights that Fleet shares with other entries: the key and attribute of each, by its name in the
    layer.
    """

    position: int
    module: nn.Layer | None
    shared: Mapping[str, str]


class StageLayers(Protocol):
    """The stages of one rank."""

    layers: nn.Layer
    """All layers of the rank."""
    losses: Sequence[LossFunction | None]
    numbers: tuple[int, ...]
    """Global numbers of the rank's stages."""
    parts: Sequence[int]
    """Stage S has the entries ``parts[S]`` to ``parts[S + 1] - 1`` of the list."""

    def call(self, number: int, value: Any, **edges: Tensor) -> Any:
        """Run a stage on the value that the stage before it returned, and on the edges that it uses."""

    def module(self, number: int) -> nn.Layer:
        """The layers of one stage."""

    def items(self, number: int) -> list[LayerItem]:
        """The entries of one stage."""


class FleetStages:
    """The stages of a ``PipelineLayer`` that Fleet has cut and built."""

    def __init__(self, layers: PipelineLayer) -> None:
        self.layers = layers
        self.losses: Sequence[LossFunction | None] = list(layers._loss_fn)  # noqa: SLF001 - Fleet's own classes read these
        self.parts: Sequence[int] = layers.segment_parts
        self._is_chunked = layers._use_dualpipev or layers._num_virtual_pipeline_stages > 1  # noqa: SLF001
        rank, num_ranks = layers._stage_id, layers._num_stages  # noqa: SLF001
        if layers._use_dualpipev:  # noqa: SLF001
            self.numbers: tuple[int, ...] = (rank, 2 * num_ranks - 1 - rank)
        else:
            num_chunks = layers._num_virtual_pipeline_stages  # noqa: SLF001
            self.numbers = tuple(range(rank, num_ranks * num_chunks, num_ranks))

    def call(self, number: int, value: Any, **_: Tensor) -> Any:
        """Run a stage, with the ``PipelineLayer``'s recomputation."""
        return self.layers.forward(value, chunk_id=self.numbers.index(number) if self._is_chunked else None)

    def module(self, number: int) -> nn.Layer:
        """The layers of one stage."""
        return self.layers._model_chunks[self.numbers.index(number)] if self._is_chunked else self.layers  # noqa: SLF001

    def items(self, number: int) -> list[LayerItem]:
        """The entries of one stage.

        Raises:
            PipelineError: Fleet has grouped entries into CUDA graphs.
        """
        module = self.module(number)
        functions = module.get_run_function() if self._is_chunked else self.layers.run_function
        first, end = self.parts[number], self.parts[number + 1]
        if len(functions) != end - first:
            raise PipelineError("the entries of a PipelineLayer with use_cudagraph are not known one by one")
        described = self.layers._layers_desc  # noqa: SLF001
        return [_item(position, described[position], each) for position, each in enumerate(functions, first)]


class ListStages:
    """The stages of a list of layers, functions and Fleet's descriptions; this rank builds only its own stages.

    ``parts``: see ``StageLayers``. State dicts name a layer by its position in the list.
    """

    def __init__(
        self, layers: Sequence[Any], parts: Sequence[int], numbers: Sequence[int], losses: Sequence[LossFunction | None]
    ) -> None:
        self.parts, self.numbers, self.losses = parts, tuple(numbers), losses
        self.layers = nn.Layer()
        self._shared = nn.LayerDict()
        self._modules: dict[int, nn.Layer] = {}
        self._functions: dict[int, list[Any]] = {}
        self._described = layers
        state, tracked = paddle.get_rng_state(), get_rng_state_tracker().get_states_tracker()
        for number in numbers:
            self._build(number)
        paddle.set_rng_state(state)
        get_rng_state_tracker().set_states_tracker(tracked)
        if self._shared:
            self.layers.add_sublayer("shared_layers", self._shared)

    def _build(self, number: int) -> None:
        stage = self._modules[number] = nn.Layer()
        functions: list[Any] = []
        for position in range(self.parts[number], self.parts[number + 1]):
            described = self._described[position]
            paddle.seed(_FIRST_SEED + position)
            if isinstance(described, SharedLayerDesc):
                key = described.layer_name
                if key not in self._shared:
                    self._shared[key] = described.build_layer()
                shared = self._shared[key]
                stage.add_sublayer(f"shared_layers.{key}", shared)
                functions.append(shared if described.forward_func is None else partial(described.forward_func, shared))
                continue
            built = described.build_layer() if isinstance(described, LayerDesc) else described
            if isinstance(built, nn.Layer):
                self.layers.add_sublayer(str(position), built)
                stage.add_sublayer(str(position), built)
            functions.append(built)
        self._functions[number] = functions

    def call(self, number: int, value: Any, **edges: Tensor) -> Any:
        """Run the entries of a stage, each on the result of the entry before it; the first one also on the edges."""
        first, *others = self._functions[number]
        value = first(value, **edges)
        for function in others:
            value = function(value)
        return value

    def module(self, number: int) -> nn.Layer:
        """The layers of one stage."""
        return self._modules[number]

    def items(self, number: int) -> list[LayerItem]:
        """The entries of one stage."""
        functions = enumerate(self._functions[number], self.parts[number])
        return [_item(position, self._described[position], function) for position, function in functions]


def call_with_edges(edges: PassedEdges, call: Callable[..., Any], value: Any) -> Any:
    """Call a stage with its edges: its input is one tensor, a tuple, or a dict, as the stage before returned it.

    Raises:
        PipelineError: the stage does not return the tensor of an edge that it makes.
    """
    arrived: dict[str, Tensor] = {}
    if edges.is_named:
        positional, named, arrived = edges.split(value)
        leaves = [*positional, *named.values()]
        value = leaves[0] if len(leaves) == 1 else named or tuple(positional)
    output = edges.output(call(value, **{name: arrived[name] for name in edges.used}), arrived, paddle.Tensor)
    if not edges.leaving:
        return output
    first = {id(tensor): name for name, tensor in reversed(output.items())}  # a backward takes each tensor once
    return {name: tensor if first[id(tensor)] == name else tensor.clone() for name, tensor in output.items()}


def _item(position: int, described: Any, function: Any) -> LayerItem:
    module = function.args[0] if isinstance(described, SharedLayerDesc) and isinstance(function, partial) else function
    if not isinstance(module, nn.Layer):
        return LayerItem(position, None, {})
    return LayerItem(position, module, _shared_weights(described, module))


def _shared_weights(described: Any, module: nn.Layer) -> dict[str, str]:
    """``KEY.ATTRIBUTE`` of the weights that an entry shares, by their names in its layer."""
    if not isinstance(described, SharedLayerDesc):
        return {}
    by_name: dict[str, str] = {}
    for attribute in described.shared_weight_attr:
        weight: Any = module
        for part in attribute.split("."):
            weight = getattr(weight, part)
        names = [name for name, each in module.named_parameters() if each is weight]
        if not names:
            raise PipelineError(f"`{attribute}` of the shared layer `{described.layer_name}` is not a parameter")
        by_name[names[0]] = f"{described.layer_name}.{attribute}"
    return by_name


def trained(module: nn.Layer | None) -> dict[str, Tensor]:
    """The parameters that the optimizer updates, by their names in the layers."""
    if module is None:
        return {}
    return {name: weight for name, weight in module.named_parameters() if not weight.stop_gradient}


def require_layers(layers: Any) -> None:
    """Refuse a wrong list of layers before one of its entries fails in a step.

    Raises:
        PipelineError: it is not a list, or has an entry of another kind.
    """
    if isinstance(layers, PipelineLayer):
        return
    if not isinstance(layers, list | tuple | nn.Sequential | nn.LayerList):
        raise PipelineError(
            f"the layers are {kind_text(layers)}: give a PipelineLayer, or a list of layers and LayerDesc"
        )
    for position, entry in enumerate(layers):
        if isinstance(entry, type):
            fix = f"give LayerDesc({entry.__name__}, ..)"
            raise PipelineError(
                f"layers[{position}] is the class {entry.__name__}: {fix}, and each rank builds its own"
            )
        if not callable(entry) and not isinstance(entry, LayerDesc):
            raise PipelineError(f"layers[{position}] is {kind_text(entry)}: give a layer, a function or a LayerDesc")


def require_tied_on_one_rank(described: Sequence[Any], stages: StageLayers) -> None:
    """Refuse a layer that the list has twice on this rank and on another: each rank would train its own copy.

    Raises:
        PipelineError: another rank has another stage of it.
    """
    users: dict[int, dict[int, str]] = {}
    for number, (first, end) in enumerate(pairwise(stages.parts)):
        for position in range(first, end):
            entry = described[position]
            for name, weight in trained(entry if isinstance(entry, nn.Layer) else None).items():
                users.setdefault(id(weight), {}).setdefault(number, f"`{name}` of layer {position}")
    for names in users.values():
        if names.keys() & set(stages.numbers) and not names.keys() <= set(stages.numbers):
            raise PipelineError(
                f"{' and '.join(names.values())} are one weight, and their stages {', '.join(map(str, names))} are on "
                "several ranks: give a SharedLayerDesc in each place"
            )


def cut_layers(layers: Sequence[Any], num_stages: int, method: str | Sequence[int]) -> list[int]:
    """The first entry of each stage, and the number of entries, by Fleet's ``seg_method``.

    Raises:
        PipelineError: the method does not fit the layers.
    """
    if len(layers) < num_stages:
        raise PipelineError(f"{len(layers)} layers cannot be cut into {num_stages} stages")
    try:
        parts = SegmentLayers(list(layers), num_stages, method if isinstance(method, str) else [*method]).do_segment()
    except (AssertionError, ValueError) as error:
        raise PipelineError(
            f"seg_method {method!r} does not cut {len(layers)} layers into {num_stages}: {error}"
        ) from None
    return [int(part) for part in parts]


def ties_of(stages: StageLayers) -> dict[str, dict[int, str]]:
    """This rank's weights that several stages use, each as {stage: name in that stage}, by a key that ranks share.

    Fleet's shared weights are known by their key and attribute. A parameter that only stages of this rank use has a key
    of its own.
    """
    keys: dict[int, str] = {}
    for number in stages.numbers:
        for item in stages.items(number):
            for name, key in item.shared.items():
                assert item.module is not None
                keys[id(trained(item.module).get(name))] = key
    users: dict[int, dict[int, str]] = {}
    for number in stages.numbers:
        for name, weight in trained(stages.module(number)).items():
            users.setdefault(id(weight), {})[number] = name
    return {
        keys.get(weight, f"of stages {min(names)}: {names[min(names)]}"): names
        for weight, names in users.items()
        if weight in keys or len(names) > 1
    }


def declared_entries(skeleton: Mapping[str, Any], num_stages: int, num_entries: int) -> list[int] | None:
    """The first entry of each stage by the names in the plan's ``stages``, and the number of entries.

    None if the plan names no stages.

    Raises:
        PipelineError: the plan has other layers than the list.
    """
    stages, layers = skeleton.get("stages"), skeleton["model"].get("layers")
    if not isinstance(stages, list | tuple):
        return None
    sizes = [len(names) for names in stages]
    if len(stages) != num_stages or sum(sizes) != num_entries:
        raise PipelineError(
            f"the plan's `stages` have {sum(sizes)} layers in {len(stages)} stages, and the list has {num_entries} "
            f"layers for {num_stages} stages"
        )
    if layers and [layer["name"] for layer in layers] != [name for names in stages for name in names]:
        raise PipelineError("the plan's `stages` name other layers than its model, or in another order")
    parts = [0]
    for size in sizes:
        parts.append(parts[-1] + size)
    return parts


def declared_names(stages: StageLayers, number: int, skeleton: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The weights of a stage by the names of a plan that declares every entry; None if the plan declares no layers.

    Raises:
        PipelineError: the plan has neither one layer for each entry nor one for each stage.
    """
    layers = skeleton["model"].get("layers")
    num_stages = len(stages.parts) - 1
    if not layers or (len(layers) == num_stages and stages.parts[-1] != num_stages):
        return None
    if len(layers) != stages.parts[-1]:
        raise PipelineError(
            f"the plan declares {len(layers)} layers, and the script has {stages.parts[-1]} in {num_stages} stages"
        )
    owners = {f"{layer['name']}.{weight['name']}" for layer in layers for weight in layer.get("parameters", ())}
    named: dict[str, Tensor] = {}
    for item in stages.items(number):
        layer = layers[item.position]
        borrowed = list(layer.get("borrows", ()))
        for name, weight in trained(item.module).items():
            full = f"{layer['name']}.{name}"
            if full not in owners and name in item.shared and borrowed:
                full = borrowed[[*item.shared].index(name)]
            named[full] = weight
    return named
