"""The conditions that ``schedule list`` shows are those by which the generators refuse."""

import pytest

from pipeproof.schedule.kinds import _CONDITIONS, ANY_SIZES, SCHEDULE_KINDS, Request, sizes_of
from pipeproof.schedule.programs import UnfitSizesError

VARIANTS = [(kind, variant) for kind in SCHEDULE_KINDS.values() for variant in kind.variants or (None,)]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=lambda value: getattr(value, "name", str(value)))
def test_a_schedule_exists_exactly_where_its_condition_holds(kind, variant):
    condition = sizes_of(kind.name, variant)
    for p in range(1, 7):
        for m in range(1, 4 * p + 2):
            for num_chunks in {kind.min_chunks, min(kind.min_chunks + 1, kind.max_chunks or kind.min_chunks + 1)}:
                try:
                    kind.generate(Request(p, m, num_chunks, variant=variant))
                    exists = True
                except UnfitSizesError:
                    exists = False
                holds = condition == ANY_SIZES or eval(condition, {"p": p, "m": m, "max": max})
                assert exists == holds, (p, m, num_chunks)


def test_conditions_are_of_kinds_and_variants_that_there_are():
    assert set(_CONDITIONS) <= {(kind.name, variant) for kind, variant in VARIANTS}
