"""Text of reading commands at 80 and 140 columns and in a pipe: whole words, rows on one line, no line too long."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.commands import EXAMPLES, REPOSITORY, invoke

IMPORTING = EXAMPLES / "importing"
GOOD, BAD = EXAMPLES / "gpt_pp4.yaml", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml"
BROKEN = REPOSITORY / "tests" / "specs" / "broken" / "unknown_keys.yaml"
PUBLISHED = EXAMPLES / "published" / "llama3_405b.yaml"

COMMANDS = (
    ("check", GOOD),
    ("check", BAD),
    ("check", "--all", BAD),
    ("check", BROKEN),
    ("check", GOOD, BAD, BROKEN),
    ("check", "--from", "megatron", IMPORTING / "megatron.sh"),
    ("check", IMPORTING / "megatron.sh"),
    ("check", EXAMPLES / "schedules" / "two_by_two.txt"),
    ("check", "--nonsense", GOOD),
    ("check", "no such file"),
    ("--explain", "PP201"),
    ("show", GOOD),
    ("show", "--rank", "0", GOOD),
    ("show", "--memory", PUBLISHED),
    ("show", "--costs", PUBLISHED),
    ("simulate", GOOD),
    ("simulate", BAD),
    ("simulate", BROKEN),
    ("simulate", EXAMPLES / "alignment" / "zb_v.yaml"),
    ("tune", GOOD),
    ("tune", BAD),
    ("tune", GOOD, "--gpus", "4", "--device", "h100", "--global-batch", "16"),
    ("compare", GOOD, EXAMPLES / "alignment" / "zb_v.yaml"),
    ("compare", GOOD, GOOD),
    ("sweep", GOOD, "--set", "schedule.kind=[1f1b, zb_h1]", "--workers", "1"),
    ("schedule", "list"),
    ("schedule", "show", "zb_v", "-p", "4", "-m", "8"),
    ("schedule", "show", "dualpipe", "-p", "4", "-m", "16"),
    ("schedule", "show", "1f1b", "-p", "2", "-m", "3"),
    ("import", "plan", IMPORTING / "megatron.sh", "--world-size", "8", "-o", "{plan}"),
    *(
        ("import", "plan", "--from", kind, *words, "-o", "{plan}")
        for kind, *words in (
            ("megatron", IMPORTING / "megatron.sh"),
            ("paddleformers", IMPORTING / "full_tp_pp.yaml"),
            ("fleet", IMPORTING / "strategy.prototxt"),
            ("torchtitan", IMPORTING / "torchtitan.toml"),
            ("verl", IMPORTING / "verl.sh"),
            ("schedule", EXAMPLES / "schedules" / "zbv_pp2.csv"),
            ("fleet", IMPORTING / "megatron.sh"),
        )
    ),
    ("state", "show", "{saved}"),
    ("state", "show", "{saved}", "--verify"),
    ("state", "show", GOOD),
    ("state", "show", IMPORTING / "dumps"),
    ("state", "diff", "{saved}", "{saved}"),
    ("state", "reshard", "--check", GOOD, EXAMPLES / "alignment" / "zb_v.yaml"),
    ("state", "reshard", "{saved}", "--to", GOOD, "--check"),
    ("state", "aoa", EXAMPLES / "aoa" / "names.aoa", "--source", "{saved}"),
    ("state", "align", GOOD, GOOD),
    ("run", BAD),
    ("run", BROKEN),
    ("rehearse", BAD),
    ("job", "merge", IMPORTING),
    ("job", "hang", IMPORTING / "dumps"),
    ("job", "file", GOOD, "--for", "slurm", "-o", "{job}"),
)

WORDS_OF_WIDE_PICTURES = {"with", "the", "micro", "batch", "where", "fits", "dots", "are", "idle"}


def output(monkeypatch, tmp_path, words, columns):
    (monkeypatch.delenv("COLUMNS", raising=False) if columns is None else monkeypatch.setenv("COLUMNS", str(columns)))
    files = {"plan": tmp_path / "plan.yaml", "job": tmp_path / "job.sh",
             "saved": tmp_path / "model.safetensors"}  # fmt: skip
    save_file({f"layer.{layer}.attn.qkv.weight": np.zeros((4, 4)) for layer in range(3)}, files["saved"])
    given = [str(word) for word in words]
    return invoke(*(files[word[1:-1]] if word.startswith("{") else word for word in given)).output


def is_whole(line, width):
    """True for lines that are longer than the width by right: of a file, a drawing, or with one long word."""
    of_file = re.match(r"\s*\d* \| ", line)
    word = max(map(len, line.split()), default=0)
    return bool(of_file) or word + len(line) - len(line.lstrip()) > width or word > width - 12


def words_of(text):
    return set(re.findall(r"[A-Za-z]{3,}", text))


def named(words):
    return " ".join(getattr(word, "name", word) for word in words)[:50]


@pytest.mark.parametrize("words", COMMANDS, ids=named)
def test_lines_fit_and_no_word_is_divided(monkeypatch, tmp_path, words):
    require_whole_lines(monkeypatch, tmp_path, words)


def require_whole_lines(monkeypatch, tmp_path, words):
    """Fail if a line is longer than 80 or 140 columns, or if a word there is none of the words in a pipe."""
    piped = output(monkeypatch, tmp_path, words, None)
    for columns in (80, 140):
        shown = output(monkeypatch, tmp_path, words, columns)
        long = [line for line in shown.splitlines() if len(line) > columns and not is_whole(line, columns)]
        assert long == []
        prose = re.sub(r"\S*\N{HORIZONTAL ELLIPSIS}\S*", "", shown)
        prose = re.sub(r"\(\d+ columns; [^)]*\)", "", prose)
        assert words_of(prose) - words_of(piped) - WORDS_OF_WIDE_PICTURES == set()
