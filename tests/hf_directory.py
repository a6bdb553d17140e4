"""Writes tiny networks as Hugging Face directories, as transformers 5 lays them out: what `ddtree_jax.load` reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from safetensors.numpy import save_file
from tiny import DRAFTER, HYBRID

from ddtree_jax.config import FULL, LINEAR, SLIDING, AttentionConfig, BlockRule, DrafterConfig, TargetConfig
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.network import Network, NetworkSpec

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = 256 + len(SPECIALS)  # ids of the byte tokenizer
VOCAB = 264  # the embedding is larger than the tokenizer, and the mask lies in between, as in the published models
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# A pair that compiles fast: one layer of each kind, one tap, one drafter layer.
SMALL_TARGET = dataclasses.replace(HYBRID, vocab_size=VOCAB, layer_types=(LINEAR, FULL), max_positions=512)
SMALL_DRAFTER = dataclasses.replace(
    DRAFTER,
    vocab_size=VOCAB,
    rules=(BlockRule.BIDIRECTIONAL,),
    windows=(None,),
    block_size=4,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(0,),
    num_target_layers=2,
)


def write_pair(directory: Path) -> tuple[Network, Network]:
    """directory/target and directory/drafter: the small pair with a tokenizer; returns the networks written."""
    target, drafter = random_network(SMALL_TARGET, 0), random_network(SMALL_DRAFTER, 1)
    write_target(directory / "target", target)
    write_tokenizer(directory / "target")
    write_drafter(directory / "drafter", drafter)
    return target, drafter


def random_network(config: TargetConfig | DrafterConfig, seed: int) -> Network:
    """A float32 network of NumPy's random numbers: nothing is compiled, unlike in `tiny`."""
    module = Target if isinstance(config, TargetConfig) else Drafter
    spec = NetworkSpec(module, config, jnp.dtype("float32"))
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return 0.2 * rng.standard_normal(shape) if len(shape) > 1 else 1 + 0.1 * rng.standard_normal(shape)

    leaves = [jnp.asarray(draw(leaf.shape).astype(np.float32)) for leaf in jax.tree.leaves(spec.abstract()[1])]
    return Network(tuple(leaves), spec)


def write_target(directory: Path, network: Network, prefix: str = "model.") -> None:
    """config.json, generation_config.json and model.safetensors of a target."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", target_json(network.config))
    write_json(directory / "generation_config.json", {"eos_token_id": [0, 2]})
    save_file(target_tensors(network, prefix), directory / "model.safetensors")


def write_drafter(directory: Path, network: Network) -> None:
    """config.json and model.safetensors of a drafter."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", drafter_json(network.config))
    save_file(stored_tensors(network), directory / "model.safetensors")


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of single bytes, its config and a chat template."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Ids 0..2 are the special tokens, each other id is one byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    return backend


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ... removes one."""
    value = json.loads(path.read_text()) | changes
    write_json(path, {key: entry for key, entry in value.items() if entry is not ...})


def target_tensors(network: Network, prefix: str = "model.") -> dict[str, np.ndarray]:
    """A target's tensors as on disk: all but the head carry the prefix."""
    tensors = stored_tensors(network)
    return {name if name == "lm_head.weight" else prefix + name: x for name, x in tensors.items()}


def stored_tensors(network: Network) -> dict[str, np.ndarray]:
    """Parameters by their names in the module tree, the convolution's weight as [C, 1, K]."""
    parameters = nnx.to_flat_state(nnx.state(network.module(), nnx.Param))
    named = {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in parameters}
    conv = {name: np.ascontiguousarray(w.T[:, None, :]) for name, w in named.items() if name.endswith("conv1d.weight")}
    return named | conv


def target_json(config: TargetConfig) -> dict[str, Any]:
    """config.json of a target, as transformers 5 writes it."""
    hybrid = config.model_type != "qwen3"
    return {
        "architectures": ["Qwen3_5ForCausalLM" if hybrid else "Qwen3ForCausalLM"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_positions,
        **_attention_json(config.attention, config.hidden_size, config.norm_eps),
        **(_delta_json(config) if config.delta else {}),
    }


def drafter_json(config: DrafterConfig) -> dict[str, Any]:
    """config.json of a drafter, in the schema since June 2026; DFlash2 where it has convolutions."""
    window = next((w for w in config.windows if w), None)
    return {
        "architectures": ["DFlash2DraftModel" if config.conv else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "layer_types": [SLIDING if w else FULL for w in config.windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        **_attention_json(config.attention, config.hidden_size, config.norm_eps),
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **_dflash2_json(config),
        },
    }


def _dflash2_json(config: DrafterConfig) -> dict[str, Any]:
    conv, selector = config.conv, config.selector
    kernels = {"conv_kernel_size": conv.taps, "conv_group_size": conv.group_size} if conv else {}
    return kernels | ({"selector_rank": selector.rank, "selector_top_k": selector.top_k} if selector else {})


def speculators_json(config: DrafterConfig) -> dict[str, Any]:
    """config.json of a drafter in the speculators format."""
    flat = drafter_json(config)
    inner = flat.pop("dflash_config")
    own = ("architectures", "num_target_layers")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": inner["block_size"],
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "sliding_window_non_causal": config.windows[0] is not None and config.rules[0] is BlockRule.BIDIRECTIONAL,
        "transformer_layer_config": {key: value for key, value in flat.items() if key not in own},
    }


def _attention_json(attention: AttentionConfig, hidden: int, eps: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": attention.rope.theta}
    return {
        "hidden_size": hidden,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": eps,
        "rope_parameters": rope | {"partial_rotary_factor": attention.rope.rotary_dim / attention.head_dim},
    }


def _delta_json(config: TargetConfig) -> dict[str, Any]:
    delta = config.delta
    return {
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_taps,
    }
