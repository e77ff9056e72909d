"""``python -m tests.train.forked_ranks NUM PROGRAM ARGS``: ranks with the variables, store and ends of torchrun's.

They are forked from one process with the imports of the program: NUM imports of PyTorch less, which take longer than
most programs.
"""

import ast
import contextlib
import os
import runpy
import signal
import socket
import sys
from pathlib import Path


def import_what_it_imports(program):
    for node in ast.parse(Path(program).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            with contextlib.suppress(ImportError):
                exec(compile(ast.Module([node], []), program, "exec"), {})


def environment(rank, num, port):
    same = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), num) | {"GROUP_WORLD_SIZE": 1}
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank) | {"GROUP_RANK": 0, "ROLE_NAME": "default"}
    elastic = {"RESTART_COUNT": 0, "MAX_RESTARTS": 0, "RUN_ID": os.getppid(), "USE_AGENT_STORE": True}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    every = same | own | place | {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    return {name: str(value) for name, value in every.items()}


def fork_ranks(num, listener):
    """Process ids of all ranks; None in a rank."""
    children = set()
    for rank in range(num):
        child = os.fork()
        if child == 0:
            os.setsid()
            os.environ.update(environment(rank, num, listener.getsockname()[1]))
            listener.close()
            return None
        children.add(child)
    return children


def wait_for(children):
    """Return 1 if one has failed, whereupon the others are ended."""
    failed = False
    try:
        while children:
            child, status = os.wait()
            children.remove(child)
            if status and not failed:
                failed = True
                sys.stderr.write(f"process {child} has ended with {os.waitstatus_to_exitcode(status)}\n")
                signal_all(children, signal.SIGTERM)
                signal.alarm(30)
    finally:
        signal_all(children, signal.SIGKILL)
    return int(failed)


def signal_all(children, number):
    for child in children:
        os.kill(child, number)


def main():
    num, program, *arguments = sys.argv[1:]
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
    import_what_it_imports(program)
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    children = fork_ranks(int(num), listener)
    if children is None:
        runpy.run_path(program, run_name="__main__")
        return
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: sys.exit(1))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    status = wait_for(children)
    del store
    sys.exit(status)


if __name__ == "__main__":
    main()
