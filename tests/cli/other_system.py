"""Runs the commands as on another system: ``python -m tests.cli.other_system SYSTEM DIRECTORY``.

Commands run twice in this process, but for those that start processes of a framework. The first time nothing is
blocked, so that Python and the libraries have imported all that they need: others test them on the other systems. Then
what those systems lack is taken away, pipeproof is imported again, and the commands run again. Printed is an object:
by command both outcomes, and the modules of pipeproof that cannot be imported.
"""

import functools
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import time
from importlib.machinery import BuiltinImporter, PathFinder
from multiprocessing import synchronize
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import save_file

from tests.cli.commands import EXAMPLES, REPOSITORY

_PLAN = str(EXAMPLES / "gpt_pp4.yaml")
_LOG = str(REPOSITORY / "tests" / "align" / "logs" / "trainer.log")
_TUNE = ["--gpus", "8", "--device", "h100", "--global-batch", "8", "--fix", "tp=8", "--fix", "mbs=1", "--workers", "1"]
COMMANDS = {
    "check": [_PLAN, str(EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml")],
    "compare": [_PLAN, str(EXAMPLES / "gpt_pp2_zbv_torch.yaml")],
    "doctor": [],
    "import plan": [str(EXAMPLES / "importing" / "megatron.sh"), "-o", "megatron.yaml"],
    "import profile": [".", "--plan", _PLAN],
    "init": [
        "--model",
        "llama3-8b",
        "--gpus",
        "8",
        "--pp",
        "2",
        "--tp",
        "4",
        "--device",
        "h100",
        "--global-batch",
        "8",
    ],
    "job hang": [str(EXAMPLES / "importing" / "dumps")],
    "play": ["-o", "play.html"],
    "rehearse": [_PLAN],
    "run": [_PLAN],
    "schedule convert": [str(EXAMPLES / "schedules" / "zbv_pp2.csv"), "--as", "text"],
    "schedule list": [],
    "schedule show": ["zb_v", "-p", "4", "-m", "8"],
    "show": [_PLAN, "--rank", "0"],
    "simulate": [_PLAN, "-o", "timeline.html"],
    "state align": [_LOG, _LOG],
    "state aoa": ["rename.aoa", "--source", "model.safetensors"],
    "state diff": ["model.safetensors", "model.safetensors"],
    "state reshard": ["model.safetensors", "-o", "moved.safetensors"],
    "state show": ["model.safetensors", "--md5"],
    "sweep": [_PLAN, "--set", "schedule.num_micro_batches=[4, 8]", "--workers", "1"],
    "tune": ["llama3_8b", *_TUNE, "-o", "tuned"],
}
"""Arguments by the words of each command."""
LAUNCHED = ("doctor", "rehearse", "run")
"""Commands that start processes of a framework."""

_FRAMEWORKS = ("paddle", "torch")
_MODULES = {
    "darwin": (),
    "win32": ("fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"),
}
_LINUX_ONLY = {
    os: """CLONE_FS EFD_CLOEXEC MFD_CLOEXEC O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_TMPFILE POSIX_FADV_DONTNEED
        POSIX_FADV_WILLNEED copy_file_range eventfd getrandom getresgid getresuid getxattr listxattr
        memfd_create pidfd_open posix_fadvise posix_fallocate removexattr sched_getaffinity sched_setaffinity
        sched_getparam setresuid setxattr splice""",
    signal: "SIGCLD SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT sigtimedwait sigwaitinfo",
    socket: "AF_PACKET SO_BINDTODEVICE SO_MARK TCP_USER_TIMEOUT",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
_POSIX_ONLY = {
    os: """O_CLOEXEC O_DIRECTORY O_DSYNC O_NDELAY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC POSIX_SPAWN_OPEN chown
        chroot confstr ctermid fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs get_blocking
        getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg
        lchown lockf mkfifo mknod nice openpty pathconf posix_spawn pread preadv pwrite pwritev readv
        register_at_fork sched_yield sendfile set_blocking setegid seteuid setgid setpgid setsid setuid sync
        sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid writev""",
    signal: """SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP
        SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK
        SIG_UNBLOCK alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait""",
    socket: "AF_UNIX SO_REUSEPORT",
    time: "CLOCK_MONOTONIC CLOCK_REALTIME clock_getres clock_gettime clock_gettime_ns clock_settime tzset",
}


def hide(names):
    """Let modules not be found, as where they are not installed."""
    for finder in (BuiltinImporter, PathFinder):
        finder.find_spec = functools.partial(_spec_unless_hidden, names, finder.find_spec)
    for name in [*sys.modules]:
        if name.partition(".")[0] in names:
            del sys.modules[name]


def _spec_unless_hidden(names, find, name, path=None, target=None):
    return None if name.partition(".")[0] in names else find(name, path, target)


def take_away(system):
    """Make this process lack what the system lacks, and forget pipeproof's modules."""

    def refuse(event, arguments):
        if event == "open" and str(arguments[0]).startswith("/proc/"):
            raise FileNotFoundError(arguments[0])

    hide(_MODULES[system])
    for name in [*sys.modules]:
        if name.partition(".")[0] == "pipeproof":
            del sys.modules[name]
    for lacking in (_LINUX_ONLY, _POSIX_ONLY) if system == "win32" else (_LINUX_ONLY,):
        for module, attributes in lacking.items():
            for attribute in attributes.split():
                if hasattr(module, attribute):
                    delattr(module, attribute)
    if system == "win32":
        os.O_BINARY = 0
    synchronize.sys = SimpleNamespace(**vars(sys))  # its locks stay this system's
    sys.platform = system
    sys.addaudithook(refuse)


def outcomes(directory, commands):
    """By command its exit status and its output, or the error that escaped."""
    from pipeproof.cli.main import main

    os.environ["PIPEPROOF_DEBUG"] = "1"  # unexpected errors escape
    (directory / "rename.aoa").write_text("weight -> renamed\n")
    save_file({"weight": np.arange(12, dtype=np.float32).reshape(3, 4)}, directory / "model.safetensors")
    found = {}
    for words in commands:
        result = CliRunner().invoke(main, [*words.split(), *COMMANDS[words]])
        escaped = result.exception is not None and not isinstance(result.exception, SystemExit)
        found[words] = [repr(result.exception) if escaped else result.exit_code, result.output]
    return found


def unimportable():
    """Modules of pipeproof that cannot be imported, with their errors; not those that import a framework."""
    import pipeproof

    hide(_FRAMEWORKS)
    os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # trio is one, which Selenium brings: it asks for this system
    errors = {}
    for module in pkgutil.walk_packages(pipeproof.__path__, "pipeproof.", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except Exception as error:  # noqa: BLE001 - of any kind
            if not (isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in _FRAMEWORKS):
                errors[module.name] = repr(error)
    return errors


def compare(system, directory):
    """Both outcomes of each command, and what cannot be imported."""
    before, after = directory / "before", directory / "after"
    for part in (before, after):
        part.mkdir()
    os.chdir(before)
    here = outcomes(before, [words for words in COMMANDS if words not in LAUNCHED])
    os.chdir(after)
    take_away(system)
    return {"here": here, "there": outcomes(after, COMMANDS), "unimportable": unimportable()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare(sys.argv[1], Path(sys.argv[2]))))
