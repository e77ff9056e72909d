"""Results of steps in a file, so that the memory of a run does not grow with its steps."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from pipeproof.exec.compare.compare_gradients import StepResult


class ResultsOnDisk(Sequence[StepResult]):
    """Results in the order in which they were appended; each access reads the result again.

    The file has no name, so that no other process can write into what is read, and it ends with this object.
    ``directory`` is that of the file, which may be removed before the results are read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115 - it ends with this object
        self._ends = array("q", [0])
        weakref.finalize(self, self._file.close)

    def append(self, result: StepResult) -> None:
        """Add a result.

        Raises:
            OSError: the disk of the directory is full.
        """
        try:
            self._file.seek(self._ends[-1])
            content = memoryview(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
            while content:  # a disk that is nearly full takes a part
                content = content[self._file.write(content) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._directory)) from error  # the file has no name
        self._ends.append(self._file.tell())

    def __len__(self) -> int:
        """Return the number of results."""
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> StepResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepResult]: ...

    def __getitem__(self, index: int | slice) -> StepResult | list[StepResult]:
        """Read a result, or a list of some."""
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        place = range(len(self))[index]
        self._file.seek(self._ends[place])
        content = self._file.read(self._ends[place + 1] - self._ends[place])
        result = pickle.loads(content)  # noqa: S301 - only this object can write into the file
        assert isinstance(result, StepResult)
        return result
