"""Pictures of schedules: the drawn parts, their positions, and omissions."""

import re

from pipeproof.schedule.ops import parse_op
from pipeproof.schedule.programs import Schedule, asap, even_costs
from pipeproof.views.schedule_svg import schedule_svg


def picture(*programs, pairs=(), costs=None, title="t"):
    schedule = Schedule(tuple(tuple(map(parse_op, program.split())) for program in programs), pairs)
    num_stages = 1 + max((op.stage for program in schedule.programs for op in program), default=0)
    return schedule_svg(asap(schedule, costs or even_costs(num_stages)), title)


def blocks(svg):
    """Class, x, y, width, height of every block."""
    found = re.findall(r'<rect class="([FBIW]\d)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"/>', svg)
    return [(look, *map(float, numbers)) for look, *numbers in found if float(numbers[3]) != 12]


def test_a_block_is_as_long_as_its_time_and_follows_the_one_before():
    (forward, backward) = blocks(picture("0F0 0B0", costs=even_costs(1, 1, 1, 1)))
    assert (forward[0], backward[0]) == ("F0", "B0")
    assert backward[3] + 1 == 2 * (forward[3] + 1)
    assert backward[1] == forward[1] + forward[3] + 1


def test_a_rank_s_second_stage_is_paler_and_the_legend_says_so():
    svg = picture("0F0 1F0 1B0 0B0")
    assert [look for look, *_ in blocks(svg)] == ["F0", "F1", "B1", "B0"]
    assert "paler: the second stage of a rank" in svg
    assert "paler" not in picture("0F0 0B0")
    three = picture("0F0 1F0 2F0 2B0 1B0 0B0")
    assert [look for look, *_ in blocks(three)] == ["F0", "F1", "F0", "B0", "B1", "B0"]
    assert "paler: every second stage of a rank" in three


def test_the_two_of_a_pair_share_a_row_the_forward_above():
    svg = picture("0F0 0F1 0B0 0B1", pairs=(frozenset({1}),))
    _, above, below, _ = blocks(svg)
    assert above[1] == below[1]
    assert above[3] == below[3]
    assert below[2] == above[2] + above[4]
    assert above[4] == below[4] == 15
    assert "one above the other: side by side" in svg


def test_pictures_grow_so_that_the_shortest_block_can_be_read_up_to_a_bound():
    def width(svg):
        return int(re.search(r'viewBox="0 0 (\d+) ', svg)[1])

    def of(num_micro_batches):
        batches = range(num_micro_batches)
        return picture(" ".join([*(f"0F{k}" for k in batches), *(f"0B{k}" for k in batches)]))

    assert width(of(1)) == width(of(8)) == 960
    assert 960 < width(of(40)) < width(of(80)) < 6100
    assert min(block[3] for block in blocks(of(40))) >= 14
    assert width(of(1000)) == width(of(2000)) == 6072


def test_the_title_is_escaped_and_names_the_makespan():
    svg = picture("0F0 0B0", title="<&>")
    assert "&lt;&amp;&gt;: step time 3" in svg
    assert "<&>" not in svg
