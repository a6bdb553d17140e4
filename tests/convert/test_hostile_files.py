"""Checkpoints made to do harm: 10,000 mutated headers, headers that lie, links and names that leave the directory."""

import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_checkpoint import DENSE, random_tensors, write
from safetensors.numpy import save, save_file

from convert.checkpoint import INDEX, Checkpoint
from convert.safetensors_file import SafetensorsFile
from ddtree_jax.errors import InputError

CASES = 10_000
SLACK = 96 << 10  # Python's own objects for a header of 400 bytes
PLAIN = save({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16), "c": np.zeros((0, 4), np.int8)})
HOSTILE = [-1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 1.5, 1e300, True, None, "", "F4", "BF16", [], {}]


def split(data: bytes) -> tuple[bytes, bytes]:
    """Header and tensors of a whole file."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def flip_bytes(rng: random.Random) -> bytes:
    data = bytearray(PLAIN)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data) - 31)] = rng.randrange(256)  # the header's length, the header, the first tensor
    return bytes(data)


def cut_or_grow(rng: random.Random) -> bytes:
    size = rng.randrange(len(PLAIN) + 40)
    return PLAIN[:size].ljust(size, b"\0")


def lie_about_length(rng: random.Random) -> bytes:
    length = rng.choice([0, 1, 2**20, 2**31, 2**63, 2**64 - 1, rng.randrange(len(PLAIN) * 2)])
    return length.to_bytes(8, "little") + PLAIN[8:]


def replace_value(rng: random.Random) -> bytes:
    """One value, at any depth of the header, becomes another."""
    header, data = split(PLAIN)
    value = json.loads(header)
    inner, key = value, rng.choice(list(value))
    while isinstance(inner[key], (dict, list)) and inner[key] and rng.random() < 0.85:
        inner = inner[key]
        key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
    inner[key] = rng.choice(HOSTILE)
    return join(json.dumps(value).encode(), data)


def move_tensor(rng: random.Random) -> bytes:
    """Offsets that overlap, leave holes, run backwards or out of the file, for a shape that may go with them."""
    header, data = split(PLAIN)
    value = json.loads(header)
    start, end = rng.choice(HOSTILE[:10]), rng.choice(HOSTILE[:10])
    shape = rng.choice([[end - start], [0], [0, 2**62, 2**62], [2**62, 4], [1] * 70, [2**32, 2**32]])
    value[rng.choice("abc")] = {"dtype": rng.choice(["U8", "F32"]), "shape": shape, "data_offsets": [start, end]}
    return join(json.dumps(value).encode(), data)


def splice(rng: random.Random) -> bytes:
    """A piece of the header is repeated, or replaced by text that JSON parsers stumble over."""
    header, data = split(PLAIN)
    start = rng.randrange(len(header))
    end = rng.randint(start, len(header))
    piece = rng.choice(
        [header[start:end] * 2, b"[" * 2000, b"{" * 50, b"9" * 5000, b'"', b"\xff", b"NaN", b"\\u0000", b""]
    )
    return join(header[:start] + piece + header[end:], data)


MUTATIONS = [flip_bytes, cut_or_grow, lie_about_length, replace_value, move_tensor, splice]


def read_all(path: Path) -> bool:
    """Whether a file is accepted; whatever is accepted can be read, inside the file."""
    try:
        file = SafetensorsFile(path)
    except InputError:
        return False
    size = path.stat().st_size
    for name, entry in file.entries.items():
        assert 8 <= entry.start <= entry.end <= size
        value = file.read(name)
        assert value.shape == entry.shape and value.nbytes == entry.end - entry.start
        value.tobytes()
    return True


@pytest.mark.slow
def test_mutated_headers_neither_crash_nor_allocate(tmp_path: Path):
    rng = random.Random(0)
    path, accepted = tmp_path / "model.safetensors", 0
    path.write_bytes(PLAIN)
    assert read_all(path)
    tracemalloc.start()
    try:
        for case in range(CASES):
            mutate: Callable[[random.Random], bytes] = MUTATIONS[case % len(MUTATIONS)]
            data = mutate(rng)
            path.write_bytes(data)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            accepted += read_all(path)
            used = tracemalloc.get_traced_memory()[1] - before
            assert used <= len(data) + SLACK, f"{used} bytes for {mutate.__name__}: {data!r}"
    finally:
        tracemalloc.stop()
    assert 50 < accepted < CASES // 2  # a flipped byte of a tensor or a name is no mistake; nearly all else is


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([0, 2**62, 2**62], [0, 0]), ([1] * 65, [0, 4]), ([0] * 65, [0, 0]), ([2**63], [0, 0]), ({"0": 1}, [0, 4])],
)
def test_shapes_that_numpy_cannot_have_are_refused(tmp_path: Path, shape: Any, offsets: list[int]):
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    (tmp_path / "f").write_bytes(join(header, bytes(offsets[1])))
    with pytest.raises(InputError, match="tensor x has an entry that cannot be read"):
        SafetensorsFile(tmp_path / "f")


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path):
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    (tmp_path / "f").write_bytes(join(f'{{"x": {entry}, "x": {entry}}}'.encode(), bytes(4)))
    with pytest.raises(InputError, match="broken safetensors header"):
        SafetensorsFile(tmp_path / "f")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "f")
    with pytest.raises(InputError, match="is not a regular file"):
        SafetensorsFile(tmp_path / "f")


# ---- links and names -------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A whole checkpoint, in pieces, beside which others are made."""
    return write(tmp_path / "outside", DENSE, random_tensors(DENSE))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_links_that_leave_the_directory_are_refused(tmp_path: Path, outside: Path, name: str):
    (outside / INDEX).write_text('{"weight_map": {}}')
    inside = tmp_path / "inside"
    inside.mkdir()
    for file in {"config.json", name}:
        (inside / file).write_bytes((outside / file).read_bytes())
    (inside / name).unlink()
    (inside / name).symlink_to(outside / name)
    with pytest.raises(InputError, match=f"inside/{name} leaves the directory \\(it is .*/outside/{name}\\)"):
        Checkpoint(inside)


@pytest.mark.parametrize(
    "shard", ["../outside/model.safetensors", "{outside}/model.safetensors", "link/model.safetensors"]
)
def test_paths_in_the_index_that_leave_the_directory_are_refused(tmp_path: Path, outside: Path, shard: str):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "config.json").write_text("{}")
    (inside / "link").symlink_to(outside)
    (inside / INDEX).write_text(json.dumps({"weight_map": {"x": shard.format(outside=outside)}}))
    with pytest.raises(InputError, match="model.safetensors leaves the directory"):
        Checkpoint(inside)


@pytest.mark.parametrize(
    ("shard", "message"), [("a\0b", "is no name of a file"), ("x" * 5000, "lacks 1 shard"), ("loop", "lacks 1")]
)
def test_names_of_no_file_are_refused(tmp_path: Path, shard: str, message: str):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(InputError, match=message):
        Checkpoint(tmp_path)


def test_links_inside_the_directory_and_inside_the_hubs_cache_are_followed(tmp_path: Path, outside: Path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, name in enumerate(("config.json", "model.safetensors")):
        (outside / name).rename(blobs / str(i))
        (snapshot / name).symlink_to(Path("../../blobs") / str(i))
    assert set(Checkpoint(snapshot).names()) == set(random_tensors(DENSE))
    (tmp_path / "short").symlink_to(snapshot)
    assert Checkpoint(tmp_path / "short").config == DENSE
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("inner")
    save_file({"x": np.ones(1, np.float32)}, snapshot / "inner")
    assert list(Checkpoint(snapshot).names()) == ["x"]
