"""The archives of ``torch.save`` in which PyTorch's distributed checkpoint (DCP) keeps tensors: loaded by PyTorch.

PyTorch loads them with ``weights_only=True``, which executes nothing that they name. It does not compare the CRC-32 of
their content; this module does.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeproof.diagnostics.install_command import install_extra
from pipeproof.state.state_codes import DcpError

FIX = "save the checkpoint again, or copy it again from where it was saved"


class TorchArchive(NamedTuple):
    """An archive in a checkpoint's metadata: the name and type of its tensor, the shape, and the length in bytes."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    length: int


def load_archive(content: bytes) -> Any:
    """Return the object in an archive, after a check of its CRC-32; PyTorch and the archive raise errors of any type.

    Raises:
        DcpError: PyTorch is not installed.
        Exception: The archive is damaged, or needs a pickle to be executed.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise zipfile.BadZipFile(f"{changed} has another CRC-32")
    return _torch().load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        fix = f"install PyTorch: {install_extra('torch')}"
        raise DcpError("PyTorch is not installed, which reads the tensors of its checkpoints", fix) from error
    return torch


def load_bytes(path: Path, start: int, content: bytes, expected: TorchArchive) -> npt.NDArray[np.uint8]:
    """Return the bytes of the tensor in an archive, in C order.

    Raises:
        DcpError: The archive is damaged, or has another type or shape than ``expected``; or PyTorch is not installed.
    """
    try:
        tensor = load_archive(content)
        loaded = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        elements: npt.NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(_torch().uint8).numpy()
    except DcpError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise DcpError(f"{path}: the archive of {expected.tensor} at byte {start}: {reason}", FIX) from error
    if loaded != (expected.dtype, expected.shape):
        message = (
            f"{path} has {expected.tensor} as {loaded[0]} {list(loaded[1])}, and the metadata lists {expected.dtype} "
            f"{list(expected.shape)}"
        )
        raise DcpError(message, "two saves went into one directory, or a file was changed: " + FIX)
    return elements
