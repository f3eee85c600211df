import gc
import io

import pytest

from parwrap.intercept.disk import Opening
from parwrap.rank_zero.open_files import is_valid, opened

MODES = ["w", "wb", "a", "ab", "x", "xb", "w+", "w+b", "a+", "r+", "r+b", "rb+", "wt"]


def open_watched(path, mode, buffering=-1, encoding=None, errors=None, newline=None, name=None):
    told = []
    return opened(Opening(open, name or path, mode, buffering, encoding, errors, newline), path, lambda: told.append(True)), told


@pytest.mark.parametrize("buffering", [-1, 0, 1, 64])
@pytest.mark.parametrize("mode", MODES)
def test_the_file_is_of_the_same_kind_as_opens(mode, buffering, tmp_path):
    if buffering == 0 and "b" not in mode:
        pytest.skip("open refuses this")
    files = []
    for name, function in (("open", open), ("watched", lambda *args: open_watched(*args)[0])):
        path = tmp_path / name
        if "x" not in mode:
            path.write_bytes(b"some")
        with pytest.warns() if buffering == 1 and "b" in mode and function is open else io.StringIO():
            files.append(function(str(path), mode, buffering))
    for attribute in ("mode", "encoding", "newlines", "line_buffering", "errors"):
        assert getattr(files[0], attribute, None) == getattr(files[1], attribute, None), attribute
    assert [file.tell() for file in files] == [files[0].tell()] * 2
    assert isinstance(files[1], type(files[0]))
    for file in files:
        file.write("x" if "b" not in mode else b"x")
        file.close()
    assert (tmp_path / "open").read_bytes() == (tmp_path / "watched").read_bytes()


@pytest.mark.parametrize("end", [lambda file: file.close(), lambda file: file.__exit__(None, None, None), lambda file: gc.collect()])
@pytest.mark.parametrize("mode", ["w", "wb"])
def test_it_tells_once_when_it_is_closed_and_all_is_written(mode, end, tmp_path):
    path, told = tmp_path / "a", []
    file = opened(Opening(open, path, mode), path, lambda: told.append(path.read_bytes()))
    file.write("text" if mode == "w" else b"text")
    assert not told
    end(file)
    del file
    gc.collect()

    assert [b"text"] == told


def test_lines_and_encodings_are_written_as_asked(tmp_path):
    file, _ = open_watched(tmp_path / "a", "w", 1, "utf-16-le", newline="\r\n", name="its name")
    file.write("ä\n")

    assert "ä\r\n".encode("utf-16-le") == (tmp_path / "a").read_bytes()
    assert "its name" == file.name == file.buffer.name
    file.close()


def test_a_file_that_cannot_be_opened_tells_nothing(tmp_path):
    told = []
    with pytest.raises(FileNotFoundError):
        opened(Opening(open, "a", "w"), tmp_path / "none" / "a", lambda: told.append(True))
    with pytest.raises(LookupError):
        opened(Opening(open, "a", "w", encoding="no such encoding"), tmp_path / "a", lambda: told.append(True))
    with pytest.raises(ValueError, match="unbuffered text"):
        opened(Opening(open, "a", "w", buffering=0), tmp_path / "a", lambda: told.append(True))
    gc.collect()

    assert not told


@pytest.mark.parametrize("mode", [*MODES, "r", "rw", "q", "", "wbt", "ww", "b", "U"])
@pytest.mark.parametrize("encoding", [None, "utf8"])
def test_what_is_valid_is_what_open_takes(mode, encoding, tmp_path):
    path = tmp_path / "a"
    if "x" not in mode:
        path.touch()
    try:
        open(path, mode, encoding=encoding).close()
        taken = True
    except ValueError:
        taken = False

    assert taken == is_valid(Opening(open, path, mode, encoding=encoding))
