"""Every file that pipeproof writes goes through the one atomic writer; the others are listed with their reason."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pipeproof"
WRITERS = {"output_file", "atomic_write"}
"""They yield the path of a hidden file, to be written in the block."""
METHODS = {"write_text", "write_bytes", "savefig", "savez", "savetxt", "tofile", "to_csv"}
JOB = "a directory of a job, which only its processes read"
APPENDED = "lines are added while the program runs; a line that is cut off is found by its reader"
PART = "a directory under a temporary name, which is renamed when all its files are synchronized"
OTHERS = {
    ("exec/compare/run_record.py", "self._file.open"): APPENDED,
    ("exec/rank/job_files.py", "self._new.open"): JOB + "; renamed when it is whole",
    ("exec/launch/supervisor.py", "output.open"): JOB,
    ("exec/monitor/ring.py", "new.open"): "mapped memory, renamed when its header is whole",
    ("exec/rank/paddle/framework.py", "(directory / f'rank{rank}.json').write_text"): PART,
    ("exec/train/torch/dcp_files.py", "torch.save"): PART,
    ("exec/train/torch/pretrained_save.py", "torch.save"): PART,
    ("interop/write_arguments.py", "paths[-1].write_text"): "a temporary directory",
    ("interop/traces/recorder.py", "self.path.open"): APPENDED,
    ("state/byte_ranges.py", "path.open"): PART,
    ("state/reshard/copy_regions.py", "path.open"): PART,
    ("state/reshard/execute_reshard.py", "path.write_bytes"): PART,
    ("state/write_state.py", "(directory / INDEX_FILE).write_text"): PART,
    ("state/write_state.py", "(directory / f'rank{rank}.json').write_text"): PART,
}
"""Calls outside of a block of the writer, by file and function, and why."""


def opens_to_write(call):
    """Return True for a call of ``open`` with a mode that writes, or with one that is not a constant."""
    words = [*call.args, *(word.value for word in call.keywords if word.arg in (None, "mode"))]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(mode and set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)


def hidden_paths(with_node):
    """Names of the paths and streams that a ``with`` gives for a hidden file."""
    for item in with_node.items:
        call, name = item.context_expr, item.optional_vars
        if isinstance(call, ast.Call) and ast.unparse(call.func) in WRITERS and isinstance(name, ast.Name):
            yield name.id


def writes_in(node, hidden=frozenset()):
    """Yield functions of the calls that write a file and not one of the hidden ones."""
    if isinstance(node, ast.With):
        hidden = hidden | {*hidden_paths(node)}
        streams = {
            item.optional_vars.id
            for item in node.items
            if isinstance(item.context_expr, ast.Call)
            and isinstance(item.optional_vars, ast.Name)
            and ast.unparse(item.context_expr.func).removesuffix(".open") in hidden
        }
        hidden |= streams
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        name = function.rpartition(".")[2]
        targets = {function.rpartition(".")[0], *(ast.unparse(argument) for argument in node.args[:2])}
        is_write = (name == "open" and opens_to_write(node)) or name in METHODS or function == "torch.save"
        if is_write and not targets & hidden:
            yield function
    for child in ast.iter_child_nodes(node):
        yield from writes_in(child, hidden)


def test_every_output_goes_through_the_writer():
    found = {
        (path.relative_to(PACKAGE).as_posix(), function)
        for path in PACKAGE.rglob("*.py")
        for function in writes_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(OTHERS)


def test_writes_are_found():
    source = """
path.write_text("a")
Path("b").open("w").write("b")
open("c", mode="ab")
open("d", encoding="utf-8")
with output_file(path) as new, new.open("wb") as stream:
    np.savez(stream, a=1)
    new.write_text("e")
    other.write_bytes(b"f")
new.write_text("g")
"""
    assert list(writes_in(ast.parse(source))) == [
        "path.write_text", "Path('b').open", "open", "other.write_bytes", "new.write_text",
    ]  # fmt: skip
