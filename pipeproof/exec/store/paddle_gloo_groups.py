"""Gloo's groups of pairs of ranks, each with a store of its own.

Paddle's gloo writes the addresses of a group's members under their numbers in the group alone, without the group's. In
a store that several groups share, a member that comes early reads the address of an earlier group: it is refused, or
waits forever. With a store for each group, all groups can be made at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.distributed import collective
from paddle.distributed.communication.group import Group as PaddleGroup

from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.paddle_store import refuse_other_hosts, send_at_once, store_address
from pipeproof.exec.store.rendezvous import address_towards, reserved_ports
from pipeproof.stages.paddle.runtime import quiet_native


def gloo_pairs(wanted: Sequence[tuple[int, ...]], first_id: int, agreement: Agreement) -> dict[int, PaddleGroup]:
    """Make the groups of pairs that have this rank, by their position in ``wanted``; they have ids from ``first_id``.

    Raises:
        PipelineError: a rank cannot connect; every rank raises it.
    """
    index = agreement.rank
    stores: dict[int, Any] = {}
    groups: dict[int, PaddleGroup] = {}

    def serve() -> dict[str, tuple[str, int]]:
        own, addresses = address_towards(*store_address()), dict[str, tuple[str, int]]()
        for position, (first, _) in enumerate(wanted):
            if first == index:
                with reserved_ports(1) as (port,):
                    stores[position] = _store(own, port, serves=True)
                refuse_other_hosts(own, port)
                addresses[str(position)] = own, port
        return addresses

    reports = agreement.gather("group stores", serve)
    addresses = {int(position): (str(host), int(port)) for own in reports for position, (host, port) in own.items()}

    def find() -> None:
        for position, (_, second) in enumerate(wanted):
            if second == index:
                stores[position] = _store(*addresses[position], serves=False)

    agreement.gather("group stores, found", find)

    def make() -> None:
        send_at_once({port for _, port in addresses.values()})
        for position, ranks in enumerate(wanted):  # one order on all ranks: the first pair that is left can be made
            if index in ranks:
                groups[position] = process_group(ranks, index, "gloo", stores[position], first_id + position)

    agreement.gather("groups", make)
    return groups


def process_group(ranks: tuple[int, ...], index: int, backend: str, store: Any, group_id: int) -> PaddleGroup:
    """A process group of some ranks of the pipeline, which no function of ``paddle.distributed`` knows.

    Raises:
        NotImplementedError: Paddle has no groups for the backend.
    """
    member, name = ranks.index(index), f"pipeproof.{group_id}"
    with quiet_native():
        made = collective._new_process_group_impl(  # noqa: SLF001 - the one place that knows the devices' backends
            backend, store, member, len(ranks), name, pg_options=None, group_id=group_id
        )
    if made is None:
        raise NotImplementedError(f"Paddle has no process groups for its backend {backend}")
    return PaddleGroup(member, group_id, list(ranks), pg=made, name=name)


def _store(host: str, port: int, *, serves: bool) -> Any:
    return paddle.base.core.TCPStore(host, port, serves, 1)
