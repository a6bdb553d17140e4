"""Random checkpoints as Hugging Face directories, for any config.json; whole or with FP8 weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from convert.recipes import recipe
from ddtree_jax.config import TargetConfig
from ddtree_jax.models import Target
from ddtree_jax.models.network import NetworkSpec

Tensors = dict[str, np.ndarray]

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HYBRID = DENSE | {
    "model_type": "qwen3_5_text",
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
NEXT = MOE | HYBRID | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 24}


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Float32 tensors by their names on disk, one an expert."""
    spec = NetworkSpec(Target, TargetConfig.from_hf(config), jnp.dtype("float32"))
    made = [recipe(name, leaf.shape, spec.config, ()) for name, leaf in spec.parameters().items()]
    rng = np.random.default_rng(seed)
    return {
        name if name == "lm_head.weight" else f"model.{name}": (0.2 * rng.standard_normal(shape)).astype(np.float32)
        for one in made
        for name, shape in one.tensors.items()
    }


def quantised(
    tensors: Tensors, chosen: Callable[[str], bool], block: int = 16, scale_dtype: Any = ml_dtypes.bfloat16
) -> tuple[Tensors, Tensors]:
    """The chosen tensors as FP8 with scales, the others as they are; and a twin with what the FP8 weights stand for."""
    rng = np.random.default_rng(1)
    stored, twin = {}, dict(tensors)
    for name, value in tensors.items():
        if not chosen(name):
            stored[name] = value
            continue
        rows, columns = (-(-size // block) for size in value.shape)
        scale = rng.uniform(0.01, 0.1, (rows, columns)).astype(scale_dtype)
        stored[name] = (value * 30).astype(ml_dtypes.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        wide = np.kron(scale.astype(np.float32), np.ones((block, block), np.float32))
        twin[name] = stored[name].astype(np.float32) * wide[: value.shape[0], : value.shape[1]]
    return stored, twin


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
