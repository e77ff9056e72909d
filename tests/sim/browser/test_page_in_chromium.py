"""The timeline page, opened and used: pointer, keys, search and colours, and its figures."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeproof.views.html
from pipeproof.diagnostics.units import size_text, time_text

pytestmark = pytest.mark.needs_browser

UNITS = (Path(pipeproof.views.html.__file__).parent / "page" / "units.js").read_text(encoding="utf-8")
MAKESPAN = (8 + 3) * 30 + 2 * 2 * (3 + 7 * 3 // 4)
"""Of 1F1B with the costs of ``plan_of``, by its closed form."""
TOP = "return document.getElementById('canvas').getBoundingClientRect().top"
PIXEL = """
const pen = document.getElementById("canvas").getContext("2d");
return Array.from(pen.getImageData(Math.round(arguments[0]), Math.round(arguments[1]), 1, 1).data).slice(0, 3);
"""


def place(browser, op, rank, k=0):
    """The middle of an op, in pixels of the window."""
    box = browser.run("return pipeproof.place(...arguments)", op, rank, k)
    return box["x"] + box["w"] / 2, box["y"] + box["h"] / 2 + browser.run(TOP)


def view(browser):
    return browser.run("const {t0, t1, y} = pipeproof.state; return [t0, t1, y]")


def tip(browser):
    return browser.run("const tip = document.getElementById('tip'); return tip.hidden ? null : tip.textContent")


def status(browser):
    return browser.run("return document.getElementById('status').textContent")


def pixel(browser, x, y):
    return tuple(browser.run(PIXEL, x, y - browser.run(TOP)))


@given(
    us=st.one_of(st.floats(-1e12, 1e12), st.integers(-(10**9), 10**9).map(lambda eighths: eighths / 8)),
    num_bytes=st.one_of(st.integers(0, 2**48), st.integers(0, 2**30).map(lambda n: n * 128)),
)
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_times_and_sizes_are_written_as_in_text(browser, us, num_bytes):
    texts = browser.run(f"{UNITS}\nreturn [duration(arguments[0]), bytesText(arguments[1])]", us, num_bytes)
    assert texts == [time_text(us), size_text(num_bytes)]


def test_the_page_draws_itself_and_asks_for_nothing(opened):
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert view(opened)[:2] == [0, MAKESPAN]
    assert opened.run("return document.title") == "1f1b 4 8"


def test_hovering_tells_what_an_operation_a_message_and_a_bubble_are(opened):
    opened.move(*place(opened, "1F2", 1))
    assert tip(opened).startswith("1F2: forward on rank 1 pp1\n32 us to 42 us, takes 10 us")
    opened.move(*place(opened, "1RECV_F0", 1))
    assert "512 B" in tip(opened)
    assert "from 0SEND_F0 on rank 0: sent at 10 us, arrived at 12 us" in tip(opened)
    x, y = place(opened, "0F3", 0)
    opened.move(x + 60, y)
    assert "rank 0 pp0 is idle: waits for a message from rank 1" in tip(opened)
    opened.move(x, opened.run("return innerHeight") - 5)
    assert tip(opened) is None


def test_a_click_chooses_an_operation_and_keys_go_on_from_there(opened):
    opened.click(*place(opened, "2F0", 2))
    assert status(opened).startswith("2F0: forward on rank 2 pp2; ")
    opened.press(".")
    assert status(opened).startswith("2F1: ")
    opened.press(",")
    opened.press(">")
    assert "on rank 2 pp2" in status(opened)
    opened.press("Escape")
    assert status(opened) == ""


def test_the_wheel_zooms_around_the_pointer(opened):
    x, y = place(opened, "1B3", 1)
    time = "return pipeproof.timeAt(arguments[0])"
    before = opened.run(time, round(x))
    opened.wheel(x, y, -400)
    assert opened.run(time, round(x)) == pytest.approx(before)
    begin, end, _ = view(opened)
    assert end - begin == pytest.approx(MAKESPAN * 2.718281828 ** (-400 * 0.0015))


def test_a_rank_is_folded_to_its_computations_by_a_click_on_its_name_and_all_by_a_key(opened):
    rows = "return pipeproof.rows().map(({kind, rank}) => `${kind} ${rank}`)"
    whole = opened.run(rows)
    _, y = place(opened, "1F0", 1)
    opened.click(40, y)
    folded = opened.run(rows)
    assert [row for row in whole if row.endswith(" 1")] > [row for row in folded if row.endswith(" 1")] == ["compute 1"]
    assert [row for row in folded if not row.endswith(" 1")] == [row for row in whole if not row.endswith(" 1")]
    opened.press("f")
    assert opened.run(rows) == [f"compute {rank}" for rank in range(4)]
    opened.press("f")
    assert opened.run(rows) == whole


def test_a_rank_out_of_sight_is_found_by_search_and_the_second_enter_finds_the_next(opened):
    opened.press(*("+" * 12), "ArrowLeft", "ArrowLeft")
    opened.press("/")
    opened.press(*"3b7", "Enter")
    assert status(opened).startswith("3B7: backward on rank 3 pp3")
    x, _ = place(opened, "3B7", 3)
    assert opened.run("return pipeproof.gutter()[0]") < x < 1200
    opened.press("Enter")
    assert status(opened).startswith("3B7: ")  # there is only one
    opened.press("x", "Enter")
    assert status(opened) == "there is no operation 3b7x"


def test_colours_tell_kinds_and_causes_of_bubbles_apart(opened):
    x, y = place(opened, "0F3", 0)
    colours = {pixel(opened, *(at + shift for at, shift in zip(place(opened, op, 3), (0, 9), strict=True)))
               for op in ("3F0", "3B0")}  # fmt: skip
    colours |= {pixel(opened, x + 60, y - 9), pixel(opened, 160, place(opened, "3F0", 3)[1] - 9)}
    assert colours == {(0x34, 0x61, 0xC1), (0x27, 0x80, 0x3F), (0xE3, 0xEB, 0xC6), (0xE3, 0xE6, 0xEA)}
    opened.press("b")
    assert pixel(opened, x + 60, y - 9) == (0xEE, 0xF0, 0xF3)


def test_the_critical_path_is_drawn_along_its_operations_and_nowhere_else(opened):
    on, off = place(opened, "0F0", 0), place(opened, "0F2", 0)
    top = opened.run("return pipeproof.place('0F0', 0).y") + opened.run(TOP)
    before = pixel(opened, on[0], top), pixel(opened, off[0], top)
    opened.press("c")
    red = (0xCF, 0x22, 0x2E)
    assert red not in before
    assert (pixel(opened, on[0], top), pixel(opened, off[0], top)) == (red, before[1])


def test_keys_are_explained_and_everything_is_reached_by_tab(opened):
    opened.press("?")
    assert opened.run("return document.getElementById('help').open")
    assert "find an operation" in opened.run("return document.getElementById('help').textContent")
    opened.press("Escape")
    assert not opened.run("return document.getElementById('help').open")
    assert opened.run("return [...document.querySelectorAll('button, input, canvas')].every(e => e.tabIndex === 0)")


def test_of_a_hundred_thousand_operations_a_frame_draws_no_more_than_there_are_pixels(browser, page):
    """Shapes and texts are counted while the page pans, all of it in sight, some of it, and a hundredth."""
    browser.open(page("interleaved", 16, 256, 4))
    browser.settle()
    assert browser.run("return pipeproof.size") > 97_000
    drawn = """
    const pen = CanvasRenderingContext2D.prototype, counts = [];
    let drawn = 0;
    for (const name of ["fillRect", "fillText", "lineTo"]) {
      const draw = pen[name];
      pen[name] = function (...given) { drawn += 1; return draw.apply(this, given); };
    }
    for (const share of [1, 0.3, 0.1, 0.01]) {
      pipeproof.state.t1 = pipeproof.state.t0 + share * (pipeproof.state.t1 - pipeproof.state.t0);
      drawn = 0;
      pipeproof.state.t0 += 1;
      pipeproof.state.t1 += 1;
      pipeproof.draw();
      counts.push(drawn);
    }
    return counts;
    """
    num_rows, width = 3 * 16, 1200
    assert max(browser.run(drawn)) < num_rows * width / 2
    assert browser.complaints() == []


def figures(browser):
    boxes = (
        "[...document.querySelectorAll('#figures dt')].map((term) => [term.textContent, term.nextSibling.textContent])"
    )
    return dict(browser.run(f"return {boxes}"))


def test_the_figures_are_those_of_the_closed_form(opened):
    """Three warm-ups and three cool-downs: each rank computes for 8 of its 8 + 3 rounds, less the messages."""
    found = figures(opened)
    assert found["Step time, simulated"] == f"{MAKESPAN} us"
    assert found["Bubble"] == f"{round(100 * (1 - 8 * 30 / MAKESPAN), 1):g} %"
    assert found["Peak activations"] == "4"
    assert "MFU" not in found


def test_memory_and_mfu_are_shown_where_they_are_known(browser, page):
    browser.open(page("1f1b", 2, 4, mfu=0.4321))
    assert figures(browser)["MFU"] == "43.2 %"
    assert figures(browser)["Peak memory"].endswith("KiB")
    assert browser.complaints() == []


@pytest.mark.parametrize("plan", [("1f1b", 4, 8), ("zb_v", 3, 6, 2), ("dualpipe", 4, 8), ("1f1b", 2, 4, 1, 2)])
def test_the_breakdown_of_a_range_adds_up_to_it_and_its_parts_to_the_whole(browser, page, plan):
    browser.open(page(*plan))
    whole = browser.run("return pipeproof.state.t1")
    cuts = [0, whole / 3, whole / 2, whole]
    for rank in range(plan[1]):
        total = browser.run("return pipeproof.breakdown(...arguments)", rank, 0, whole)
        parts = [browser.run("return pipeproof.breakdown(...arguments)", rank, *ends) for ends in pairwise(cuts)]
        for spent, length in ((total, whole), *zip(parts, (b - a for a, b in pairwise(cuts)), strict=True)):
            idle = sum(spent["idle"].values())
            assert spent["computes"] + spent["collectives"] + spent["other"] + idle == pytest.approx(length)
            assert 0 <= spent["messages"] <= idle + 1e-9
        for name in ("computes", "collectives", "messages"):
            assert sum(part[name] for part in parts) == pytest.approx(total[name])


def test_a_range_is_chosen_on_the_axis_or_by_keys_and_broken_down(opened):
    table = "return document.querySelector('#breakdown').hidden ? null : document.querySelector('#breakdown').innerText"
    assert opened.run(table) is None
    opened.drag(300, opened.run(TOP) + 24, 200, 0)
    begin, end = opened.run("return pipeproof.state.range")
    assert 0 < begin < end < MAKESPAN
    assert view(opened)[:2] == [0, MAKESPAN]
    assert "waits for messages" in opened.run(table)
    opened.press("Escape")
    assert opened.run(table) is None
    opened.click(*place(opened, "1F2", 1))
    opened.press("[", ".", ".", "]")
    assert status(opened).startswith("1B0: ")
    ends = "return pipeproof.times(pipeproof.place('1F2', 1).i, pipeproof.place('1B0', 1).i)"
    assert opened.run("return pipeproof.state.range") == opened.run(ends)


def test_the_causes_of_an_operation_lead_back_to_the_beginning(opened):
    """1F0 waits for its message, that for 0F0; of two ways back the one that ended last is followed."""
    assert opened.run("return pipeproof.causes('1F0', 1)") == ["1F0", "WAIT(1RECV_F0)", "1RECV_F0", "0SEND_F0", "0F0"]
    assert opened.run("return pipeproof.causes('0F2', 0)") == ["0F2", "0F1", "0F0"]
    last = opened.run("return pipeproof.causes('0B7', 0)")
    assert last[0] == "0B7"
    assert last[-1] == "0F0"
    opened.press("w")
    assert "Select an operation" in status(opened)
    opened.click(*place(opened, "1F0", 1))
    causes = "return [...document.querySelectorAll('#causes button')].map((button) => button.textContent)"
    assert opened.run(causes) == ["1F0", "WAIT(1RECV_F0)", "1RECV_F0", "0SEND_F0", "0F0"]
    opened.run("[...document.querySelectorAll('#causes button')].at(-1).click()")
    assert status(opened).startswith("0F0: forward on rank 0")
