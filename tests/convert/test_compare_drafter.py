"""`compare DRAFTER OUT.npz --target DIR` on recorded drafts, intact and with one weight changed."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from recorded import arrays_beside
from safetensors.numpy import load_file, save_file

from convert.__main__ import main
from convert.compare_drafter import _order

PAIRS = [
    ("dflash_qwen3", "qwen3"),
    ("dflash2_qwen3", "qwen3"),
    pytest.param("dflash_qwen3_5_swa", "qwen3_5", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("drafter", "target"), PAIRS)
def test_agreement(golden, capsys, drafter, target):
    directory = golden(drafter)
    out = directory.with_name(drafter + ".npz")
    assert main(["compare", str(directory), str(out), "--target", str(golden(target)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["first"] is None and report["logits"]["top1"] == 1.0
    recorded = {
        name for name in arrays_beside(directory) if name.startswith(("ctx_", "layer_out_")) or name == "draft_hidden"
    }
    assert set(report["arrays"]) == recorded and len(recorded) > 6
    assert all(0 < d["max"] <= 1e-4 for d in report["arrays"].values())


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("hidden_norm.weight", "ctx_feature"),
        ("layers.1.self_attn.k_norm.weight", "ctx_k_L1"),
        ("layers.0.mlp.up_proj.weight", "layer_out_00"),
        ("norm.weight", "draft_hidden"),
    ],
)
def test_changed_weight(golden, tmp_path, capsys, name, first):
    shutil.copytree(golden("dflash_qwen3"), tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    tensors[name] = tensors[name] * np.float32(1.02)
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    out = golden("dflash_qwen3").with_name("dflash_qwen3.npz")
    assert main(["compare", str(tmp_path / "drafter"), str(out), "--target", str(golden("qwen3"))]) == 1
    assert f"DIFFERS: {first} is the first to leave tolerance\n" in capsys.readouterr().out


def test_mistakes(golden, tmp_path, capsys):
    drafter, target = golden("dflash_qwen3"), golden("qwen3")
    words = ["compare", str(drafter), str(drafter.with_name("dflash_qwen3.npz")), "--target", str(target)]
    assert main([*words, "--plot", "x.png"]) == 2
    assert "for targets" in capsys.readouterr().err
    words[2] = str(target.with_name("qwen3.npz"))
    assert main(words) == 2
    assert "no recorded draft: it lacks draft_hidden, noise_embedding, target_taps" in capsys.readouterr().err
    arrays = arrays_beside(drafter)
    np.savez(tmp_path / "a.npz", **arrays | {"target_taps": arrays["target_taps"][:, :64]})
    words[2] = str(tmp_path / "a.npz")
    assert main(words) == 2
    assert "target_taps is (40, 64), should be (tokens, 192)" in capsys.readouterr().err
    np.savez(tmp_path / "b.npz", **arrays | {"ctx_feature": arrays["ctx_feature"][:39]})
    words[2] = str(tmp_path / "b.npz")
    assert main(words) == 2
    assert "ctx_feature is (39, 64), ours (40, 64)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("noise_embedding", lambda x: x[:, :60], r"noise_embedding is \(8, 60\), should be \(8, 64\)"),
        ("noise_embedding", lambda x: x[:5], r"noise_embedding is \(5, 64\), should be \(8, 64\)"),
        ("noise_embedding", lambda x: x[0], r"noise_embedding is \(64,\)"),
        ("noise_embedding", lambda x: x.astype(str), "numbers: noise_embedding is <U"),
        ("target_taps", lambda x: x[:0], r"target_taps is \(0, 192\), should be \(tokens, 192\)"),
        ("draft_hidden", lambda x: x.astype(str), "numbers: draft_hidden is <U"),
        ("draft_logits_slots1", lambda x: x[:3], r"draft_logits_slots1 is \(3, 512\), ours \(7, 512\)"),
    ],
)
def test_misshapen_arrays(golden, tmp_path, capsys, name, change, problem):
    drafter, arrays = golden("dflash_qwen3"), arrays_beside(golden("dflash_qwen3"))
    np.savez(tmp_path / "a.npz", **arrays | {name: change(arrays[name])})
    assert main(["compare", str(drafter), str(tmp_path / "a.npz"), "--target", str(golden("qwen3"))]) == 2
    said = capsys.readouterr().err
    assert re.search(problem, said) and said.count("\n") == 1


def test_order():
    names = ["draft_hidden", "layer_out_10", "ctx_v_L10", "ctx_k_L2", "layer_out_02", "ctx_feature", "ctx_v_L2"]
    assert sorted(names, key=_order) == [
        "ctx_feature", "ctx_k_L2", "ctx_v_L2", "ctx_v_L10", "layer_out_02", "layer_out_10", "draft_hidden",
    ]  # fmt: skip
