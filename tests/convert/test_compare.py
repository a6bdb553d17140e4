"""`python -m convert compare` on recorded checkpoints, intact and with one weight changed.

The recording is PyTorch's (shared golden files). What its modules give out was not recorded, and the committed cut
lacks some hidden states: these come from the intact checkpoint here.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from recorded import arrays_beside
from safetensors.numpy import load_file, save_file

import ddtree_jax
from convert import observe
from convert.__main__ import main
from convert.compare import compare
from convert.recording import Recording, read_recording
from ddtree_jax.errors import InputError
from ddtree_jax.models.network import Network

LAYERS, GREEDY = 4, 6
META = {"class": "Qwen3ForCausalLM", "dtype": "float32", "transformers": "5.24.0"}


class Case(NamedTuple):
    """A checkpoint and the file of a recording of it."""

    directory: Path
    out: Path


@pytest.fixture(scope="module")
def case(golden, tmp_path_factory) -> Case:
    directory = golden("qwen3")
    out = tmp_path_factory.mktemp("compare") / "out.npz"
    np.savez(out, **recorded_arrays(directory))
    return Case(directory, out)


def recorded_arrays(directory: Path) -> dict[str, np.ndarray]:
    """PyTorch's numbers under the names that `reference` gives them, with modules' outputs."""
    found = arrays_beside(directory)
    network = ddtree_jax.load(directory, dtype="float32").target
    hidden = {f"hidden_{i:02d}": x for i, x in enumerate(hidden_states(network, found))}
    modules = observe.alone(network, {i: hidden[f"hidden_{i:02d}"] for i in range(LAYERS)})
    return (
        modules
        | hidden
        | {
            "input_ids": found["input_ids_long"][0],
            "logits": found["logits_long"],
            "greedy": found["greedy32_long"][:GREEDY],
            "greedy_margin": found.get("greedy32_long_margin", np.ones(32))[:GREEDY],
            "meta": np.array(json.dumps(META)),
        }
    )


def hidden_states(network: Network, found: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The recorded ones, ours where there is none."""
    ours = observe.whole(network, found["input_ids_long"][0])
    return [found.get(name, ours[name]) for name in (f"hidden_{i:02d}" for i in range(LAYERS + 1))]


def changed(case: Case, directory: Path, name: str, factor: float = 1.02) -> Path:
    """A copy of the checkpoint with one tensor scaled."""
    shutil.copytree(case.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, directory / "model.safetensors")
    return directory


def compare_json(capsys, directory: Path, out: Path, *options: str) -> tuple[int, dict]:
    code = main(["compare", str(directory), str(out), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_agreement(case, capsys):
    code, report = compare_json(capsys, *case)
    assert code == 0 and report["ok"] and report["problems"] == [] and report["first_layer"] is None
    assert report["origin"] == META and report["dtype"] == "float32" and report["tokens"] == 150
    assert [layer["index"] for layer in report["layers"]] == [0, 1, 2, 3]
    for layer in report["layers"]:
        assert layer["ok"] and layer["part"] is None and layer["kind"] == "full"
        for part in ("whole", "alone"):
            assert 0 <= layer[part]["mean"] <= layer[part]["max"] <= 1e-4
        assert layer["mixer"]["max"] == layer["mlp"]["max"] == 0.0
    logits = report["logits"]
    assert report["layers"][3]["whole"]["max"] > 0 and report["embeddings"]["max"] == 0
    assert 0 < logits["mean"] < logits["p99"] < logits["max"] <= 1e-4
    assert logits["top1"] == logits["top5"] == 1.0 and abs(logits["kl_max"]) < 1e-8
    assert report["greedy"] == {"count": GREEDY, "same": GREEDY, "margin": None}
    assert report["tolerance"]["layer_max"] == 1e-4 and report["tolerance"]["layer_mean"] is None


def test_table(case, capsys):
    assert main(["compare", *map(str, case)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Qwen3ForCausalLM in float32 (transformers 5.24.0) and this library in float32, 150 tokens"
    assert [line[:8].strip() for line in lines[4:9]] == ["embeddin", "0   full", "1   full", "2   full", "3   full"]
    assert lines[-1] == "AGREES within tolerance"
    assert any(line.startswith("greedy   6 of 6") for line in lines)


@pytest.mark.parametrize(
    ("name", "layer", "part"),
    [
        ("model.layers.2.mlp.down_proj.weight", 2, "feed-forward"),
        ("model.layers.1.self_attn.q_norm.weight", 1, "mixer"),
        ("model.layers.3.post_attention_layernorm.weight", 3, "feed-forward"),
        ("model.norm.weight", 3, "norms or residual"),
    ],
)
def test_changed_weight_is_found_in_its_layer(case, tmp_path, capsys, name, layer, part):
    code, report = compare_json(capsys, changed(case, tmp_path / "changed", name), case.out)
    assert code == 1 and not report["ok"] and report["first_layer"] == layer
    assert report["problems"][0].startswith(
        f"layer {layer} (full) is the first to leave tolerance, by itself: its {part}"
    )
    for other in report["layers"]:
        # what comes later is off too, but not when it is given PyTorch's input
        assert other["ok"] == (other["index"] < layer)
        assert other["part"] == (part if other["index"] == layer else None)
    assert report["logits"]["max"] > 1e-4


def test_changed_head_is_not_blamed_on_a_layer(case, tmp_path, capsys):
    directory = changed(case, tmp_path / "changed", "lm_head.weight")
    assert main(["compare", str(directory), str(case.out)]) == 1
    said = capsys.readouterr().out
    assert "DIFFERS: logits max" in said and "first to leave" not in said and "AGREES" not in said


def test_changed_embeddings(case, tmp_path, capsys):
    code, report = compare_json(capsys, changed(case, tmp_path / "c", "model.embed_tokens.weight", 1.5), case.out)
    assert code == 1 and report["problems"][0] == "the embeddings leave tolerance"
    assert all(layer["part"] is None for layer in report["layers"])


def test_other_greedy_token(case, tmp_path, capsys):
    arrays = dict(np.load(case.out))
    arrays["greedy"][4] ^= 1
    np.savez(tmp_path / "out.npz", **arrays)
    code, report = compare_json(capsys, case.directory, tmp_path / "out.npz")
    assert code == 1 and report["greedy"]["same"] == 4 and report["greedy"]["margin"] > 1e-3
    assert [problem[:22] for problem in report["problems"]] == ["greedy token 4 differs"]


def test_chosen_layers_only(case):
    """What `reference --layers 2` writes: embeddings, input and output of layer 2, the final state."""
    whole = read_recording(case.out)
    kept = {f"hidden_{i:02d}" for i in (0, 2, 3, 4)} | {"mixer_02", "mlp_02"}
    layered = {name: x for name, x in whole.layered.items() if name in kept}
    some = Recording(whole.ids, whole.logits, layered, whole.greedy[:0], whole.margin[:0], whole.meta)
    report = compare(case.directory, some)
    assert report.ok and report.greedy.count == 0
    assert [layer.alone is not None for layer in report.layers] == [False, False, True, True]
    assert [layer.whole is not None for layer in report.layers] == [False, True, True, True]
    assert [layer.mlp is not None for layer in report.layers] == [False, False, True, False]


def test_plot(case, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'ddtree-jax[plot]'")
    assert main(["compare", *map(str, case), "--plot", str(tmp_path / "errors.png")]) == 0
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def fails(capsys, *words: object) -> str:
    """The one line about a mistake."""
    assert main(["compare", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_mistakes(case, tmp_path, capsys):
    directory = case.directory
    assert "give either OUT.npz or --hf" in fails(capsys, directory)
    assert "give either OUT.npz or --hf" in fails(capsys, directory, case.out, "--hf", directory)
    assert "belong to --hf" in fails(capsys, directory, case.out, "--random", 3)
    assert "absent.npz does not exist" in fails(capsys, directory, tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("no archive")
    assert "text.npz cannot be read as an .npz file" in fails(capsys, directory, tmp_path / "text.npz")
    np.savez(tmp_path / "few.npz", input_ids=np.arange(3))
    assert "lacks logits" in fails(capsys, directory, tmp_path / "few.npz")
    np.savez(tmp_path / "object.npz", input_ids=np.array([{}], object), logits=np.zeros((1, 2)))
    assert "cannot be read as an .npz file" in fails(capsys, directory, tmp_path / "object.npz")
    assert "--python" in fails(capsys, directory, "--hf", directory, "--python", tmp_path / "no python")


def test_recording_of_another_checkpoint(case, golden, capsys, tmp_path):
    arrays = dict(np.load(case.out))
    arrays.pop("hidden_04")
    np.savez(tmp_path / "short.npz", **arrays | {"logits": np.pad(arrays["logits"], ((0, 0), (0, 88)))})
    said = fails(capsys, case.directory, tmp_path / "short.npz")
    assert "vocabulary 600, the checkpoint has 512" in said and "3 layers, the checkpoint has 4" in said


def test_inputs_of_a_recording_without_layers():
    empty = Recording(np.arange(2), np.zeros((2, 3)), {}, np.zeros(0), np.zeros(0), {})
    assert empty.inputs(4) == {} and empty.num_layers == 0 and empty.dtype == "float32"


def test_reading_checks_the_shape_of_logits(tmp_path):
    np.savez(tmp_path / "out.npz", input_ids=np.arange(3), logits=np.zeros(3))
    with pytest.raises(InputError, match=r"should be \[tokens, vocabulary\], found shape \(3,\)"):
        read_recording(tmp_path / "out.npz")


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_recording(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


GOOD = {"input_ids": np.arange(3), "logits": np.zeros((3, 5), np.float32)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"meta": np.array("{")}, "meta is no JSON"),
        ({"meta": np.array("[1]")}, "meta should be a JSON object"),
        ({"meta": np.array('{"dtype": "int3"}')}, "dtype of float32 or bfloat16"),
        ({"meta": np.array('{"dtype": []}')}, "dtype of float32 or bfloat16"),
        ({"logits": np.zeros((0, 5), np.float32), "input_ids": np.zeros(0, int)}, "of no tokens"),
        ({"logits": np.full((3, 5), "a")}, "logits should be floating point numbers"),
        ({"hidden_00": np.full((3, 5), "a")}, "hidden_00 should be floating point numbers"),
        ({"input_ids": np.array(["a", "b", "c"])}, "input_ids should be a list of whole numbers"),
        ({"input_ids": np.zeros(3)}, "input_ids should be a list of whole numbers, found float64"),
        ({"input_ids": np.array([0, 1, 5])}, "input_ids should be token ids from 0 to 4, found 0 to 5"),
        ({"greedy": np.array([-1])}, "greedy should be token ids from 0 to 4, found -1 to -1"),
        ({"greedy": np.zeros((2, 2), int)}, r"greedy should be a list .* shape \(2, 2\)"),
        ({"greedy": np.zeros(2, int), "greedy_margin": np.zeros(3)}, "greedy_margin is"),
    ],
)
def test_recordings_of_something_else(tmp_path, change, problem):
    path = tmp_path / "out.npz"
    np.savez(path, **GOOD)
    assert len(read_recording(path).ids) == 3
    np.savez(path, **GOOD | change)
    assert re.search(problem, refused(path))


def test_damaged_archives(tmp_path):
    path = tmp_path / "out.npz"
    path.write_bytes(b"")
    assert "cannot be read as an .npz file" in refused(path)
    np.savez_compressed(path, **GOOD | {"logits": np.random.default_rng(0).normal(size=(3, 500))})
    good = path.read_bytes()
    for place in range(0, len(good), 29):
        path.write_bytes(good[:place])
        assert "cannot be read as an .npz file" in refused(path)
        path.write_bytes(good[:place] + bytes(b ^ 0xFF for b in good[place : place + 8]) + good[place + 8 :])
        try:
            read_recording(path)
        except InputError as error:
            assert "\n" not in str(error)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("input_ids.npy", b"no array")
        archive.writestr("logits", b"no array")
    assert "'input_ids', 'logits' is no .npy file" in refused(path)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compare"], "python -m convert compare: error: the following arguments are required: DIR"),
        (["compare", "a", "b", "--random", "many"], "argument --random: invalid int value: 'many'"),
        (["compare-run", "a", "b", "c", "--dtype", "int3"], "argument --dtype: invalid choice"),
        (["reference", "a", "b", "--ids", "a", "--prompt", "b"], "not allowed with argument"),
        (["a", "b", "--dtype", "int3"], "python -m convert: error: argument --dtype: invalid choice"),
    ],
)
def test_mistakes_in_options_are_one_line(capsys, words, problem):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr()
    assert stopped.value.code == 2 and problem in said.err and said.err.count("\n") == 1 and said.out == ""
