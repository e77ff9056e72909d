"""Pictures on paper: what is drawn where, that no text runs into another, and that they grow as what they show."""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from matplotlib.image import imread

from pipeproof.schedule.ops import OpKind
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.colours import COLLECTIVE, KIND_COLOURS, OTHER, colour_of
from pipeproof.views.memory_curves import Curve
from pipeproof.views.picture_rows import rows_of
from pipeproof.views.timeline_picture import MOST_MESSAGES, drawing_of, parts_of, steps_of, write_picture
from pipeproof.views.trace_slices import Slices
from tests.sim.test_trace import MEASURED
from tests.work import num_calls


def parts(timeline):
    return parts_of(Slices(timeline), rows_of(timeline))


def of_one_rank(*ops, queue="compute"):
    spans = tuple(Span(0, queue, i, op, start, end) for i, (op, start, end) in enumerate(ops))
    return Timeline(spans, ({"pp": 0},))


def test_a_block_is_where_its_operation_ran(run):
    timeline = run(p=3, m=4, tf=Fraction(1, 2), tb=2, c=1).timeline
    found = parts(timeline)
    wanted = Counter(
        (float(span.start), float(span.end), span.rank, colour_of(kind, 0, 1))
        for rank in range(3)
        for span, kind in timeline.compute_spans(rank)
    )
    drawn = Counter(
        (left, right, int(top), colour) for colour, boxes in found.boxes.items() for left, top, right, _ in boxes
    )
    assert drawn == wanted
    assert {round(bottom - top, 9) for boxes in found.boxes.values() for _, top, _, bottom in boxes} == {found.lane}


def test_blocks_of_a_row_never_overlap(run):
    found = parts(run(kind="dualpipe", p=4, m=8, tf=3, tb=5, c=1).timeline)
    boxes = [box for boxes in found.boxes.values() for box in boxes]
    assert found.has_pairs
    for row in range(4):
        mine = sorted(box for box in boxes if row <= box[1] < row + 1)
        for (_, top, right, bottom), (left, other_top, _, other_bottom) in combinations(mine, 2):
            assert left >= right or other_top >= bottom - 1e-9 or top >= other_bottom - 1e-9


def test_two_that_run_side_by_side_share_the_height():
    found = parts(of_one_rank(("0F1", 0, 4), ("0B0", 0, 4), ("0F2", 4, 5)))
    half = found.lane / 2
    assert found.boxes[colour_of(OpKind.FORWARD, 0, 1)] == [(0, 0, 4, half), (4, 0, 5, found.lane)]
    assert found.boxes[colour_of(OpKind.BACKWARD, 0, 1)] == [(0, half, 4, found.lane)]


def test_collectives_lie_at_the_foot_of_what_they_are_part_of():
    found = parts(
        of_one_rank(
            ("0F0", 0, 10), ("0F0/0.ALL_REDUCE:tp", 2, 4), ("WAIT(0RECV_B0)", 10, 12), ("0REDUCE_GRAD:dp", 12, 14),
            ("0STEP", 14, 15),
        )
    )  # fmt: skip
    (inner, alone) = found.boxes[COLLECTIVE]
    assert (inner[0], inner[2], inner[3]) == (2, 4, found.lane)
    assert inner[1] > found.lane / 2
    assert alone == (12, 0, 14, found.lane)
    ((label, *_),) = found.labels
    assert label == (0, 0, 10, inner[1])  # what is left for the text
    assert found.boxes[OTHER] == [(14, 0, 15, found.lane)]
    assert sum(map(len, found.boxes.values())) == 4  # a wait is idle time


def test_what_runs_inside_of_one_of_a_pair_lies_at_the_foot_of_that_one():
    found = parts(
        of_one_rank(("0F1", 0, 4), ("0F1/0.ALL_REDUCE:tp", 1, 2), ("0B0", 0, 4), ("0B0/0.ALL_REDUCE:tp", 2, 3))
    )
    half = found.lane / 2
    assert [(left, bottom) for left, _, _, bottom in found.boxes[COLLECTIVE]] == [(1, half), (2, found.lane)]


def test_a_pair_that_takes_turns_is_drawn_as_its_parts_above_its_exchanges():
    spans = [
        ("0F1", 0, 9), ("0B0", 0, 9), ("0B0/0.PART", 0, 2), ("0F1/0.PART", 2, 4), ("0B0/0.WEIGHTS", 5, 6),
        ("0F1/1.PART", 6, 9),
    ]  # fmt: skip
    exchanges = [("0B0/0.ALL_TO_ALL:ep", 2, 5), ("0F1/0.ALL_TO_ALL:ep", 5, 6)]
    on_queues = [("compute", *span) for span in spans] + [("ep", *span) for span in exchanges]
    found = parts(Timeline(tuple(Span(0, queue, i, *span) for i, (queue, *span) in enumerate(on_queues)), ({"pp": 0},)))
    (top, bottom), *_ = {(box[1], box[3]) for box in found.boxes[COLLECTIVE]}
    assert bottom == found.lane
    drawn = {kind: found.boxes[colour_of(kind, 0, 1)] for kind in KIND_COLOURS if colour_of(kind, 0, 1) in found.boxes}
    assert drawn == {
        OpKind.FORWARD: [(2, 0, 4, top), (6, 0, 9, top)],
        OpKind.BACKWARD: [(0, 0, 2, top)],
        OpKind.BACKWARD_WEIGHT: [(5, 0, 6, top)],
    }
    assert {(box[0], box[2]) for box in found.boxes[COLLECTIVE]} == {(2, 5), (5, 6)}
    assert [text for _, text, _ in found.labels] == ["B0", "F1", "W0", "F1"]


def test_later_stages_of_a_rank_are_paler():
    full, middle, pale = (colour_of(OpKind.FORWARD, chunk, 3) for chunk in range(3))
    assert list(parts(of_one_rank(("0F0", 0, 1), ("1F0", 1, 2), ("2F0", 2, 3))).boxes) == [full, middle, pale]


def test_messages_lead_from_send_to_receive_and_are_left_out_where_they_are_many(run):
    timeline = run(p=2, m=2, tf=1, tb=2, c=3).timeline
    found = parts(timeline)
    ends = {span.op: (float(span.start), float(span.end)) for span in timeline.spans}
    assert found.messages[0] == (ends["0SEND_F0"][0], found.lane, ends["1RECV_F0"][1], 1)
    assert (ends["1SEND_B0"][0], 1, ends["0RECV_B0"][1], found.lane) in found.messages
    many = parts(run(p=2, m=MOST_MESSAGES).timeline)
    assert many.messages == []
    assert many.lane > found.lane


def test_rows_that_stand_for_several_ranks_have_their_messages_once(run):
    assert len(parts(run(p=2, m=2, tp=2).timeline).messages) == 4


def test_curves_go_on_to_the_end():
    timeline = of_one_rank(("0F0", 5, 7), ("0B0", 7, 10))
    curve = Curve("x", "y", (((5, 3), (6, 1)),))
    assert steps_of(Slices(timeline), curve, 0, 9.0) == ([0.0, 0.0, 1.0, 9.0], [0, 3, 1, 1])


LONG = {"p": 8, "m": 24, "tf": [1, 1, 1, 1, 1, 1, 1, Fraction(5, 2)], "tb": 2, "c": Fraction(1, 3)}


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"p": 1, "m": 1}, "one"),
        ({"p": 4, "m": 8}, "a name that is longer than the picture is wide, " * 6),
        ({"p": 2, "m": 3, "tp": 2, "dp": 2, "order": ["pp", "tp", "cp", "ep", "dp"], "tf": 10**9}, "far ranks"),
        (LONG, "long"),
        ({"kind": "zb_h1", "p": 24, "m": 30}, "many rows"),
    ],
)
def test_no_text_runs_into_another_or_out_of_the_picture(run, options, title):
    simulation = run(**options)
    memory = Curve("memory held", "bytes", tuple(((0, 10**9 * (rank + 1)),) for rank in range(len(simulation.figures))))
    figure = drawing_of(simulation.timeline, title, [memory]).figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [
        *figure.texts,
        *figure.legends[0].get_texts(),
        *(text for axes in figure.axes for text in (*axes.texts, axes.yaxis.label, axes.xaxis.label)),
        *(text for axes in figure.axes for text in axes.get_yticklabels()),
        *(
            tick.label1
            for axes in figure.axes
            for tick in axes.xaxis.get_major_ticks()
            if tick.get_loc() <= axes.get_xlim()[1]
        ),
    ]
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text() and text.get_visible()
    ]
    boxes = [(text, box) for text, box in boxes if box.width and box.height]
    width, height = figure.get_size_inches() * figure.dpi
    assert len(boxes) > 8
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for (one, box), (other, its) in combinations(boxes, 2):
        apart = box.x1 <= its.x0 or its.x1 <= box.x0 or box.y1 <= its.y0 or its.y1 <= box.y0
        assert apart, (one, other)


def test_labels_fit_into_their_blocks(run):
    """Widths and heights of the outlines against those of the blocks, in points."""
    drawing = drawing_of(run(**LONG).timeline, "x")
    axes = drawing.figure.axes[0]
    boxes = {
        ((left + right) / 2, (top + bottom) / 2): (left, top, right, bottom)
        for (left, top, right, bottom), *_ in drawing.parts.labels
    }
    across, down = axes.get_window_extent().width / drawing.until, axes.get_window_extent().height / len(drawing.rows)
    num_labels = 0
    for collection in axes.collections:
        sizes = collection.get_sizes() if hasattr(collection, "get_sizes") else []
        for middle in collection.get_offsets().tolist() if len(sizes) else []:
            left, top, right, bottom = boxes[tuple(middle)]
            outline = collection.get_paths()[0].get_extents()
            scale = sizes[0] ** 0.5 * drawing.figure.dpi / 72
            assert outline.width * scale < (right - left) * across
            assert outline.height * scale < (bottom - top) * down
            num_labels += 1
    assert num_labels > 0.9 * len(boxes)


def test_the_title_has_the_figures(run):
    simulation = run(p=4, m=8, tf=100, tb=200)
    heading = drawing_of(simulation.timeline, "plan").heading
    assert heading == "plan, simulated: makespan 3.3 ms, idle 27.3 %, peak 4 activations"
    assert drawing_of(MEASURED, "plan, measured").heading.startswith("plan, measured: makespan")
    memory = Curve("memory held", "bytes", (((0, 3_210_000_000),),))
    assert "peak 1 activation, memory held 2.99 GiB" in drawing_of(of_one_rank(("0F0", 0, 1)), "x", [memory]).heading


@pytest.mark.slow(only=["pdf"])
@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_two_runs_write_the_same_bytes(run, tmp_path, form):
    timeline = run(p=2, m=3, c=1).timeline
    for name in "ab":
        write_picture(timeline, tmp_path / f"{name}.{form}", "plan")
    assert (tmp_path / f"a.{form}").read_bytes() == (tmp_path / f"b.{form}").read_bytes()


def test_files_are_what_their_suffix_says(run, tmp_path):
    timeline = run(p=2, m=3, c=1).timeline
    for name in ("a.PNG", "a.svg", "a.pdf"):
        write_picture(timeline, tmp_path / name, "plan")
    assert imread(tmp_path / "a.PNG").shape[1] == 9 * 200
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    svg = ET.parse(tmp_path / "a.svg")
    assert "makespan" in "".join(svg.getroot().itertext())
    assert not re.search(r"<image", (tmp_path / "a.svg").read_text())
    with pytest.raises(ValueError, match="pictures end with"):
        write_picture(timeline, tmp_path / "a.gif", "plan")


def test_the_user_s_own_style_changes_nothing(run, tmp_path):
    import matplotlib as mpl

    timeline = run(p=2, m=3, c=1).timeline
    write_picture(timeline, tmp_path / "a.png", "plan")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "savefig.bbox": "tight"}):
        write_picture(timeline, tmp_path / "b.png", "plan")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_an_empty_timeline_and_a_measured_one(tmp_path):
    for name, timeline in (("empty", Timeline((), ({"pp": 0},))), ("measured", MEASURED)):
        write_picture(timeline, tmp_path / f"{name}.png", name)
        assert imread(tmp_path / f"{name}.png").std() > 0.01


def of_many_ranks(num_ranks, num_micro_batches):
    spans = tuple(
        Span(rank, "compute", 2 * (rank * 32 + k) + part, f"{rank}{'FB'[part]}{k}", start, start + 1 + part)
        for rank in range(num_ranks)
        for k in range(num_micro_batches)
        for part in range(2)
        for start in [rank + 3 * k + part]
    )
    return Timeline(spans, tuple({"pp": rank} for rank in range(num_ranks)))


def test_many_blocks_are_an_image_within_the_svg(tmp_path):
    write_picture(of_many_ranks(64, 32), tmp_path / "big.svg", "big")
    assert "<image" in (tmp_path / "big.svg").read_text()
    assert (tmp_path / "big.svg").stat().st_size < 2_000_000


def test_twice_the_ranks_are_about_twice_the_work(tmp_path):
    once, twice = (
        num_calls(write_picture, of_many_ranks(num_ranks, 4), tmp_path / "t.svg", "many") for num_ranks in (8, 16)
    )
    assert twice < 2.5 * once


def test_measured_steps_follow_each_other():
    shifted = replace(MEASURED, spans=tuple(replace(s, start=s.start + 5, end=s.end + 5) for s in MEASURED.spans))
    assert parts(shifted).boxes == parts(MEASURED).boxes
    assert len({left for left, *_ in parts(MEASURED).boxes[colour_of(OpKind.FORWARD, 0, 1)]}) == 2
