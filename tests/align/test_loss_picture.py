"""The picture of two trainings' losses: of a run continued under another topology, of logs, of numbers of any size."""

import re
from itertools import combinations
from math import exp, inf, nan
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from pipeproof.views.loss_svg import LossPart, loss_svg
from pipeproof.views.svg import width_of
from tests.align.test_logs import LOGS, log, trainer
from tests.align.test_records import write
from tests.cli.commands import invoke

PLAN = {
    "pipeproof": 1,
    "model": {"kind": "gpt", "num_layers": 2, "hidden_size": 8, "num_heads": 2, "ffn_size": 8, "vocab_size": 16,
              "seq_length": 4},
    "topology": {"pp": 2},
    "schedule": {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 1},
    "run": {"backend": "torch", "seed": 7, "learning_rate": 0.01, "optimizer": "adamw"},
}  # fmt: skip


def picture(path):
    """The root of a picture, its lines of text, and its curves as (colour, points)."""
    root = ET.fromstring(path.read_text())
    parts = list(root.iter())
    curves = [
        (part.get("stroke"), re.findall(r"([\d.]+) ([\d.]+)", part.get("d")))
        for part in parts
        if part.get("class") == "curve"
    ]
    return root, [part.text for part in parts if part.tag.endswith("text")], curves


def require_no_overlap(root):
    """Texts are within the picture, and apart from each other; its letters are at most as wide as `width_of` says."""
    boxes = []
    for one in root.iter("{http://www.w3.org/2000/svg}text"):
        look = (one.get("class") or "").split()
        size = 13 if "title" in look else 11
        x, y, width = float(one.get("x")), float(one.get("y")), width_of(one.text) * size
        x -= width * (0.5 if "mid" in look else 1.0 if "end" in look else 0.0)
        boxes.append((x, y - 0.75 * size, x + width, y + 0.2 * size, one.text))
    for box in boxes:
        assert box[0] >= 0, box
        assert box[2] <= float(root.get("width")), box
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


@pytest.mark.needs_torch
def test_a_run_that_continues_under_another_topology_and_its_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, pp, steps, options in (("first", 2, 2, ("--save", "states")), ("second", 1, 6, ("--resume", "states"))):
        content = {**PLAN, "topology": {"pp": pp}, "run": {**PLAN["run"], "steps": steps}}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
        assert invoke("run", f"{name}.yaml", "--record", name, *options).exit_code == 0
    result = invoke("state", "align", "first/run,second/run", "first/reference,second/reference", "--plot", "curve.svg")
    assert result.exit_code == 0, result.output
    assert "main_matches=6/6\n" in result.stdout
    assert "picture written to curve.svg" in result.stderr
    root, texts, curves = picture(Path("curve.svg"))
    assert texts[0] == "Losses of A and B: bits equal in 6 steps"
    assert texts[1:5] == ["A: first/run", "A: second/run", "B: first/reference", "B: second/reference"]
    assert [len(points) for _, points in curves[4:]] == [2, 4, 2, 4]
    assert len({colour for colour, _ in curves}) == 4
    assert [points for _, points in curves[4:6]] == [points for _, points in curves[6:]]
    require_no_overlap(root)


@pytest.mark.parametrize(
    ("second", "title"),
    [
        ((2.0, 1.5, 1.0), "equal in every printed digit in 3 steps"),
        ((2.0, 1.75, 1.125), "largest difference 0.25 at step 2; 2 of 3 steps differ"),
        ((2.0, 1.75, nan), "largest difference not finite (A 1, B nan) at step 3; 2 of 3 steps differ"),
        ((2.0, 1.75), "largest difference 0.25 at step 2; 1 of 2 steps differ; 1 of A alone"),
    ],
)
def test_two_logs(tmp_path, second, title):
    a, b = (
        log(tmp_path, "".join(trainer(step, loss) for step, loss in enumerate(losses, start=1)), name)
        for name, losses in (("a.log", (2.0, 1.5, 1.0)), ("b.log", second))
    )
    invoke("state", "align", a, b, "--plot", tmp_path / "c.svg", "--format", "json")
    root, texts, _ = picture(tmp_path / "c.svg")
    assert texts[0] == f"Losses of A and B: {title}"
    assert (f"B: {b}: NaN in step 3" in texts) == (nan in second)
    require_no_overlap(root)


def test_anchors_are_drawn_as_means_of_a_step_and_a_map_scales_the_first_side(tmp_path):
    options = ("-m", 2, "--rank-a", 7, "--rank-b", 0, "--order-a", "main,mtp", "--order-b", "mtp,main")
    invoke("state", "align", LOGS / "fleet.log", LOGS / "megatron.log", *options, "--plot", tmp_path / "c.svg")
    _, texts, curves = picture(tmp_path / "c.svg")
    assert re.fullmatch(r"Losses of A and B: (bits equal in|largest difference .* of) \d steps.*", texts[0])
    assert len(curves[-1][1]) > 1
    a = write(tmp_path / "a")
    (tmp_path / "map.yaml").write_text("scale: {main: 2}\n")
    invoke("state", "align", a, a, "--map", tmp_path / "map.yaml", "--plot", tmp_path / "c.svg")
    assert "largest difference 5.5 at step 0; 3 of 3 steps differ" in picture(tmp_path / "c.svg")[1][0]


def test_parts_of_logs_replace_what_they_repeat_and_count_anchors_on(tmp_path):
    a = log(tmp_path, "".join(trainer(step, step / 2) for step in range(1, 6)))
    first = log(tmp_path, "".join(trainer(step, step / 2 if step < 3 else 9.0) for step in range(1, 5)), "first.log")
    second = log(tmp_path, "".join(trainer(step, step / 2) for step in range(3, 6)), "second.log")
    result = invoke("state", "align", a, f"{first},{second}")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "main_matches=5/5")
    anchors = [f"final_loss: rank=0 val={loss} md5={loss:032d}\n" for loss in (3, 2, 1)]
    both = log(tmp_path, "".join(anchors), "both.log")
    for name, lines in (("one.log", anchors[:2]), ("two.log", anchors[2:])):
        log(tmp_path, "".join(lines), name)
    result = invoke("state", "align", both, f"{tmp_path / 'one.log'},{tmp_path / 'two.log'}")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "main_matches=3/3")


def test_parts_of_records_replace_what_they_repeat_with_their_values(tmp_path):
    a = write(tmp_path / "a", steps=4, values=True)
    wrong = write(tmp_path / "wrong", values=True, change=lambda step: {"value": 1.0 + (step == 2)})
    later = write(tmp_path / "later", steps=4, values=True)
    lines = (later / "record.jsonl").read_text().splitlines(keepends=True)
    (later / "record.jsonl").write_text(lines[0] + "".join(lines[5:]))
    assert invoke("state", "align", a, f"{wrong},{later}").exit_code == 0
    (later / "record.jsonl").write_text(lines[0] + "".join(lines[7:]))
    different = invoke("state", "align", a, f"{wrong},{later}")
    assert "first tensor that differs, in execution order: step 2" in different.stdout
    assert "relative 0.5" in different.stdout


@pytest.mark.parametrize(
    ("a", "b", "file", "message"),
    [
        ("record", "record", "c.png", "has another ending than .svg"),
        ("record", "record", "missing/c.svg", "there is no directory"),
        ("late", "record", "c.svg", "have no finished step in common"),
        ("silent", "silent", "c.svg", "silent has no value of the main loss in any step"),
        ("one.log", "two.log", "c.svg", "have no loss in common"),
        ("trainer.log", "anchor.log", "c.svg", "have no main loss of one step and kind in common"),
        ("record,one.log", "record", "c.svg", "some parts are records and others are logs"),
        ("late,record", "record", "c.svg", "parts begin at steps [2, 0]"),
        ("record,missing", "record", "c.svg", "cannot read missing"),
    ],
)
def test_what_cannot_be_drawn_is_one_error_and_no_file(tmp_path, monkeypatch, a, b, file, message):
    monkeypatch.chdir(tmp_path)
    for name in ("record", "late", "silent"):
        write(tmp_path / name)
    record = Path("late/record.jsonl")
    lines = record.read_text().splitlines(keepends=True)
    record.write_text(lines[0] + "".join(lines[5:]))
    Path("record/record.jsonl").write_text("".join(lines[:5]))
    silent = re.sub(r'"loss":"[^"]*","loss_md5":"[^"]*"', '"loss":null,"loss_md5":null', "".join(lines))
    Path("silent/record.jsonl").write_text(silent)
    log(tmp_path, trainer(1, 2.0), "one.log")
    log(tmp_path, trainer(2, 2.0), "two.log")
    module = f"[MTP_LOSS_PATH_MD5] rank=0 mtp1.final_loss=2.0 mtp1.final_loss_md5={'0' * 32}\n"
    log(tmp_path, trainer(1, 2.0) + module, "trainer.log")
    log(tmp_path, f"final_loss: rank=0 val=2.0 md5={'0' * 32}\n{module}", "anchor.log")
    result = invoke("state", "align", a, b, "--plot", file)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.stderr.count("error: ") == 1
    assert not Path(file).exists()


MANY = tuple((step, 10 * exp(-step / 9000) + step % 7 / 7) for step in range(30_000))
SHAPES = {
    "long": ([MANY], [MANY[:10_000], MANY[10_000:]]),
    "one step": ([((7, 5.5),)], [((7, 5.5),)]),
    "near": ([tuple((step, 5.56 + step * 1e-9) for step in range(12))], [((0, 5.56), (11, 5.56))]),
    "huge": ([((10**9, 1.7e308), (10**9 + 1, -1.7e308))], [((10**9, 3e20), (10**9 + 7, 2.0))]),
    "small": ([((0, 1e-12), (1, 3e-12))], [((0, 5e-324), (1, 0.0))]),
    "least": ([((0, 5e-324), (1, 0.0))], [((0, 5e-324), (1, 0.0))]),
    "negative": ([((0, -3.0), (1, -1e6))], [((0, -3.0), (1, -1e6))]),
    "not finite": ([((0, nan), (1, inf))], [((0, -inf), (1, nan))]),
    "parts": ([((0, 1.0),)] * 2, [((number, 2.0),) for number in range(9)]),
}
FLAT = {"one step", "least", "not finite"}


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_overlaps_and_every_number_has_a_place(shape, tmp_path):
    trainings = [
        [LossPart(f"{'AB'[side]}: {'directory/' * 20}run", losses) for losses in parts]
        for side, parts in enumerate(SHAPES[shape])
    ]
    drawn = tmp_path / "c.svg"
    drawn.write_text(loss_svg("Losses", trainings))
    root, _, curves = picture(drawn)
    require_no_overlap(root)
    assert drawn.stat().st_size < 200_000
    height = float(root.get("height"))
    assert all(0 < float(y) < height for _, points in curves for _, y in points)
    assert not re.search(r'(d|cy)="[^"]*(nan|inf|e)', drawn.read_text())
    assert len({y for _, points in curves[sum(map(len, trainings)) :] for _, y in points}) > 1 or shape in FLAT
    labels = [one.text for one in root.iter() if one.get("class") == "end"]
    assert len(set(labels)) == len(labels)
    assert (len(labels) > 3) == (shape != "not finite")


def test_losses_that_are_no_numbers_are_named_and_break_the_line(tmp_path):
    losses = tuple((step, {3: nan, 4: nan, 6: inf, 8: -inf}.get(step, 1.0 / (step + 1))) for step in range(10))
    drawn = tmp_path / "c.svg"
    drawn.write_text(loss_svg("Losses", [[LossPart("A: a", losses)], [LossPart("B: b", losses[:3])]]))
    root, texts, curves = picture(drawn)
    assert {"A: a: NaN in 2 steps from 3 to 4", "A: a: inf in step 6", "A: a: -inf in step 8"} <= set(texts)
    assert ("not finite: A" in texts, "not finite: B" in texts) == (True, False)
    assert [len(points) for _, points in curves[2:]] == [3, 1, 1, 1, 3]
    assert sum(part.get("class") == "bad" for part in root.iter()) == 4
