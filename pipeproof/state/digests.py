"""MD5 of whole tensors: what two checkpoints of other topologies, and tools of other people, agree on.

Of each tensor the bytes in C order are taken, as ``hashlib.md5(array.tobytes())``
and Paddle's ``tensor._md5sum()`` do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TypeVar

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.index import TensorEntry
from pipeproof.state.stream import tensor_blocks

_MOST_AT_ONCE = 8
_Result = TypeVar("_Result")


def entry_bytes(entry: TensorEntry) -> int:
    """The bytes of a whole tensor."""
    return prod(entry.shape) * dtype_bytes(entry.dtype)


def tensor_md5s(checkpoint: Checkpoint) -> dict[str, str]:
    """By name, in the order of names, the MD5 of each whole tensor.

    Raises:
        StateError: a file cannot be read, or the parts of a tensor do not make it up.
    """

    def md5_of(name: str) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for block in tensor_blocks(checkpoint, name):
            digest.update(block.data)
        return digest.hexdigest()

    return over_tensors(md5_of, checkpoint.tensors)


def md5_lines(digests: Mapping[str, str]) -> str:
    """``name  md5``, a line each in the order of names."""
    return "".join(f"{name}  {digests[name]}\n" for name in sorted(digests))


def md5_of_all(digests: Mapping[str, str]) -> str:
    """One digest of all tensors: the MD5 of the lines of ``md5_lines``."""
    return hashlib.md5(md5_lines(digests).encode(), usedforsecurity=False).hexdigest()


def over_tensors(work: Callable[[str], _Result], tensors: Mapping[str, TensorEntry]) -> dict[str, _Result]:
    """What ``work`` gives for each tensor, in the order of names; reading and digests let other threads run."""
    largest_first = sorted(tensors, key=lambda name: (-entry_bytes(tensors[name]), name))
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        found = dict(zip(largest_first, _in_order(pool, work, largest_first), strict=True))
    return {name: found[name] for name in sorted(found)}


def _in_order(pool: ThreadPoolExecutor, work: Callable[[str], _Result], names: Iterable[str]) -> Iterable[_Result]:
    waiting = [pool.submit(work, name) for name in names]
    try:
        return [one.result() for one in waiting]
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
