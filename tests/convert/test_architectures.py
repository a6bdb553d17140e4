"""Every architecture against the installed `transformers`: a tiny random model is built, saved, converted, and compared
module by module. Needs the extra `parity`; tests/models compares the same architectures with recorded numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import reference
from convert.checkpoint import Checkpoint
from convert.compare import Report, compare
from convert.conversion import convert, make_job
from convert.recording import read_recording
from convert.weights import skipped

torch = pytest.importorskip("torch", reason="PyTorch's side is not installed: pip install 'ddtree-jax[parity]'")
transformers = pytest.importorskip("transformers", reason="not installed: pip install 'ddtree-jax[parity]'")

VOCAB, TOKENS = 96, 70  # chunks of the delta rule end at 64
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
SHARED = dict(shared_expert_intermediate_size=20)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16
)
PLAIN = dict(rope_type="default", rope_theta=1e4)
PARTIAL = dict(PLAIN, partial_rotary_factor=0.25)
MROPE = dict(PLAIN, partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
LLAMA3_PARTIAL = dict(LLAMA3, partial_rotary_factor=0.5)
YARN_BETAS = dict(YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3)

# name -> (transformers config class without "Config", rope, further settings)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("Qwen3", PLAIN, {}),
    "qwen3 yarn": ("Qwen3", YARN_BETAS, {}),
    "qwen3_moe": ("Qwen3Moe", PLAIN, dict(EXPERTS, norm_topk_prob=True)),
    "qwen3_moe not normalised, one dense layer": ("Qwen3Moe", PLAIN, dict(EXPERTS, mlp_only_layers=[0])),
    "qwen3_next": ("Qwen3Next", PARTIAL, dict(HYBRID, **EXPERTS, **SHARED)),
    "qwen3_next yarn": ("Qwen3Next", dict(YARN, partial_rotary_factor=0.25), dict(HYBRID, **EXPERTS, **SHARED)),
    "qwen3_5_text": ("Qwen3_5Text", MROPE, HYBRID),
    "qwen3_5_text tied": ("Qwen3_5Text", MROPE, dict(HYBRID, tie_word_embeddings=True)),
    "qwen3_5_text yarn": ("Qwen3_5Text", dict(YARN, partial_rotary_factor=0.5), HYBRID),
    "qwen3_5_text llama3": ("Qwen3_5Text", LLAMA3_PARTIAL, HYBRID),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", MROPE, dict(HYBRID, **EXPERTS, **SHARED)),
    "llama": ("Llama", PLAIN, {}),
    "llama llama3": ("Llama", LLAMA3, {}),
    "llama yarn": ("Llama", YARN, {}),
}


def config_of(name: str) -> Any:
    family, rope, settings = CASES[name]
    config_class = getattr(transformers, f"{family}Config")
    return config_class(**{**SIZES, **settings}, rope_parameters=dict(rope))


def build(model_class: type, config: Any) -> Any:
    """A model whose weights all matter: matrices of gain about 1, norms away from what they are initialised to, delta
    heads that remember for 1 to 100 tokens.
    """
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("A_log"):
                p.copy_(torch.linspace(-4.0, 0.5, p.numel()))
            elif p.ndim == 1:
                p.add_(0.2 * noise)
            else:
                p.copy_(noise if "embed" in name else 1.2 * noise / p.shape[-1] ** 0.5)
    return model


def record(directory: Path, out: Path, *options: str) -> None:
    arguments = ["--random", str(TOKENS), "--greedy", "6", *options]
    assert reference.main([str(directory), str(out), *arguments]) == 0


def converted(directory: Path) -> Path:
    """The directory's conversion, beside it."""
    destination = directory.with_name("converted")
    convert(make_job(directory, destination, "float32"))
    return destination


def saved(name: str, directory: Path) -> Path:
    """The case's model, saved by `transformers`."""
    model_class = getattr(transformers, f"{CASES[name][0].removesuffix('Text')}ForCausalLM")
    build(model_class, config_of(name)).save_pretrained(directory)
    return directory


def check(report: Report, atol: float) -> None:
    """Logits, every hidden state, every module's output, and the continuation."""
    assert report.ok, report.problems
    assert report.logits.max <= atol and report.logits.top1 == 1.0
    assert report.embeddings.max == 0.0
    for layer in report.layers:
        for part in (layer.whole, layer.alone, layer.mixer, layer.mlp):
            assert part.max <= atol
    assert report.greedy.same == report.greedy.count == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_architecture(name, tmp_path):
    directory = saved(name, tmp_path / "model")
    record(directory, tmp_path / "out.npz")
    recording = read_recording(tmp_path / "out.npz")
    assert recording.logits.std() > 0.5  # numbers that a mistake would move
    report = compare(converted(directory), recording)
    check(report, 5e-4 if "linear_attention" in str(CASES[name]) else 1e-4)
    assert len(report.layers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_vision_language_checkpoint(name, tmp_path):
    """Weights under model.language_model, settings under text_config, and a vision tower that is left out."""
    classes, family = getattr(transformers.models, name), CASES[f"{name}_text"][0].removesuffix("Text")
    settings = dict(text_config=config_of(f"{name}_text").to_dict(), vision_config=dict(VISION))
    config = getattr(classes, f"{family}Config")(**settings, tie_word_embeddings=False)
    build(getattr(classes, f"{family}ForConditionalGeneration"), config).save_pretrained(tmp_path / "model")
    checkpoint = Checkpoint(tmp_path / "model")
    assert "text_config" in json.loads((tmp_path / "model" / "config.json").read_text())
    assert any(name.startswith("model.language_model.layers.1.") for name in checkpoint.names())
    assert skipped(checkpoint)["model.visual."] > 10
    record(tmp_path / "model", tmp_path / "out.npz")
    check(compare(converted(tmp_path / "model"), read_recording(tmp_path / "out.npz")), 5e-4)


def restacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A layer's experts in two tensors where they are one by one, and one by one where they are in two."""
    experts = {name: x for name, x in tensors.items() if ".experts." in name}
    result = {name: x for name, x in tensors.items() if name not in experts}
    for before in {name.partition(".experts.")[0] + ".experts" for name in experts}:
        if f"{before}.down_proj" in experts:
            gate, up = np.split(experts[f"{before}.gate_up_proj"], 2, axis=1)
            stacks = {"gate": gate, "up": up, "down": experts[f"{before}.down_proj"]}
            for kind, stack in stacks.items():
                result |= {f"{before}.{e}.{kind}_proj.weight": np.ascontiguousarray(x) for e, x in enumerate(stack)}
        else:
            gate, up, down = (
                np.stack([experts[f"{before}.{e}.{kind}_proj.weight"] for e in range(EXPERTS["num_experts"])])
                for kind in ("gate", "up", "down")
            )
            result |= {f"{before}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{before}.down_proj": down}
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_experts_one_by_one_and_fused(name, tmp_path):
    """`transformers` saves one of the two; ours reads both, and both are what `transformers` computes."""
    directory = saved(name, tmp_path / "model")
    record(directory, tmp_path / "out.npz")
    tensors = load_file(directory / "model.safetensors")
    other = restacked(tensors)
    assert sum(".experts." in x for x in tensors) != sum(".experts." in x for x in other)
    save_file(other, directory / "model.safetensors", metadata={"format": "pt"})
    check(compare(directory, read_recording(tmp_path / "out.npz")), 5e-4)


@pytest.mark.slow
def test_bfloat16(tmp_path):
    """Both sides in bfloat16: only distributions are bounded, and ours have to be within what is usual."""
    directory = saved("qwen3", tmp_path / "model")
    record(directory, tmp_path / "out.npz", "--dtype", "bfloat16")
    recording = read_recording(tmp_path / "out.npz")
    assert recording.dtype == "bfloat16"
    report = compare(directory, recording)
    assert report.dtype == "bfloat16" and report.ok, report.problems
    assert 1e-4 < report.logits.mean < 0.05
    assert np.isinf(report.tolerance.layer_max)
