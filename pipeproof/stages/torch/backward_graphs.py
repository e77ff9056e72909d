"""Partition of a stage's backward graph into I and W.

I computes the gradients of the stage's inputs, and makes the calls of the backward. W computes products that only
weights need (matrix products, convolutions, rows of an embedding) and values that follow from them. A minimum cut
places operations that both could compute where fewer bytes are kept between I and W. A reduction to the small gradient
of a norm or a bias is in I, where it is fused with the operations that make its operands. For silu(a) * b the result is
kept, or a and b if W reads these anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "convolution_backward",
    "embedding_dense_backward", "_embedding_bag_dense_backward", "index_put", "_unsafe_index_put", "index_add",
    "scatter_add", "scatter_reduce",
}  # fmt: skip
"""ATen operations that are left to W if only weights need them."""

_CONVERSIONS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}  # noqa: SLF001 - an operation


@dataclass(frozen=True, slots=True)
class Addend:
    """One addition to the gradient of a weight by W.

    ``weight`` is the position of the weight in the forward's inputs. ``outputs`` are positions in W's outputs: of a
    gradient, or of the two factors of a product. Both are transposed before they are added if ``is_transposed``.
    ``is_fresh`` is True for memory that W allocated for this addend alone.
    """

    weight: int
    outputs: tuple[int, ...]
    is_transposed: bool
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class BackwardGraphs:
    """I and W of one backward.

    I has the backward's inputs. It returns the gradients of the forward's inputs at ``gradients``, then its values for
    W. W takes the backward's inputs at ``direct``, then I's values for it.
    """

    input_graph: fx.GraphModule
    gradients: tuple[int, ...]
    weight_graph: fx.GraphModule
    direct: tuple[int, ...]
    addends: tuple[Addend, ...]


def split_backward(backward: fx.GraphModule, weights: AbstractSet[int], *, in_product: bool) -> BackwardGraphs:
    """Partition a backward graph, whose outputs are the gradients of the forward's inputs.

    ``weights`` are the positions of the trained weights among them. With ``in_product`` W returns the factors of a
    gradient that is a matrix product, or a sum of some; else it returns gradients as autograd has them.

    Raises:
        ValueError: the graph writes into its inputs.
    """
    for node in backward.graph.nodes:
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            raise ValueError(f"its backward writes into a tensor ({node.target})")
    _divide_convolutions(backward.graph)
    outputs: Sequence[Any] = backward.graph.output_node().args[0]
    of_weights = {n: x for n, x in enumerate(outputs) if n in weights and isinstance(x, fx.Node)}
    of_inputs = {n: x for n, x in enumerate(outputs) if n not in weights and isinstance(x, fx.Node)}
    shared = _ancestors(of_inputs.values()) if of_inputs else _of_several(backward.graph, of_weights)
    rest = {node for node in backward.graph.nodes if node.op == "call_function"} - shared
    terms = [
        (n, term)
        for n, value in of_weights.items()
        for term in (_terms(value, rest) if in_product else [_Term((value,), is_transposed=False)])
    ]
    results = list(dict.fromkeys(value for _, term in terms for value in term.values))
    order = {node: index for index, node in enumerate(backward.graph.nodes)}
    kept = [_reshaped(node) if node in rest else node for node in _smallest_cut(results, rest, order)]
    kept.sort(key=order.__getitem__)
    places = [node for node in backward.graph.nodes if node.op == "placeholder"]
    direct, computed = ([n for n in kept if (n.op == "placeholder") is is_input] for is_input in (True, False))
    bases = [base_of(value) for _, term in terms for value in term.values]
    kept_bases = {*map(base_of, kept)}
    addends = [
        Addend(n, tuple(map(results.index, t.values)), t.is_transposed, _is_fresh(t.values[0], bases, kept_bases))
        for n, t in terms
    ]
    return BackwardGraphs(
        _graph_of(backward, places, [*of_inputs.values(), *computed]), tuple(of_inputs),
        _graph_of(backward, [*direct, *computed], results), tuple(map(places.index, direct)), tuple(addends),
    )  # fmt: skip


def bytes_of(node: fx.Node) -> int:
    """Size of the tensor that a node returns."""
    value = node.meta["val"]
    return prod(map(int, value.shape)) * int(value.element_size())


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node returns: its argument's, if it is a view."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _divide_convolutions(graph: fx.Graph) -> None:
    """Make the backward of each convolution two: one of its input, and one of its weight and bias."""
    for node in list(graph.nodes):
        if node.target is aten.convolution_backward.default and node.args[-1][0] and any(node.args[-1][1:]):
            *args, mask = node.args
            with graph.inserting_after(node):
                of_weight = graph.call_function(node.target, (*args, [False, *mask[1:]]))
            of_weight.meta = dict(node.meta)
            for user in [user for user in node.users if user.args[1]]:
                user.replace_input_with(node, of_weight)
            node.args = (*args, [True, False, False])


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # of the views that one operation returns
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function" and schema is not None and len(node.all_input_nodes) == 1
        and len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    )  # fmt: skip


def _is_fresh(value: fx.Node, bases: Sequence[fx.Node], kept_bases: AbstractSet[fx.Node]) -> bool:
    base = base_of(value)
    return base.op == "call_function" and base not in kept_bases and bases.count(base) == 1


@dataclass(frozen=True, slots=True)
class _Term:
    """An addend of a gradient: its value, or the two factors of it."""

    values: tuple[fx.Node, ...]
    is_transposed: bool


def _terms(value: fx.Node, rest: AbstractSet[fx.Node], *, is_transposed: bool = False) -> Iterator[_Term]:
    """The addends of a gradient in the order of their sum, as factors if they are matrix products of W."""
    node, turned = value, is_transposed
    while node in rest and len(node.users) == 1:
        args = node.args
        if node.target is aten.mm.default or (node.target is aten.bmm.default and not turned):
            yield _Term((args[0], args[1]), turned)
            return
        if node.target is aten.add.Tensor and not node.kwargs and all(_is_like(x, node) for x in args):
            for part in args:
                yield from _terms(part, rest, is_transposed=turned)
            return
        if node.target is aten.t.default or (node.target is aten.permute.default and list(args[1]) == [1, 0]):
            turned = not turned
        elif node.target not in _CONVERSIONS or bytes_of(args[0]) > bytes_of(node):
            break
        node = args[0]
    yield _Term((value,), is_transposed)


def _is_like(value: Any, node: fx.Node) -> bool:
    return isinstance(value, fx.Node) and value.meta["val"].shape == node.meta["val"].shape


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    ancestors, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in ancestors:
            ancestors.add(node)
            waiting += node.all_input_nodes
    return ancestors


def _of_several(graph: fx.Graph, gradients: Mapping[int, fx.Node]) -> set[fx.Node]:
    """The nodes that gradients of several weights need: these make up I if no input has a gradient.

    A convolution's weight and bias are not several.
    """
    reached: dict[fx.Node, set[int]] = {}
    for number, value in gradients.items():
        reached.setdefault(value, set()).add(number)
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes if node in reached else ():
            reached.setdefault(source, set()).update(reached[node])
    return {node for node, numbers in reached.items() if len(numbers) > 1 and not _is_of_weight(node)}


def _is_of_weight(node: fx.Node) -> bool:
    return node.target is aten.convolution_backward.default and not node.args[-1][0]


def _smallest_cut(
    results: Sequence[fx.Node], rest: AbstractSet[fx.Node], order: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """The values from which W computes its results: the fewest bytes, with all products of ``rest`` in W.

    Forward inputs count as no bytes: they are there anyway.
    """
    import networkx as nx  # PyTorch's partitioner needs it too; only graphs pay for its import

    needed = sorted(_ancestors(results) & rest, key=order.__getitem__)
    in_weight = {node for node in needed if getattr(node.target, "_opname", None) in _PRODUCTS}
    for node in needed:
        if any(source in in_weight for source in node.all_input_nodes):
            in_weight.add(node)
    ends = {x for x in results if x not in in_weight}
    ends |= {source for node in in_weight for source in node.all_input_nodes if source not in in_weight}
    network: Any = nx.DiGraph()
    waiting, seen = sorted(ends, key=order.__getitem__), set()
    network.add_nodes_from(["I", "W"])
    network.add_edges_from([((node, "made"), "W") for node in waiting])
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        is_source = node.op != "call_function" or (node not in rest and not _is_view(node))
        if is_source and node.op != "get_attr":
            network.add_edge("I", (node, "read"))
        if isinstance(node.meta.get("val"), torch.Tensor) and (is_source or not _is_view(node)):
            network.add_edge((node, "read"), (node, "made"), capacity=_cost(node))
        else:
            network.add_edge((node, "read"), (node, "made"))
        for source in () if is_source else node.all_input_nodes:
            network.add_edge((source, "made"), (node, "read"))
            waiting.append(source)
    before, _ = nx.minimum_cut(network, "I", "W")[1]
    return [node for node in seen if (node, "read") in before and (node, "made") not in before]


def _reshaped(value: fx.Node) -> fx.Node:
    """The shape in which W alone reads a value: of a sum that kept its dims, the gradient of a norm's weight."""
    while len(value.users) == 1:
        user = next(iter(value.users))
        if user.target not in _RESHAPES:
            break
        value = user
    return value


_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.squeeze.dims}  # noqa: SLF001 - an operation


def _cost(node: fx.Node) -> int:
    """Bytes that are kept for a value; at least one: W then recomputes nothing without a gain."""
    return 0 if node.op == "placeholder" and node.name.startswith("primals") else max(1, bytes_of(node))


def _graph_of(root: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph from some of its values to others."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
    needed, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in copies:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in root.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(root, graph)
