"""Conversion to Orbax: the same bits as the original, nothing half-written, and a second run that goes on."""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint.experimental import v1 as ocp
from random_checkpoint import DENSE, HYBRID, MOE, NEXT, quantised, random_tensors, write
from recorded import named_parameters

import ddtree_jax
from convert import command, conversion, converted, orbax_store
from convert.__main__ import main as python_m_convert
from convert.checkpoint import Checkpoint
from convert.conversion import batches, checksum, convert, make_job
from convert.converted import Converted, open_directory
from convert.progress import open_progress
from convert.weights import Parameter, Plan
from ddtree_jax import cli
from ddtree_jax.errors import InputError
from ddtree_jax.info import describe, memory
from ddtree_jax.models.network import Network

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
SMALL = DENSE | {"num_hidden_layers": 1}
COUNT = 14  # its parameters


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A dense checkpoint with everything that may lie beside its weights."""
    directory = write(tmp_path / "source", SMALL, random_tensors(SMALL))
    for name in ("generation_config.json", "tokenizer_config.json"):
        (directory / name).write_text('{"eos_token_id": 3}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "pytorch_model.bin").write_bytes(b"never read, never copied")
    return directory


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter is a batch of its own."""
    monkeypatch.setattr(conversion, "batches", functools.partial(batches, limit=1))


@jax.jit
def logits(network: Network) -> jax.Array:
    module = network.module()
    return module.logits(module(jnp.arange(12)[None])[0])


def assert_same(ours: Network, theirs: Network) -> None:
    expected = named_parameters(theirs)
    assert ours.spec == theirs.spec and len(ours.leaves) == len(expected)
    for name, value in named_parameters(ours).items():
        assert value.dtype == expected[name].dtype
        assert np.asarray(value).tobytes() == np.asarray(expected[name]).tobytes(), name


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# ---- the same model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [DENSE, MOE, HYBRID, NEXT], ids=["dense", "moe", "hybrid", "next"])
def test_a_converted_checkpoint_loads_with_the_same_bits(tmp_path: Path, config: dict[str, Any], dtype: str):
    source = write(tmp_path / "a", config, random_tensors(config))
    convert(make_job(source, tmp_path / "b", dtype), verify=True)
    assert_same(ddtree_jax.load(tmp_path / "b", dtype=dtype).target, ddtree_jax.load(source, dtype=dtype).target)


@pytest.mark.parametrize("config", [SMALL, pytest.param(MOE, marks=pytest.mark.slow)], ids=["dense", "moe"])
def test_logits_are_bit_equal(tmp_path: Path, config: dict[str, Any]):
    source = write(tmp_path / "a", config, random_tensors(config))
    convert(make_job(source, tmp_path / "b", "bfloat16"))
    ours, theirs = (ddtree_jax.load(tmp_path / name, dtype="bfloat16").target for name in "ba")
    assert np.asarray(logits(ours)).tobytes() == np.asarray(logits(theirs)).tobytes()
    assert np.isfinite(np.asarray(logits(ours))).all()


def test_a_float32_conversion_serves_both_dtypes(tmp_path: Path, source: Path):
    convert(make_job(source, tmp_path / "b", "float32"))
    for dtype in ("float32", "bfloat16"):
        assert_same(ddtree_jax.load(tmp_path / "b", dtype=dtype).target, ddtree_jax.load(source, dtype=dtype).target)


def test_a_bfloat16_conversion_is_widened(tmp_path: Path):
    """As the original is, when it is stored in bfloat16."""
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in random_tensors(HYBRID).items()}
    source = write(tmp_path / "a", HYBRID, tensors)
    convert(make_job(source, tmp_path / "b", "bfloat16"))
    assert_same(
        ddtree_jax.load(tmp_path / "b", dtype="float32").target, ddtree_jax.load(source, dtype="float32").target
    )


def test_fp8_is_dequantised_by_conversion(tmp_path: Path):
    stored, twin = quantised(random_tensors(NEXT), lambda name: "_proj" in name and "in_proj_ba" not in name)
    job = make_job(write(tmp_path / "a", NEXT | FP8, stored), tmp_path / "b", "bfloat16")
    assert "parameters are FP8 in the checkpoint and are dequantised: " in command.table(job)
    convert(job)
    ours = ddtree_jax.load(tmp_path / "b", dtype="bfloat16").target
    assert_same(ours, ddtree_jax.load(write(tmp_path / "c", NEXT, twin), dtype="bfloat16").target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_may_stay_fp8(tmp_path: Path, dtype: str):
    stored, _ = quantised(random_tensors(NEXT), lambda name: "_proj" in name and "in_proj_ba" not in name)
    source, destination = write(tmp_path / "a", NEXT | FP8, stored), tmp_path / "b"
    job = make_job(source, destination, dtype, fp8=True)
    table = command.table(job)
    assert "13 parameters stay FP8: 0.000 GB with their scales" in table
    assert "are dequantised: layers.*.linear_attn.in_proj_qkv.weight, layers.*.linear_attn.in_proj_z.weight" in table
    assert "out_proj.weight" in table and "float8_e4m3fn" in table
    convert(job, verify=True)
    ours = ddtree_jax.load(destination, dtype=dtype)
    assert ours.target.spec.fp8 and len(ours.target.spec.fp8.names) == 13
    assert_same(ours.target, ddtree_jax.load(source, dtype=dtype, keep_fp8=True).target)
    assert memory(ours.target.config, dtype, ours.target.spec.fp8).weights == sum(x.nbytes for x in ours.target.leaves)
    for directory, keep in ((destination, False), (source, True)):
        assert ", 13 of them FP8" in describe(str(directory), dtype, as_json=False, keep_fp8=keep)
    record = json.loads((destination / "conversion.json").read_text())
    assert record["fp8"]["block"] == [16, 16] and record["dequantised"] == 4


def test_what_has_no_fp8_cannot_keep_it(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main([str(source), str(tmp_path / "b"), "--keep-fp8"]) == 2
    assert "has no FP8 weights that could be kept; convert without --keep-fp8" in capsys.readouterr().err


def test_a_drafter_converts_too(tmp_path: Path, golden: Callable[[str], Path]):
    names = {"target": "qwen3", "drafter": "dflash_qwen3"}
    for part, name in names.items():
        convert(make_job(golden(name), tmp_path / part, "float32"))
    ours = ddtree_jax.load(tmp_path / "target", tmp_path / "drafter", dtype="float32")
    theirs = ddtree_jax.load(golden("qwen3"), golden("dflash_qwen3"), dtype="float32")
    assert ours.drafter and theirs.drafter
    assert_same(ours.drafter, theirs.drafter)
    assert_same(ours.target, theirs.target)
    mixed = ddtree_jax.load(golden("qwen3"), tmp_path / "drafter", dtype="float32")
    assert_same(mixed.drafter, ours.drafter)


def test_any_orbax_program_can_read_it(tmp_path: Path, source: Path):
    convert(make_job(source, tmp_path / "b", "float32"))
    read = ocp.load(tmp_path / "b" / "weights")
    assert len(read) == COUNT
    expected = Checkpoint(source).read("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(read["layers.0.mlp.up_proj.weight"], expected)


# ---- what lies beside the weights ------------------------------------------------------------------------------------


def test_the_small_files_come_along(tmp_path: Path, source: Path):
    convert(make_job(source, tmp_path / "b", "bfloat16"))
    kept = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files(tmp_path / "b") == kept | {"weights", "conversion.json"}
    for name in kept:
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
    assert files(tmp_path) == {"source", "b"}
    assert ddtree_jax.load(tmp_path / "b").stop_ids == ddtree_jax.load(source).stop_ids == (3,)


def test_the_record_says_where_it_comes_from(tmp_path: Path):
    tensors = random_tensors(HYBRID) | {"mtp.fc.weight": np.ones(1, np.float32)}
    source = write(tmp_path / "a", HYBRID, tensors)
    convert(make_job(source, tmp_path / "b", "bfloat16"))
    record = json.loads((tmp_path / "b" / "conversion.json").read_text())
    assert (record["network"], record["dtype"], record["config"]) == ("Target", "bfloat16", HYBRID)
    assert record["float32"] == [f"layers.0.linear_attn.{x}" for x in ("A_log", "dt_bias", "norm.weight")]
    assert record["skipped"] == {"mtp.": 1} and record["dequantised"] == 0
    assert {"ddtree-jax", "jax", "flax", "orbax-checkpoint"} <= record["versions"].keys()
    assert record["source"]["name"] == "a" and record["source"]["index_sha256"] is None
    assert len(record["source"]["headers_sha256"]) == 64
    name = "layers.1.mlp.up_proj.weight"
    stored = tensors["model." + name].astype(ml_dtypes.bfloat16)
    assert record["parameters"][name] == {"shape": [56, 40], "dtype": "bfloat16", "crc32": checksum(stored)}


def test_checksums_are_literal():
    assert checksum(np.frombuffer(b"123456789", np.uint8)) == 0xCBF43926
    assert checksum(np.array([[1.0, 2.0]], ml_dtypes.bfloat16)) == checksum(np.array([0x3F80, 0x4000], np.uint16))


def test_batches_are_as_large_as_may_be():
    def parameter(name: str, size: int) -> Parameter:
        return Parameter(name, (size,), np.dtype(np.int8), None)  # type: ignore[arg-type]

    sizes = [3, 4, 4, 20, 1, 9, 1]
    made = batches([parameter(str(i), size) for i, size in enumerate(sizes)], limit=10)
    assert [[p.nbytes for p in batch] for batch in made] == [[3, 4], [4], [20], [1, 9], [1]]


# ---- killed and run again --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def killed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int = 1, after: bool = False) -> None:
    """The `calls`-th call of a function kills the run, before or after it has done its work."""
    real, seen = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        if len(seen) == calls and not after:
            raise Killed
        result = real(*args, **kwargs)
        if len(seen) == calls:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, call)


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the parameters that are made."""
    made: list[str] = []
    real = Plan.make
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "make", lambda plan, parameter: made.append(parameter.name) or real(plan, parameter))
        yield made


STAGES = {
    "first batch": (conversion, "write_batch", 1, False, COUNT),
    "sixth batch": (conversion, "write_batch", 6, False, COUNT - 5),
    "between writing and noting": (conversion.Progress, "add", 6, False, COUNT - 5),
    "after noting": (conversion.Progress, "add", 6, True, COUNT - 6),
    "before merging": (conversion.Progress, "start_merging", 1, False, 0),
    "while merging": (orbax_store, "finish", 1, False, COUNT),
    "after merging": (orbax_store, "finish", 1, True, 0),
    "before the record": (conversion, "write_record", 1, False, 0),
    "before the rename": (conversion, "write_record", 1, True, 0),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_leaves_nothing_that_loads_and_the_next_goes_on(
    tmp_path: Path, source: Path, one_by_one: None, monkeypatch: pytest.MonkeyPatch, stage: str
):
    owner, name, calls, after, left = STAGES[stage]
    job = make_job(source, tmp_path / "b", "float32")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed(patch, owner, name, calls, after)
        convert(job)
    assert files(tmp_path) == {"source", "b.partial"}
    for directory in (job.work, job.result):
        with pytest.raises(InputError, match=f"{directory.name} is a conversion that was not finished; run the same"):
            ddtree_jax.load(directory)
    with counted(monkeypatch) as made:
        convert(job, verify=True)
    assert len(made) == left
    assert files(tmp_path) == {"source", "b"}
    assert_same(ddtree_jax.load(tmp_path / "b").target, ddtree_jax.load(source).target)


def test_half_merged_parts_are_written_again(
    tmp_path: Path, source: Path, one_by_one: None, monkeypatch: pytest.MonkeyPatch
):
    def merge_half(path: Path) -> None:
        parts = sorted(path.with_name("weights.partial_save").iterdir())
        for child in parts[0].iterdir():
            child.rename(parts[0].with_name(child.name))
        raise Killed

    job = make_job(source, tmp_path / "b", "float32")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(orbax_store, "finish", merge_half)
        convert(job)
    convert(job, verify=True)
    assert_same(ddtree_jax.load(tmp_path / "b").target, ddtree_jax.load(source).target)


KILLS_ITSELF = """
import functools, os, signal, sys
from convert import conversion, orbax_store
conversion.batches = functools.partial(conversion.batches, limit=1)
real, calls = orbax_store.save, []
def save(*args):
    calls.append(real(*args))
    if len(calls) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls[-1]
orbax_store.save = save
conversion.convert(conversion.make_job(sys.argv[1], sys.argv[2], "float32"))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    command = [sys.executable, "-c", KILLS_ITSELF, str(source), str(tmp_path / "b")]
    root = Path(conversion.__file__).parents[1]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    with counted(monkeypatch) as made:
        convert(make_job(source, tmp_path / "b", "float32"), verify=True)
    assert len(made) == COUNT - 7  # the eighth was under way
    assert files(tmp_path) == {"source", "b"}
    assert_same(ddtree_jax.load(tmp_path / "b").target, ddtree_jax.load(source).target)


def test_a_line_that_was_not_finished_does_not_count(
    tmp_path: Path, source: Path, one_by_one: None, monkeypatch: pytest.MonkeyPatch
):
    job = make_job(source, tmp_path / "b", "float32")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed(patch, conversion.Progress, "add", 3, after=True)
        convert(job)
    progress = job.work / "progress.jsonl"
    progress.write_bytes(progress.read_bytes()[:-5])
    with counted(monkeypatch) as made:
        convert(job)
    assert len(made) == COUNT - 2


def test_another_conversion_does_not_go_on_with_it(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed(patch, conversion, "write_record")
        convert(make_job(source, tmp_path / "b", "float32"))
    other = write(tmp_path / "other", SMALL | {"rope_theta": 2e4}, random_tensors(SMALL))
    for job in (make_job(source, tmp_path / "b", "bfloat16"), make_job(other, tmp_path / "b", "float32")):
        with pytest.raises(InputError, match="b.partial is left of another conversion; remove it"):
            convert(job)


def test_other_numbers_under_the_same_headers_are_another_conversion(
    tmp_path: Path, source: Path, one_by_one: None, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed(patch, conversion, "write_batch", 6)
        convert(make_job(source, tmp_path / "b", "float32"))
    weights = source / "model.safetensors"
    before = weights.stat()
    write(source, SMALL, random_tensors(SMALL, seed=1))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert weights.stat().st_size == before.st_size
    with pytest.raises(InputError, match="b.partial is left of another conversion; remove it"):
        convert(make_job(source, tmp_path / "b", "float32"))


def test_another_config_is_another_conversion(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed(patch, conversion, "write_record")
        convert(make_job(source, tmp_path / "b", "float32"))
    (source / "config.json").write_text(json.dumps(SMALL | {"rms_norm_eps": 1e-5}))
    with pytest.raises(InputError, match="b.partial is left of another conversion; remove it"):
        convert(make_job(source, tmp_path / "b", "float32"))


@pytest.mark.parametrize("line", [b"{", b"\xff", b"[1]", b'{"save": "x"}', b'{"save": "x", "crc32": 3}'])
def test_a_damaged_record_of_progress_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
):
    job = make_job(source, tmp_path / "b", "float32")
    job.work.mkdir()
    (job.work / "progress.jsonl").write_bytes(json.dumps(job.identity()).encode() + b"\n" + line + b"\n")
    with pytest.raises(InputError, match="progress.jsonl is damaged; remove .*b.partial and convert again$"):
        convert(job)


def test_two_runs_at_once_are_refused(tmp_path: Path, source: Path):
    job = make_job(source, tmp_path / "b", "float32")
    job.work.mkdir()
    with open_progress(job.work / "progress.jsonl", job.identity()):
        with pytest.raises(InputError, match="b.partial is being written by another process"):
            convert(job)
    convert(job)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_destinations_that_cannot_be(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(destination: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError) as caught:
            convert(make_job(source, destination, "float32"))
        assert sorted(tmp_path.rglob("*")) == before
        return str(caught.value)

    assert "source exists already; remove it, or choose another name" in refused(source)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert "dangling exists already" in refused(tmp_path / "dangling")
    assert "no/where is not a directory that can be written" in refused(tmp_path / "no" / "where" / "b")
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial" / "mine").write_text("")
    assert "c.partial is in the way and not an unfinished conversion" in refused(tmp_path / "c")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "d.partial").symlink_to("elsewhere")
    assert "d.partial is in the way and not an unfinished conversion" in refused(tmp_path / "d")
    for name in ("x" * 250, "x" * 300):  # the first is too long only with .partial
        assert "cannot be written: File name too long" in refused(tmp_path / name)
    assert "cannot be written: embedded null byte" in refused(tmp_path / "a\0b")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: conversion.shutil._ntuple_diskusage(9, 9, 1000))
    assert "b needs 0.00 GB; 0.00 GB are free" in refused(tmp_path / "b")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.mkdir(), "merges.txt cannot be copied: it is not a file that can be read"),
        (os.mkfifo, "merges.txt cannot be copied: it is not a file that can be read"),
        (lambda path: path.symlink_to("../outside"), "merges.txt leaves the directory"),
    ],
    ids=["directory", "pipe", "link"],
)
def test_what_cannot_be_copied_is_noticed_before_anything_is_written(
    tmp_path: Path, source: Path, spoil: Callable[[Path], Any], message: str
):
    spoil(source / "merges.txt")
    (tmp_path / "outside").write_text("")
    with pytest.raises(InputError, match=message):
        make_job(source, tmp_path / "b", "float32")
    assert files(tmp_path) == {"source", "outside"}


def test_a_damaged_disk_is_noticed_by_verification(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    real = orbax_store.finish

    def damage(path: Path) -> None:
        real(path)
        data = max((file for file in path.rglob("d/*")), key=lambda file: file.stat().st_size)
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)

    monkeypatch.setattr(orbax_store, "finish", damage)
    with pytest.raises(InputError, match="1 parameters read back differently|is damaged"):
        convert(make_job(source, tmp_path / "b", "float32"), verify=True)
    assert files(tmp_path) == {"source", "b.partial"}


@pytest.fixture
def whole(tmp_path: Path, source: Path) -> Path:
    """A converted checkpoint, to be spoilt."""
    convert(make_job(source, tmp_path / "b", "float32"))
    return tmp_path / "b"


def largest(directory: Path) -> Path:
    return max(directory.rglob("d/*"), key=lambda file: file.stat().st_size)


def edit_record(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((directory / "conversion.json").read_text())
    change(record)
    (directory / "conversion.json").write_text(json.dumps(record))


def remove(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no record": (lambda d: remove(d / "conversion.json"), "has no conversion.json: it is not a finished directory"),
    "no weights": (lambda d: remove(d / "weights"), "has lost its weights"),
    "no config": (lambda d: remove(d / "config.json"), "has no config.json"),
    "empty record": (lambda d: (d / "conversion.json").write_text("{}"), "format None is not 1; convert again"),
    "cut record": (lambda d: (d / "conversion.json").write_text("{"), "cannot be read as JSON"),
    "other record": (lambda d: edit_record(d, lambda r: r.update(parameters=[1])), "conversion.json is damaged"),
    "odd FP8": (lambda d: edit_record(d, lambda r: r.update(fp8={"block": [0, 1]})), "conversion.json is damaged"),
    "unknown FP8": (
        lambda d: edit_record(d, lambda r: r.update(fp8={"block": [1, 1], "parameters": ["x"]})),
        "conversion.json is damaged",
    ),
    "newer record": (lambda d: edit_record(d, lambda r: r.update(format=2)), "format 2 is not 1"),
    "other shape": (
        lambda d: edit_record(d, lambda r: r["parameters"]["norm.weight"].update(shape=[4])),
        "does not fit Target: shape: norm.weight is \\[4\\], should be \\[40\\]",
    ),
    "parameters": (
        lambda d: edit_record(d, lambda r: r["parameters"].update(x=r["parameters"].pop("norm.weight"))),
        "does not fit Target: missing: norm.weight; unknown: x",
    ),
    "no index": (lambda d: remove(d / "weights" / "state" / "manifest.ocdbt"), "weights is damaged: "),
    "no metadata": (lambda d: remove(d / "weights" / "state" / "_METADATA"), "weights is damaged: "),
    "no data": (lambda d: remove(largest(d)), "weights is damaged: "),
    "cut data": (lambda d: largest(d).write_bytes(largest(d).read_bytes()[:100]), "weights is damaged: "),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_directories_are_refused_in_one_line(whole: Path, name: str):
    spoil, message = SPOILT[name]
    spoil(whole)
    with pytest.raises(InputError, match=message) as caught:
        ddtree_jax.load(whole, dtype="float32")
    assert "\n" not in str(caught.value)


def test_a_foreign_orbax_checkpoint_is_refused(tmp_path: Path):
    ocp.save(tmp_path / "foreign", {"a": np.ones(3, np.float32)})
    with pytest.raises(InputError, match="foreign has no conversion.json: it is not a finished directory"):
        ddtree_jax.load(tmp_path / "foreign")


def test_both_kinds_of_directories_are_told_apart(whole: Path, source: Path):
    assert isinstance(open_directory(whole), Converted)
    assert isinstance(open_directory(str(source)), Checkpoint)
    assert (converted.RECORD, converted.WEIGHTS) == ("conversion.json", "weights")


def test_a_hugging_face_directory_may_hold_and_lie_beside_anything(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("weights", "state"):
        (source / name).mkdir()
    for place in (tmp_path, source):
        (place / "progress.jsonl").write_text("of something else")
    assert isinstance(open_directory(source), Checkpoint)
    index = json.dumps({"weight_map": dict.fromkeys(random_tensors(SMALL), "a.safetensors")})
    (source / "model.safetensors.index.json").write_text(index)
    (source / "model.safetensors").rename(source / "a.safetensors")
    assert isinstance(open_directory(source), Checkpoint)
    monkeypatch.chdir(source)
    assert isinstance(open_directory("."), Checkpoint)


def test_a_converted_directory_may_lie_beside_anything(whole: Path):
    (whole.parent / "progress.jsonl").write_text("of something else")
    assert isinstance(open_directory(whole), Converted)


def test_an_unfinished_result_is_known_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "result").mkdir()
    (tmp_path / "progress.jsonl").write_text("")
    monkeypatch.chdir(tmp_path / "result")
    with pytest.raises(InputError, match="is a conversion that was not finished"):
        open_directory(".")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_that_is_a_link_to_outside_is_refused(tmp_path: Path, source: Path, name: str):
    (tmp_path / "outside").write_text("{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to("../outside")
    with pytest.raises(InputError, match=f"{name} leaves the directory"):
        ddtree_jax.load(source)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_converts(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main([str(source), str(tmp_path / "b"), "--verify"]) == 0
    out, err = capsys.readouterr()
    assert f"b: {COUNT} parameters, 0.0 million numbers, 0.000 GB in " in out and "read back and compared" in out
    assert err == ""
    assert command.main([str(source), str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err == (
        f"convert: error: {tmp_path / 'b'} exists already; remove it, or choose another name\n"
    )
    assert command.main([str(source), str(tmp_path / "c"), "--json", "--dtype", "float32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == 4 * sum(x.size for x in random_tensors(SMALL).values())
    assert result["dtype"] == "float32" and result["verified"] is False and result["seconds"] > 0


def test_python_m_convert_and_ddtree_jax_convert_are_this_command(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
):
    assert python_m_convert([str(source), str(tmp_path / "b"), "--dry-run"]) == 0
    table = capsys.readouterr().out
    assert cli.main(["convert", str(source), str(tmp_path / "b"), "--dry-run"]) == 0
    assert capsys.readouterr().out == table
    assert python_m_convert([str(tmp_path / "no"), str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("convert: error: ")
    assert cli.main(["convert", str(tmp_path / "no"), str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("ddtree-jax: error: ")


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "write_batch", interrupt)
    assert command.main([str(source), str(tmp_path / "b")]) == 130
    assert capsys.readouterr().err == "convert: stopped; the same command goes on from here\n"
    assert files(tmp_path) == {"source", "b.partial"}


def test_a_dry_run_writes_nothing_and_shows_a_table(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main([str(source), str(tmp_path / "b"), "--dry-run"]) == 0
    assert files(tmp_path) == {"source"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["parameter", "count", "shape", "dtype", "MB"]
    assert ["layers.*.mlp.up_proj.weight", "1", "56x40", "bfloat16", "0.00"] in [line.split() for line in lines]
    assert lines[-1].startswith(f"{COUNT} parameters, 0.0 million numbers")
    assert command.main([str(source), str(tmp_path / "b"), "--dry-run", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["parameters"]["norm.weight"] == {"shape": [40], "dtype": "bfloat16"} and listed["problems"] == {}


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_every_problem_has_its_line(tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    tensors = random_tensors(DENSE) | {f"model.extra.{i}": np.ones(1, np.float32) for i in range(8)}
    del tensors["model.norm.weight"]
    tensors["lm_head.weight_scale_inv"] = np.ones((1, 1), np.float32)
    source = write(tmp_path / "a", DENSE, tensors)
    assert command.main([str(source), str(tmp_path / "b"), *options]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "convert: error: missing: norm.weight",
        *(f"convert: error: unknown: extra.{i}" for i in range(8)),
        "convert: error: scale: lm_head.weight_scale_inv belongs to a tensor of float32, not float8_e4m3fn",
    ]
    assert ("parameters" in out) == bool(options)
    assert files(tmp_path) == {"a"}


def test_a_source_that_is_none(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main([str(tmp_path / "nothing"), str(tmp_path / "x")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert command.main([str(whole), str(tmp_path / "x")]) == 2
    assert "b is converted already; give the Hugging Face directory" in capsys.readouterr().err
