"""Content of a trace without a plan: the ranges of the host by name, with the work that they launched."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.interop.profiles.rank_trace import RankTrace


@dataclass(slots=True)
class RangeContent:
    """Ranges of one name: their number, and nanoseconds of work launched inside of them and of no inner range."""

    name: str
    count: int = 0
    computation_ns: int = 0
    communication_ns: int = 0

    @property
    def total_ns(self) -> int:
        """Both."""
        return self.computation_ns + self.communication_ns


def content_of(trace: RankTrace) -> list[RangeContent]:
    """Return the content by name, in order of first appearance; the last row, without a name, is outside of ranges."""
    found: dict[str, RangeContent] = {}
    ranges = [each for each in trace.ranges if not each.name.startswith("gloo:")]
    for named in ranges:
        found.setdefault(named.name, RangeContent(named.name)).count += 1
    outside = RangeContent("")
    stack: list[tuple[int, str]] = []
    place = 0
    for work in trace.work:
        while place < len(ranges) and ranges[place].start_ns <= work.launched_ns:
            stack.append((ranges[place].end_ns, ranges[place].name))
            place += 1
        while stack and stack[-1][0] < work.launched_ns:
            stack.pop()
        row = found[stack[-1][1]] if stack else outside
        if work.is_communication:
            row.communication_ns += work.end_ns - work.start_ns
        else:
            row.computation_ns += work.end_ns - work.start_ns
    return [*found.values(), outside]
