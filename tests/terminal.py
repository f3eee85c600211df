"""What a script shows on a terminal, which is a pseudo-terminal here."""

import fcntl
import os
import pty
import struct
import termios


def shown(warm_python, script, folder, *options, columns=120):
    """What ``parwrap`` shows of a script with ``options`` on a terminal of so many columns."""
    (folder / "train.py").write_text(script)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {**warm_python.environ, "COLUMNS": str(columns)}  # which goes before the terminal's own width
    command = warm_python.start("parwrap", *options, "train.py", streams=[theirs] * 3, cwd=folder, environ=environ)
    os.close(theirs)
    parts = []
    while part := _read(ours):
        parts.append(part)
    command.wait(60)
    os.close(ours)
    return b"".join(parts).decode()


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""
