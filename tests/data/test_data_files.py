"""Files on disk other than the file that was meant: too large, endless, waited for."""

import gzip
import os
import socket
from pathlib import Path

import pytest
from helpers import refused
from hostile import peak_of, within

from jaxfl.data import files
from jaxfl.data.files import bad_file, check_folder, contents, read_bytes

REMEDY = "Download it again."


def test_a_file_of_max_bytes_is_read(tmp_path):
    for content in (b"12345", gzip.compress(b"12345"), gzip.compress(b"123") + gzip.compress(b"45")):
        (tmp_path / "file").write_bytes(content)
        assert read_bytes(tmp_path / "file", REMEDY, 5) == b"12345"
        words = ("file in", "at most 4 bytes", "it holds more", REMEDY)
        refused(lambda: read_bytes(tmp_path / "file", REMEDY, 4), "data_dir", *words)


def test_at_most_a_step_more_than_max_bytes_is_ever_held(tmp_path):
    (tmp_path / "file").write_bytes(gzip.compress(bytes(60_000_000)))
    with peak_of(8_000_000):
        refused(lambda: read_bytes(tmp_path / "file", REMEDY, 3_000_000), "data_dir", "at most 3,000,000 bytes")
    (tmp_path / "file").write_bytes(b"")
    os.truncate(tmp_path / "file", 1 << 40)  # without a block on disk
    with peak_of(8_000_000):
        refused(lambda: read_bytes(tmp_path / "file", REMEDY, 3_000_000), "data_dir", "at most 3,000,000 bytes")


def pipe(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # a socket's path has at most 100 characters


@pytest.mark.parametrize(
    "make", [pipe, listening, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("/dev/tty")]
)
def test_a_pipe_a_socket_or_a_device_is_refused_not_opened(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with within(10):
        words = ("file in", "must be a file", "a pipe, a socket or a device")
        refused(lambda: read_bytes(tmp_path / "file", REMEDY, 100), "data_dir", *words)


def test_a_folder_and_a_link_to_itself(tmp_path):
    refused(lambda: read_bytes(tmp_path, REMEDY, 100), "data_dir", "must be a file", "it is a folder")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    refused(lambda: read_bytes(tmp_path / "link", REMEDY, 100), "data_dir", "be readable", "symbolic links")


def test_what_a_file_names_stays_on_one_line(tmp_path):
    message = str(bad_file(Path("folder/a\nb"), "hold x", "it holds \x1b[2J\udc80 " + "long " * 1000, REMEDY))
    assert message.startswith("data_dir: a?b in folder must hold x; it holds ?[2J? long long")
    assert message.endswith(f" and more. {REMEDY}")
    assert len(message) < 2 * files._MAX_SHOWN
    (tmp_path / "a\nb").mkdir()
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    assert contents(tmp_path) == "a?b, ?"


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_names_that_no_folder_can_have(name):
    refused(lambda: check_folder(name, "the folder", REMEDY), "data_dir", "there is no folder")
