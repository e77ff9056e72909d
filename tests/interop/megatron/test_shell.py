"""Reading a shell script gives the arguments that Bash gives, and names values that only a run can determine."""

import contextlib
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.interop.importers.megatron.launch_script import ScriptError, read_script

SNIPPETS = (
    "run --a 1 --b 'two words' \"three $((1+2))\" \\\n  --c",
    'A=4\nB="x $A"\nrun $B "$B" \'$B\' ${A}5',
    'PP=${PP:-8}\nTP=${TP-2}\nrun --pp $PP --tp $TP ${EMPTY:-} "${EMPTY:-}"',
    'A=(--x 1 # a comment\n --y "2 3"\n)\nA+=(--z)\nrun ${A[@]} ; run "${A[@]}"',
    'A=("--x 1" \'--y 2\')\nrun ${A[@]}\nrun "${A[@]}"',
    "G=8; N=2; W=$(($G*N + 10/3 - 7%4)); run $W $((W*(G-N)))",
    'OPTS="--one 1 \\\n  --two 2"\nrun $OPTS',
    'if [ "$M" = yes ]; then run 1; else X=2; fi\nL=3\nrun $L',
    'f() { run inside; }\nfunction g {\n  run inside\n}\nrun outside "$@"',
    "case $1 in\n  a|b) X=1 ;;\n  *) X=2 ;;\nesac; run after",
    "for X in 1 2; do : $X; done\nrun after",
    "cat > /dev/null <<EOF\nrun no --x\nEOF\nrun yes 2>/dev/null",
    'export Z=4 Q="5 6"\nrun $Z $Q "$Q"',
    'C="run --a 1"\neval $C --b 2\neval "$C --b 3x"',
    "A=1 B=2 run x\nrun a; run b && run c",
    'A=\nrun $A "$A" \'\'x""',
    'L=(1 2)\nL=(${L[@]} "3 4")\nrun "${L[@]}"',
    'X="a"\nX+="b c"\nrun $X "${X}d"',
    'D=${UNSET:-"a b"}\nE=${UNSET:-$D/c}\nrun "$D" $D "$E"',
    'run "a \\"q\\" \\$HOME \\x" \'it\'"\'"\'s\' back\\ slash',
)


def by_reading(text):
    return [
        [argument.text for argument in command[1:]]
        for command in read_script(text, "run.sh").commands
        if command[0].text == "run"
    ]


def by_bash(text):
    script = 'run() { printf "%s\\n" "@$#" "$@"; }\n' + text
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={}).stdout.split("\n")[
        :-1
    ]
    found, at = [], 0
    while at < len(out):
        count = int(out[at][1:])
        found.append(out[at + 1 : at + 1 + count])
        at += 1 + count
    return found


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with Bash")
@pytest.mark.parametrize("text", SNIPPETS)
def test_reading_agrees_with_bash(text):
    expected = by_bash(text)
    assert expected
    assert by_reading(text) == expected


def test_what_only_a_run_can_tell_is_said():
    (command,) = read_script("N=$(nvidia-smi -L | wc -l)\nrun $N ${1} x${A%%b} $((N+1)) ok", "run.sh").commands
    texts = [argument.text for argument in command]
    assert texts == ["run", None, None, None, None, "ok"]
    assert "nvidia-smi" in command[1].why
    assert "`$1`, which the script does not set" in command[2].why
    assert "A%%b" in command[3].why
    assert "`N` is not known" in command[4].why


def test_words_that_a_block_assigns_are_not_known():
    script = read_script("A=4\nif [ -f conf ]; then\n  A=5\n  run in\nfi\nrun x $A", "run.sh")
    word = script.commands[-1][2]
    assert (word.text, word.block) == (None, 2)
    assert "assigned in the block at line 2" in word.why
    assert [argument.text for argument in script.in_blocks[-1]] == ["run", "in"]


def test_words_that_a_block_appends_are_marked():
    script = read_script('A=(--x)\nfor I in 1 2; do\n  A+=(--y "1 2")\ndone\nrun "${A[@]}"', "run.sh")
    assert [(word.text, word.block) for word in script.commands[-1]][1:] == [("--x", 0), ("--y", 2), ("1 2", 2)]


def test_a_sourced_file_beside_the_script_is_read(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text('MODEL_ARGS=(--num-layers 24 --x "$SIZE")\n')
    text = 'SIZE=4\nHERE="$(dirname "$0")"\nsource "${HERE}/models/small.sh"\nsource other.sh\nrun ${MODEL_ARGS[@]}'
    script = read_script(text, str(tmp_path / "run.sh"))
    assert [word.text for word in script.commands[-1]] == ["run", "--num-layers", "24", "--x", "4"]
    assert script.commands[-1][1].location.file.endswith("small.sh")
    assert [word.text for word in script.unread] == ["other.sh"]


def test_a_file_that_sources_itself_is_read_a_few_times(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("A+=x\nsource run.sh\n")
    assert read_script(file.read_text(), str(file)).value("A") == "x" * 9


def test_the_trace_of_bash_is_read(tmp_path):
    text = 'M=70B\ncase $M in 70*) L="80 x" ;; esac\nif true; then A=(--layers "$L"); fi\necho "${A[@]}" end'
    traced = subprocess.run(["bash", "-x", "-c", text], capture_output=True, text=True, check=True).stderr
    assert [word.text for word in read_script(traced, "trace").commands[-1]] == ["echo", "--layers", "80 x", "end"]


def test_arguments_have_the_place_where_they_are_written():
    text = 'ARGS="--pp 4 \\\n   --tp 2"\nLIST=(\n  --cp 1\n)\nrun $ARGS ${LIST[@]}'
    command = read_script(text, "run.sh").commands[-1]
    lines = text.split("\n")
    for argument in command:
        location = argument.location
        assert lines[location.line - 1][location.column - 1 : location.end_column] == argument.text


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("run\nA='x", "quote ' that begins here", 2),
        ('run "x', 'quote " that begins here', 1),
        ("\nA=(1 2", "list that begins here", 2),
        ("run ${A", "expansion that begins here", 1),
    ],
)
def test_what_is_not_closed_is_refused_where_it_begins(text, message, line):
    with pytest.raises(ScriptError, match=message.replace("(", r"\(")) as caught:
        read_script(text, "run.sh")
    assert caught.value.location.line == line


PARTS = (
    "if", "then", "elif", "else", "fi", "case x in", "esac", "a|b)", ";;", "while", "for i in", "do", "done",
    "{", "}", "f()", "function", "(", ")", "[", "]", "[[", "]]", "=", "==", "-gt", "!", "&&", "||", "|", ";",
    "\n", "A=1", "A=(", "A+=", "$A", "${A[@]}", "${A:-", "$((", "))", "$(", "`", "'", '"', "\\", "\\\n",
    "<<EOF", "EOF", ">", "eval", "source", ":", "#", "--x",
)  # fmt: skip


@given(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=25).map(" ".join))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ScriptError):
        for command in read_script(text, "run.sh").commands:
            for argument in command:
                assert argument.location.line >= 1
                assert 1 <= argument.location.column <= argument.location.end_column
