"""Values of Slurm's variables: node lists, tasks per node, and a port of a job. Nothing here calls ``scontrol``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Ports that jobs get: below the range from which Linux takes a port for a connection (32768 to 60999)."""

_NODE = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_TASK_LIST = re.compile(f"{_TASKS.pattern}(?:,{_TASKS.pattern})*")

_Numbers = tuple[range, int]
"""Numbers of one range of a bracket, and the width to which each is filled with zeros."""


def expand_hosts(text: str) -> Iterator[str]:
    """Names of the hosts of a node list such as ``node[01-03,7],gpu-a``, in its order.

    The list is read before the first name is returned, but a long range takes no memory.

    Raises:
        ValueError: this is no node list; the message quotes the part that is wrong.
    """
    parts, position = [], 0
    while True:
        match = _NODE.match(text, position)
        if match is None:
            raise ValueError(f"{text[position:] or text!r} is no node list")
        parts.append(_parsed(match[0]))
        position = match.end()
        if position == len(text):
            break
        if text[position] != ",":
            raise ValueError(f"{text[position:]!r} is no node list")
        position += 1
    return (host for part in parts for host in _expanded(part))


def first_host(text: str) -> str:
    """Name of the first host of a node list."""
    return next(expand_hosts(text))


def _parsed(part: str) -> list[str | list[_Numbers]]:
    """Texts of a part of a node list, and the ranges of its brackets, alternating."""
    return [_numbers(text) if index % 2 else text for index, text in enumerate(_BRACKET.split(part))]


def _numbers(text: str) -> list[_Numbers]:
    ranges = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"[{text}] has no range {item!r}")
        ranges.append((range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])))
    return ranges


def _expanded(parts: Sequence[str | list[_Numbers]]) -> Iterator[str]:
    """Names of one part of a node list; the last bracket changes fastest."""
    if not parts:
        yield ""
        return
    first, *rest = parts
    if isinstance(first, str):
        beginnings: Iterator[str] = iter([first])
    else:
        beginnings = (f"{number:0{width}d}" for numbers, width in first for number in numbers)
    for beginning in beginnings:
        for end in _expanded(rest):
            yield beginning + end


def tasks_on_node(text: str, node: str) -> int:
    """Tasks on the node of an index, by a list of tasks per node such as ``2(x3),1``.

    Raises:
        ValueError: this is no such list, or it has no such node.
    """
    if not _TASK_LIST.fullmatch(text):
        raise ValueError(f"{text!r} is no list of tasks per node")
    index = int(node)
    for tasks, count in _TASKS.findall(text):
        index -= int(count or 1)
        if index < 0:
            return int(tasks)
    raise ValueError(f"{text!r} has no node {node}")


def port_of_step(job: str, step: str) -> int:
    """Port of a job step's master: every task derives the same one, and steps that run at once rarely share it.

    Consecutive jobs have consecutive ports. A step's distance is a prime, so that steps of a job are far apart.
    """
    return FIRST_PORT + (int(job) + 1_009 * int(step)) % NUM_PORTS
