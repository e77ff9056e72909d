"""A naming convention: the tool's name for each role of a tensor in the model.

``convention_tensors`` lists the roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BIAS = "_bias"
"""Suffix of a weight's role, for the role of its bias."""

OWN_NAMES = "pipeproof"
"""The name of the convention of pipeproof itself."""


@dataclass(frozen=True, slots=True)
class Convention:
    """Names and layouts of one model's tensors in one tool.

    ``whole`` has the names of tensors that exist once; ``block`` the suffixes of ``block_name`` in a block, ``module``
    the suffixes of ``module_name`` in a module of multi-token prediction; the names in its block follow
    ``module_block``. In names, ``{number}`` counts blocks or modules, ``{after}`` modules behind the last block,
    ``{expert}`` experts of the whole model. Matrices are [out, in] if ``transposed``, else [in, out]; the embedding is
    [vocabulary, hidden size] everywhere, and the head, too, except in pipeproof. ``padded``: the vocabulary keeps its
    padding. ``hidden_first``: modules join hidden state and embedding in this order. ``has_tied_head``: a tied head is
    written as a copy. ``fused_by_rank`` has the roles that each tensor-parallel rank fuses from its own shards of gate
    and up; other roles are fused from the whole tensors. ``rotary_pairs``: rotary positions turn the elements 2 i and 2
    i + 1 of a head, else i and i + D/2. ``router_bias_is_row``: it is [1, experts]. A bias has the name of its weight,
    with ``bias``.
    """

    whole: Mapping[str, str]
    block: Mapping[str, str]
    module: Mapping[str, str]
    block_name: str
    module_name: str
    module_block: str
    transposed: bool
    router_transposed: bool
    head_transposed: bool = True
    padded: bool = False
    hidden_first: bool = False
    has_tied_head: bool = False
    fused_by_rank: frozenset[str] = frozenset()
    rotary_pairs: bool = False
    router_bias_is_row: bool = False

    def name_of(self, role: str, block: str, num_layers: int, expert: int | str | None = None) -> str:
        """Return the name of a tensor of pipeproof's layer ``block``.

        The layer is ``layer.3``, ``mtp.0``, or empty for tensors that exist once.
        """
        weight = role.removesuffix(BIAS)
        if weight != role and role not in {**self.block, **self.whole}:
            return "bias".join(self.name_of(weight, block, num_layers, expert).rsplit("weight", 1))
        if not block:
            return self.whole[role]
        kind, _, number = block.partition(".")
        if kind == "mtp":
            prefix = self.module_name.format(number=number, after=num_layers + int(number))
            if role in self.module:
                return f"{prefix}.{self.module[role]}"
            prefix += self.module_block
        else:
            prefix = self.block_name.format(number=number)
        return f"{prefix}.{self.block[role]}".format(expert=expert)

    def is_transposed(self, role: str) -> bool:
        """Return True if a matrix that pipeproof has as [in, out] is [out, in] in the tool."""
        if role in ("head", "module_head"):
            return self.head_transposed
        return self.router_transposed if role == "router" else self.transposed
