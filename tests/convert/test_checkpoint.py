"""Checkpoint directories: single files and shards, and every way they can fail to fit together (cases.md A10)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.checkpoint import INDEX, Checkpoint, summary
from ddtree_jax.errors import InputError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B, C = np.arange(4, dtype=np.float32), np.ones((2, 3), np.float16), np.full(2, 7.0, np.float32)
WEIGHT_MAP = {"c": SECOND, "b": FIRST, "a": FIRST}  # neither the order of the files nor that inside them


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A directory with a, b in one shard and c in another."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"a": A, "b": B}, tmp_path / FIRST)
    save_file({"c": C}, tmp_path / SECOND)
    write_index(tmp_path, WEIGHT_MAP)
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": weight_map}))


def test_shards_are_one_set_of_tensors(shards: Path):
    checkpoint = Checkpoint(shards)
    assert set(checkpoint.names()) == {"a", "b", "c"}
    for name, value in {"a": A, "b": B, "c": C}.items():
        assert checkpoint.shape(name) == value.shape
        assert checkpoint.dtype(name) == value.dtype
        np.testing.assert_array_equal(checkpoint.read(name), value)


def test_a_single_file_needs_no_index_and_wins_over_one(shards: Path):
    save_file({"a": A + 1}, shards / "model.safetensors")
    assert list(Checkpoint(str(shards)).names()) == ["a"]
    (shards / INDEX).unlink()
    np.testing.assert_array_equal(Checkpoint(shards).read("a"), A + 1)


def test_json_beside_the_weights(shards: Path):
    (shards / "generation_config.json").write_text('{"eos_token_id": 3}')
    checkpoint = Checkpoint(shards)
    assert checkpoint.config == {"model_type": "qwen3"}
    assert checkpoint.json("generation_config.json") == {"eos_token_id": 3}
    assert checkpoint.json("nothing.json") == {}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (WEIGHT_MAP | {"d": SECOND, "e": FIRST}, "does not match its shards: not in their shard: d, e$"),
        ({"a": FIRST, "c": SECOND}, "does not match its shards: not in the index: b$"),
        (WEIGHT_MAP | {"a": SECOND}, "not in their shard: a$"),
        ({"c": SECOND, "x": SECOND, "a": FIRST}, "not in their shard: x; not in the index: b$"),
        (WEIGHT_MAP | {"d": "third.safetensors"}, "lacks 1 shard.* named in its index: third.safetensors"),
        (None, "should hold a weight_map"),
        ([FIRST], "should hold a weight_map"),
        ({"a": 1}, "should hold a weight_map"),
        ({"a": [FIRST]}, "should hold a weight_map"),
        ({"a": "."}, "cannot be read: Is a directory"),
    ],
)
def test_bad_indexes_are_refused(shards: Path, weight_map: Any, message: str):
    write_index(shards, weight_map)
    with pytest.raises(InputError, match=message):
        Checkpoint(shards)


def test_an_empty_index_has_no_tensors(shards: Path):
    write_index(shards, {})
    assert list(Checkpoint(shards).names()) == []  # then every parameter is missing


def test_a_missing_shard_is_named(shards: Path):
    (shards / SECOND).unlink()
    with pytest.raises(InputError, match=f"lacks 1 shard.*{SECOND}"):
        Checkpoint(shards)


def test_a_truncated_shard_is_noticed_before_anything_is_read(shards: Path):
    whole = (shards / SECOND).read_bytes()
    (shards / SECOND).write_bytes(whole[:-1])
    with pytest.raises(InputError, match=f"{SECOND} is truncated"):
        Checkpoint(shards)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b'{"a": \xff}', "not UTF-8"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "must hold a JSON object"),
        (b'"text"', "must hold a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_broken_json_is_refused(shards: Path, name: str, content: bytes, message: str):
    (shards / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        Checkpoint(shards)
    assert name in str(caught.value)


def test_what_is_no_checkpoint_is_refused(shards: Path):
    for path in (shards / "nothing", shards / "config.json", Path("x" * 5000)):
        with pytest.raises(InputError, match="is not a directory; give a local"):
            Checkpoint(path)
    (shards / INDEX).unlink()
    with pytest.raises(InputError, match="has neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(shards)
    (shards / "config.json").unlink()
    with pytest.raises(InputError, match="has no config.json"):
        Checkpoint(shards)
    (shards / "config.json").mkdir()
    with pytest.raises(InputError, match="config.json cannot be read"):
        Checkpoint(shards)


def test_summary_shows_a_few_and_counts_all():
    assert summary("missing", []) == ""
    assert summary("missing", ["b", "a"]) == "missing: a, b; "
    assert summary("missing", "gfedcba", show=3) == "missing: a, b, c, ... (7 in all); "
