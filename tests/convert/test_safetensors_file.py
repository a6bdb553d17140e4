"""The safetensors reader against files written by the public library, and against every way a file can be broken."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.safetensors_file import SafetensorsFile
from ddtree_jax.errors import InputError

FLOATS = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file by hand: `header` as JSON (bytes are taken as they are), `length` to lie about its size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("name", FLOATS)
def test_every_bit_is_read(tmp_path: Path, name: str):
    dtype = np.dtype(FLOATS[name])
    bits = np.arange(2 ** (8 * min(dtype.itemsize, 2)), dtype=np.uint32)  # all 8 or 16 bit patterns, NaN and -0 too
    stored = (bits << 16 if dtype.itemsize == 4 else bits).astype(f"u{dtype.itemsize}").view(dtype).reshape(4, -1)
    save_file({"x": stored, "odd": np.ones(3, np.uint8)}, tmp_path / "f")
    file = SafetensorsFile(tmp_path / "f")
    read = file.read("x")
    assert read.dtype == dtype == file.entries["x"].dtype
    assert read.shape == stored.shape == file.entries["x"].shape
    assert read.tobytes() == stored.tobytes()


def test_values_of_bfloat16_and_float8_are_literal(tmp_path: Path):
    header = {"b": entry("BF16", [2], [0, 4]), "f": entry("F8_E4M3", [1, 3], [4, 7])}
    path = write(tmp_path / "f", header, bytes([0x80, 0x3F, 0x20, 0xC1, 0x38, 0x7E, 0xB9]))
    file = SafetensorsFile(path)
    assert file.read("b").astype(np.float32).tolist() == [1.0, -10.0]
    assert file.read("f").astype(np.float32).tolist() == [[1.0, 448.0, -1.125]]


def test_tensors_of_any_shape_and_order(tmp_path: Path):
    header = {
        "__metadata__": {"format": "pt"},
        "second": entry("I16", [1, 2], [4, 8]),
        "scalar": entry("F32", [], [0, 4]),
        "none": entry("F32", [0, 7], [8, 8]),
        "unaligned": entry("F32", [1], [9, 13]),
        "byte": entry("U8", [1], [8, 9]),
    }
    data = np.float32(0.5).tobytes() + np.array([-2, 3], np.int16).tobytes() + b"\x07" + np.float32(-1.5).tobytes()
    file = SafetensorsFile(write(tmp_path / "f", header, data))
    assert set(file.entries) == {"second", "scalar", "none", "unaligned", "byte"}
    assert file.read("scalar").shape == () and file.read("scalar") == 0.5
    assert file.read("second").tolist() == [[-2, 3]]
    assert file.read("none").shape == (0, 7)
    assert file.read("unaligned").tolist() == [-1.5]
    assert file.read("byte").tolist() == [7]


def test_reading_maps_and_does_not_copy(tmp_path: Path):
    save_file({"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "f")
    read = SafetensorsFile(tmp_path / "f").read("x")
    assert isinstance(read, np.memmap) and not read.flags.writeable


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (b"", b"", 0, "broken safetensors header"),
        (b"{", b"", None, "broken safetensors header"),
        (b"\xff\xfe", b"", None, "broken safetensors header"),
        (b"[" * 100_000, b"", None, "broken safetensors header"),
        ([1], b"", None, "broken safetensors header"),
        ({}, b"", 1, "broken safetensors header"),
        ({}, b"", 3, "truncated \\(10 bytes\\)"),
        ({}, b"", 100, "truncated \\(10 bytes\\)"),
        ({}, b"", 2**63, "truncated \\(10 bytes\\)"),
        ({"x": entry()}, bytes(7), None, "is truncated: \\d+ bytes are declared, \\d+ are there"),
        ({"x": entry()}, bytes(9), None, "longer than its header says"),
        ({"x": entry(shape=[3])}, bytes(8), None, "tensor x has 8 bytes for float32 of shape \\[3\\]"),
        ({"x": entry(shape=[2**62, 4])}, bytes(8), None, "tensor x has 8 bytes"),
        ({"x": entry(offsets=[8, 0])}, bytes(8), None, "tensor x has -8 bytes"),
        ({"x": entry(offsets=[4, 12])}, bytes(12), None, "overlap or leave holes"),
        ({"x": entry(), "y": entry()}, bytes(8), None, "overlap or leave holes"),
        ({"x": entry("F4")}, bytes(8), None, "tensor x has an entry that cannot be read: .*F4"),
        ({"x": entry(shape=[-2, -1])}, bytes(8), None, "cannot be read"),
        ({"x": entry(shape=[2.0])}, bytes(8), None, "cannot be read"),
        ({"x": entry(shape="2")}, bytes(8), None, "cannot be read"),
        ({"x": entry(offsets=[-8, 0])}, bytes(8), None, "cannot be read"),
        ({"x": entry(offsets=[0, 8, 9])}, bytes(8), None, "cannot be read"),
        ({"x": {"dtype": "F32"}}, bytes(8), None, "cannot be read"),
        ({"x": [1]}, bytes(8), None, "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, header: Any, data: bytes, length: int | None, message: str):
    path = write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(InputError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated \\(0 bytes\\)"),
        (b"\0\0", "truncated \\(2 bytes\\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "is not a safetensors file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InputError, match=message):
        SafetensorsFile(tmp_path / "f")


def test_every_truncation_is_noticed(tmp_path: Path):
    save_file({"a": np.ones((2, 2), np.float32), "b": np.ones(3, np.float16)}, tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(InputError, match="truncated|copy the file again"):
            SafetensorsFile(tmp_path / "cut")


def test_a_directory_in_place_of_a_file(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        SafetensorsFile(tmp_path)
