"""Reading the user's files: every fault is one InputError that names the file."""

import os
from pathlib import Path
from typing import Any

import pytest

from ddtree_jax.errors import InputError
from ddtree_jax.files import read_json, read_object, read_object_if_there, read_text


@pytest.mark.parametrize(
    ("content", "value"), [("[1, 2.5]", [1, 2.5]), ('"é"', "é"), ("null", None), ('{"a": {}}', {"a": {}})]
)
def test_any_value_is_read(tmp_path: Path, content: str, value: Any):
    (tmp_path / "f").write_text(content, encoding="utf-8")
    assert read_text(tmp_path / "f") == content
    assert read_json(tmp_path / "f") == value


def test_objects(tmp_path: Path):
    assert read_object_if_there(tmp_path / "f") == {}
    (tmp_path / "f").write_text('{"a": 1}')
    assert read_object_if_there(tmp_path / "f") == read_object(tmp_path / "f") == {"a": 1}
    (tmp_path / "f").write_text("[]")
    for read in (read_object, read_object_if_there):
        with pytest.raises(InputError, match="f must hold a JSON object"):
            read(tmp_path / "f")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "f cannot be read as JSON: Expecting value"),
        (b"{'a': 1}", "f cannot be read as JSON"),
        (b"[" * 100_000, "f cannot be read as JSON: maximum recursion"),
        (b'"\xe9"', "f cannot be read: it is not UTF-8 text \\(byte 1\\)"),
        (b"\xff\xfe1\x00", "it is not UTF-8 text \\(byte 0\\)"),
    ],
)
def test_bad_content(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "f")


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "f")
    for path in (tmp_path / "f", Path("/dev/zero")):
        with pytest.raises(InputError, match="cannot be read: it is not a regular file$"):
            read_text(path)


def test_no_file(tmp_path: Path):
    for path, message in ((tmp_path / "none", "none does not exist$"), (tmp_path, "cannot be read: Is a directory$")):
        with pytest.raises(InputError, match=message):
            read_json(path)
