"""Lets parwrap's own code see macOS or Windows in processes on Linux.

It is emulation: torch, the standard library and the kernel stay those of Linux. ``emulated`` starts processes with this file as their
``sitecustomize``. Names that the system lacks are renamed in the source of each module of parwrap as it is imported, so that using one
fails as it would there; children of these processes, such as ranks, do the same.
"""

import os
import re
import struct
import sys
from pathlib import Path

SYSTEM = "PARWRAP_TESTS_SYSTEM"
"""The variable with the value of ``sys.platform`` that parwrap sees."""

OF_LINUX = {"os": "memfd_create pidfd_open sched_getaffinity", "time": "CLOCK_REALTIME_COARSE"}
"""What macOS lacks of what parwrap could ask for, by module."""

OF_POSIX = {
    "os": "fork getpgid getuid killpg mkfifo pread register_at_fork setpgid statvfs O_CLOEXEC O_NOFOLLOW",
    "time": "clock_gettime CLOCK_REALTIME",
    "faulthandler": "register",
    "dist": "HashStore",
}
"""What Windows lacks besides. ``mypy --platform win32`` finds what is used of it."""

MODULES = r"\b(import |from )(fcntl|resource|pwd|grp|pty|termios)\b"
SIGNALS = r"\b(SIG(?:KILL|HUP|QUIT|USR1|USR2|CHLD|PIPE|XFSZ|ALRM|STOP|CONT)|SIG_(?:BLOCK|UNBLOCK|SETMASK)|pthread_sigmask)\b"


def seen(source, system):
    """``source`` as it would run on ``system``.

    >>> print(seen('sys.platform; os.fork(); hasattr(os, "fork"); open("/proc/1/stat"); get_context("fork"); signal.SIGKILL', "win32"))
    'win32'; os.no_fork(); hasattr(os, "no_fork"); open("/no/proc/1/stat"); get_context("fork"); signal.NO_SIGKILL
    """
    source = re.sub(r"\bsys\.platform\b", repr(system), source)
    source = re.sub(r"/(proc|sys|dev/shm)\b", r"/no/\1", source)
    missing = [OF_LINUX, OF_POSIX] if system == "win32" else [OF_LINUX]
    for module, names in (item for each in missing for item in each.items()):
        source = re.sub(rf'\b({module}\.|{module}, ")({names.replace(" ", "|")})\b', r"\1no_\2", source)
    if system == "win32":
        source = re.sub(MODULES, r"\1no_\2", re.sub(SIGNALS, r"NO_\1", source))
        return source.replace("import msvcrt", "import emulated_msvcrt as msvcrt")
    return source.replace('"lo0"', '"lo"')  # the loopback interface of the machine underneath


def emulated(folder, system):
    """The environment of processes in which parwrap sees ``system``. ``folder`` is an empty one."""
    (folder / "sitecustomize.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join([str(folder), str(Path(__file__).parent.parent)])
    temporary = str(folder)  # locks of Linux and of Windows do not see each other
    return {**os.environ, SYSTEM: system, "PYTHONPATH": path, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"}


def emulate(system):
    """Let this process's imports of parwrap see ``system``, and :mod:`multiprocessing` have its start methods."""
    from importlib.machinery import PathFinder, SourceFileLoader
    from multiprocessing import context

    class Loader(SourceFileLoader):
        def get_code(self, fullname):
            return compile(seen(self.get_data(self.path).decode(), system), self.path, "exec", dont_inherit=True)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            spec = PathFinder.find_spec(name, path, target) if name.partition(".")[0] == "parwrap" else None
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = Loader(spec.loader.name, spec.loader.path)
            return spec

    sys.meta_path.insert(0, Finder)
    context._default_context._default_context = context._concrete_contexts["spawn"]
    if system == "win32":
        for method in ("fork", "forkserver"):
            del context._concrete_contexts[method]
        emulate_msvcrt()
    else:
        emulate_getpath()


def emulate_msvcrt():
    """A module that locks bytes of files, for all other descriptors of them, as Windows does."""
    import fcntl
    from types import ModuleType

    def locking(descriptor, mode, size):
        kind = fcntl.F_UNLCK if mode == 0 else fcntl.F_WRLCK
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, place, size, 0))

    sys.modules["emulated_msvcrt"] = module = ModuleType("emulated_msvcrt")
    vars(module).update(LK_UNLCK=0, LK_NBLCK=2, locking=locking)


def emulate_getpath():
    """The command of ``fcntl`` that on macOS returns the path of an open file."""
    import fcntl

    original, fcntl.F_GETPATH = fcntl.fcntl, 50

    def answered(descriptor, command, *argument):
        if command == fcntl.F_GETPATH:
            return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).ljust(1024, b"\0")
        return original(descriptor, command, *argument)

    fcntl.fcntl = answered


if SYSTEM in os.environ:
    emulate(os.environ[SYSTEM])
