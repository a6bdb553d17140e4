"""The PyTorch side: its options everywhere; what it records where torch is installed."""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert import reference
from convert.__main__ import main
from convert.recording import read_recording

ALLOWED = {"torch", "transformers", "numpy", "safetensors", "__future__"} | sys.stdlib_module_names


def test_file_is_self_contained():
    """It has to run where nothing of this project is."""
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= ALLOWED
    assert {"torch", "transformers", "numpy"} <= imported


def test_layers():
    assert reference.parse_layers(None, 3) == [0, 1, 2]
    assert reference.parse_layers("4,0-2,1", 6) == [0, 1, 2, 4]
    with pytest.raises(reference.BadInput, match=r"layers 0 to 3, not \[4, 5\]"):
        reference.parse_layers("2-5", 4)
    with pytest.raises(reference.BadInput, match="'x' is no layer number"):
        reference.parse_layers("1,x", 4)
    with pytest.raises(reference.BadInput, match="the range 3-1 is empty"):
        reference.parse_layers("0,3-1", 4)
    with pytest.raises(reference.BadInput, match=r"not \[4, 5, 6, 7, 8\]"):
        reference.parse_layers("0-999999999999", 4)


def options(**given) -> argparse.Namespace:
    return argparse.Namespace(**{"ids": None, "prompt": None, "random": None, "source": "", **given})


def test_ids(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[3, 0, 9]")
    assert reference.read_ids(options(ids=str(path)), vocab=10) == [3, 0, 9]
    ids = reference.read_ids(options(random=5), vocab=10)
    assert len(ids) == 5 and ids == reference.read_ids(options(random=5), vocab=10)
    assert len(reference.read_ids(options(), vocab=10)) == 64
    with pytest.raises(reference.BadInput, match=r"outside the vocabulary of 9: \[9\]"):
        reference.read_ids(options(ids=str(path)), vocab=9)
    for text, problem in (
        ("{}", "should hold a list"),
        ("[1.5]", "should hold a list"),
        ("[]", "at least one"),
        ("[", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ):
        path.write_text(text)
        with pytest.raises(reference.BadInput, match=problem):
            reference.read_ids(options(ids=str(path)), vocab=9)


def test_missing_directory(tmp_path, capsys):
    assert main(["reference", str(tmp_path / "absent"), str(tmp_path / "out.npz")]) == 2
    assert "absent is not a directory" in capsys.readouterr().err


def fails(capsys, *words: object) -> str:
    """The one line about a mistake."""
    assert main(["reference", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said
    return said.err


def test_options_are_checked_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reference, "load", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(reference, "check_device", lambda _: None)
    out = tmp_path / "out.npz"
    assert "--random should be 1 to" in fails(capsys, tmp_path, out, "--random", "0")
    assert "--random should be 1 to" in fails(capsys, tmp_path, out, "--random", 10**12)
    assert "--greedy should be 0 to" in fails(capsys, tmp_path, out, "--greedy", "-1")
    assert "absent.json cannot be read" in fails(capsys, tmp_path, out, "--ids", tmp_path / "absent.json")
    assert "the range 3-1 is empty" in fails(capsys, tmp_path, out, "--layers", "3-1")
    assert "is a directory" in fails(capsys, tmp_path, tmp_path)
    assert "cannot be written: File name too long" in fails(capsys, tmp_path, tmp_path / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


def test_unwritable_file(tmp_path):
    with pytest.raises(reference.BadInput, match="cannot be written"):
        reference.write(tmp_path / "absent" / "out.npz", {})


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tiny Llama by `transformers`; skips where it is absent."""
    pytest.importorskip("torch", reason="PyTorch's side is not installed: pip install 'ddtree-jax[parity]'")
    transformers = pytest.importorskip("transformers", reason="not installed: pip install 'ddtree-jax[parity]'")
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**sizes, eos_token_id=1, max_position_embeddings=64, initializer_range=0.4)
    path = tmp_path_factory.mktemp("reference") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_shapes(directory, tmp_path, capsys):
    out = tmp_path / "out.npz"
    assert main(["reference", str(directory), str(out), "--random", "9", "--greedy", "3", "--layers", "1"]) == 0
    assert "LlamaForCausalLM, float32, 9 tokens" in capsys.readouterr().out
    recording = read_recording(out)
    assert recording.ids.shape == (9,) and recording.logits.shape == (9, 40)
    assert sorted(recording.layered) == ["hidden_00", "hidden_01", "hidden_02", "mixer_01", "mlp_01"]
    assert all(x.shape == (9, 16) and x.dtype == np.float32 for x in recording.layered.values())
    assert recording.greedy.shape == recording.margin.shape == (3,) and (recording.margin > 0).all()
    assert recording.greedy[0] == recording.logits[-1].argmax()
    assert recording.meta["num_layers"] == 2 and recording.dtype == "float32"


@pytest.mark.slow
def test_alone_in_another_place(directory, tmp_path):
    """A copy of the file runs without the project, and `compare` accepts what it writes; also both stages in one."""
    copy = tmp_path / "copy.py"
    copy.write_text(Path(reference.__file__).read_text())
    (tmp_path / "ids.json").write_text("[5, 6, 7, 8, 9, 10, 11, 12]")
    command = [sys.executable, "-I", str(copy), str(directory), "out.npz", "--ids", "ids.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main(["compare", str(directory), str(tmp_path / "out.npz")]) == 0
    assert main(["compare", str(directory), "--hf", str(directory), "--random", "8", "--greedy", "2"]) == 0


@pytest.mark.slow
def test_refuses_weights_it_would_have_to_make_up(directory, tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert main(["reference", str(tmp_path), str(tmp_path / "out.npz")]) == 2
    assert "no fitting tensor for 1 parameters: model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()
    code = main(["compare", str(directory), "--hf", str(tmp_path)])
    assert code == 2 and "PyTorch's side failed (exit code 2): reference: error:" in capsys.readouterr().err


def test_unknown_architecture(directory, tmp_path, capsys):
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "no such model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["reference", str(tmp_path), str(tmp_path / "out.npz")]) == 2
    assert "transformers cannot load" in capsys.readouterr().err


def copy_of(directory: Path, place: Path, **settings) -> Path:
    """The checkpoint with other settings in config.json."""
    shutil.copytree(directory, place)
    config = json.loads((place / "config.json").read_text()) | settings
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_no_pickle_is_loaded(directory, tmp_path, capsys):
    """Not even a good one."""
    import torch
    from safetensors.torch import load_file

    place = copy_of(directory, tmp_path / "pickled")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    assert "transformers cannot load" in fails(capsys, place, tmp_path / "out.npz")


def test_damaged_checkpoints(directory, tmp_path, capsys):
    out = tmp_path / "out.npz"
    good = (directory / "model.safetensors").read_bytes()
    place = copy_of(directory, tmp_path / "copy")
    for damaged in (good[:-100], good[:4], b"", b"junk" * 100):
        (place / "model.safetensors").write_bytes(damaged)
        assert "transformers cannot load" in fails(capsys, place, out)
    for number, wrong in enumerate(({"hidden_size": 8}, {"hidden_size": "wide"}, {"num_attention_heads": 0})):
        said = fails(capsys, copy_of(directory, tmp_path / str(number), **wrong), out)
        assert "transformers cannot load" in said or "no fitting tensor" in said
    assert not out.exists()


def test_devices(directory, tmp_path, capsys):
    import torch

    assert "--device foo: " in fails(capsys, directory, tmp_path / "out.npz", "--device", "foo")
    assert "--device meta: " in fails(capsys, directory, tmp_path / "out.npz", "--device", "meta")
    if not torch.cuda.is_available():
        assert "--device cuda: " in fails(capsys, directory, tmp_path / "out.npz", "--device", "cuda")
