"""Model configurations: frozen dataclasses read from Hugging Face `config.json` dictionaries.

This is the only place that knows the keys of `config.json`. Whatever would change the mathematics and is not
implemented is refused,
with every reason listed at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_jax.errors import InputError

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
HYBRID_TYPES = ("qwen3_5", "qwen3_5_text")
DENSE_TYPES = ("qwen3",)
MISSING = object()


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and how many leading dimensions of a head are rotated."""

    theta: float
    rotary_dim: int


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention: `gated` heads multiply their output by sigmoid(gate) (Qwen3.5)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    gated: bool


@dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet: Hk key heads of width dk, Hv value heads of width dv, a causal convolution of `conv_taps` taps."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def channels(self) -> int:
        """C: channels of the convolution, all q, then all k, then all v heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target model. `layer_types` has one entry a layer: linear_attention or full_attention."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    attention: AttentionConfig
    delta: DeltaConfig | None
    norm_eps: float
    zero_centred_norm: bool
    tie_word_embeddings: bool
    max_positions: int

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TargetConfig:
        """Read a target's `config.json` (for a vision-language checkpoint its `text_config`).

        Raises InputError with every problem found: unknown architecture, missing keys, values that are not implemented.
        """
        reader = _Reader(config.get("text_config", config), "target config.json")
        model_type = reader.get("model_type", kind=str)
        hybrid = model_type in HYBRID_TYPES
        if not hybrid and model_type not in DENSE_TYPES:
            raise InputError(
                f"unknown target architecture {model_type!r}; this version reads {', '.join(DENSE_TYPES + HYBRID_TYPES)}"
            )
        reader.expect("hidden_act", "silu")
        reader.expect("attention_bias", False)
        reader.expect("use_sliding_window", False)
        reader.expect("attn_output_gate", True)
        reader.expect("output_gate_type", "swish")
        layer_types = _layer_types(reader, hybrid)
        result = dict(
            model_type=model_type,
            vocab_size=reader.size("vocab_size"),
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            layer_types=layer_types,
            attention=_attention(reader, gated=hybrid, partial=0.25 if hybrid else 1.0),
            delta=_delta(reader) if LINEAR in layer_types else None,
            norm_eps=reader.get("rms_norm_eps", 1e-6, kind=float),
            zero_centred_norm=hybrid,
            tie_word_embeddings=reader.get("tie_word_embeddings", config.get("tie_word_embeddings", False), kind=bool),
            max_positions=reader.size("max_position_embeddings"),
        )
        reader.finish()
        return cls(**result)


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: Qwen3 layers over a block of masks, reading `target_layer_ids` of the target.

    `causal[i]`: inside the block, layer i lets a slot see only earlier slots. `windows[i]`: how many positions, its own
    included,
    layer i looks back, or None for all. `block_size` counts the root's slot, so the draft horizon is `block_size - 1`.
    """

    hidden_size: int
    intermediate_size: int
    attention: AttentionConfig
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int

    @property
    def num_layers(self) -> int:
        """Number of drafter layers."""
        return len(self.windows)

    @property
    def horizon(self) -> int:
        """L: how many positions one block drafts."""
        return self.block_size - 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Read a drafter's `config.json`: the legacy schema (flat keys) and the one since June 2026 (in
        `dflash_config`).

        Raises InputError with every problem found. A missing mask token is an error: guessing it would only cost
        acceptance.
        """
        reader = _Reader({**config, **config.get("dflash_config", {})}, "drafter config.json")
        if "DFlashDraftModel" not in config.get("architectures", ()):
            raise InputError(f"not a DFlash drafter: architectures is {config.get('architectures')}")
        reader.expect("hidden_act", "silu")
        reader.expect("attention_bias", False)
        reader.expect("projector_type", "dflash")
        num_layers = reader.size("num_hidden_layers")
        causal, windows = _drafter_masks(reader, num_layers)
        num_target_layers = reader.get("num_target_layers", None)
        result = dict(
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            attention=_attention(reader, gated=False, partial=1.0),
            causal=causal,
            windows=windows,
            norm_eps=reader.get("rms_norm_eps", 1e-6, kind=float),
            block_size=reader.size("block_size", 16),
            mask_token_id=reader.get("mask_token_id", kind=int),
            target_layer_ids=_tap_ids(reader, num_target_layers),
            num_target_layers=num_target_layers,
            vocab_size=reader.size("vocab_size"),
        )
        reader.finish()
        if result["block_size"] < 2:
            raise InputError("drafter config.json: block_size must be at least 2 (the root and one mask)")
        return cls(**result)

    def check_against(self, target: TargetConfig) -> None:
        """Raise InputError, every reason listed, unless this drafter can read and feed `target`."""
        problems = []
        if self.hidden_size != target.hidden_size:
            problems.append(f"hidden size {self.hidden_size}, the target has {target.hidden_size}")
        if self.vocab_size != target.vocab_size:
            problems.append(f"vocabulary {self.vocab_size}, the target has {target.vocab_size}")
        if self.num_target_layers not in (None, target.num_layers):
            problems.append(f"made for {self.num_target_layers} target layers, the target has {target.num_layers}")
        if not 0 <= self.mask_token_id < target.vocab_size:
            problems.append(f"mask token {self.mask_token_id} is outside the vocabulary of {target.vocab_size}")
        bad = [i for i in self.target_layer_ids if not 0 <= i < target.num_layers - 1]
        if bad:
            problems.append(
                f"tap layers {bad} are outside 0..{target.num_layers - 2} (the last layer's output is not a tap)"
            )
        if problems:
            raise InputError("the drafter does not belong to this target: " + "; ".join(problems))


@dataclass
class _Reader:
    """Typed access to a config dictionary that collects problems instead of stopping at the first."""

    config: Mapping[str, Any]
    name: str
    problems: list[str] = dataclasses.field(default_factory=list)

    def get(self, key: str, default: Any = MISSING, kind: type | None = None) -> Any:
        value = self.config.get(key, MISSING)
        if value is MISSING or (value is None and default is not MISSING):
            value = default
        if value is MISSING:
            self.problems.append(f"{key} is missing")
            return None
        return self._typed(key, value, kind)

    def _typed(self, key: str, value: Any, kind: type | None) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if kind is not None and type(value) is not kind:
            self.problems.append(f"{key} should be {kind.__name__}, found {value!r}")
            return None
        return value

    def size(self, key: str, default: Any = MISSING) -> int:
        value = self.get(key, default, kind=int)
        if value is None:
            return 1
        if value < 1:
            self.problems.append(f"{key} should be at least 1, found {value}")
        return max(value, 1)

    def expect(self, key: str, value: Any) -> None:
        found = self.config.get(key)
        if found not in (None, value):
            self.problems.append(f"{key} = {found!r} is not implemented (only {value!r})")

    def finish(self) -> None:
        if self.problems:
            raise InputError(f"{self.name}: " + "; ".join(self.problems))


def _layer_types(reader: _Reader, hybrid: bool) -> tuple[str, ...]:
    """One attention kind a layer: the list where there is one, else every `full_attention_interval`-th layer is full."""
    count = reader.size("num_hidden_layers")
    interval = reader.size("full_attention_interval", 4) if hybrid else 1
    default = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)]
    types = tuple(reader.get("layer_types", default))
    allowed = {LINEAR, FULL} if hybrid else {FULL}
    if len(types) != count:
        reader.problems.append(f"layer_types has {len(types)} entries for num_hidden_layers = {count}")
    if set(types) - allowed:
        reader.problems.append(f"layer types {sorted(set(types) - allowed)} are not implemented for this architecture")
    return types


def _attention(reader: _Reader, gated: bool, partial: float) -> AttentionConfig:
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    head_dim = reader.size("head_dim", max(reader.size("hidden_size") // heads, 1))
    if heads % kv_heads:
        reader.problems.append(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    return AttentionConfig(heads, kv_heads, head_dim, _rope(reader, head_dim, partial), gated)


def _rope(reader: _Reader, head_dim: int, partial: float) -> RopeConfig:
    """Rotary settings, flat (transformers 4) or in `rope_parameters` (5). A missing theta is an error, never 10,000."""
    rope = _Reader({**reader.config, **(reader.config.get("rope_parameters") or {})}, reader.name, reader.problems)
    scaling = reader.config.get("rope_scaling") or {}
    kind = rope.config.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        reader.problems.append(f"rope type {kind!r} is not implemented (only 'default')")
    factor = rope.get("partial_rotary_factor", partial, kind=float) or partial
    return RopeConfig(rope.get("rope_theta", kind=float) or 1.0, int(head_dim * factor))


def _delta(reader: _Reader) -> DeltaConfig:
    delta = DeltaConfig(
        num_key_heads=reader.size("linear_num_key_heads"),
        num_value_heads=reader.size("linear_num_value_heads"),
        key_dim=reader.size("linear_key_head_dim"),
        value_dim=reader.size("linear_value_head_dim"),
        conv_taps=reader.size("linear_conv_kernel_dim"),
    )
    if delta.num_value_heads % delta.num_key_heads:
        reader.problems.append("linear_num_value_heads is not a multiple of linear_num_key_heads")
    return delta


def _drafter_masks(reader: _Reader, num_layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causal rule and window of every layer (reference_models.md 5.1): sliding layers are causal unless `is_causal`
    says otherwise.
    """
    types = tuple(reader.get("layer_types", [FULL] * num_layers))
    if len(types) != num_layers or set(types) - {FULL, SLIDING}:
        reader.problems.append(f"layer_types should be {num_layers} entries of {FULL} or {SLIDING}")
    sliding = [t == SLIDING for t in types]
    window = reader.size("sliding_window") if any(sliding) else None
    is_causal = reader.get("is_causal", None)
    causal = tuple(s if is_causal is None else bool(is_causal) for s in sliding)
    return causal, tuple(window if s else None for s in sliding)


def _tap_ids(reader: _Reader, num_target_layers: int | None) -> tuple[int, ...]:
    ids = reader.get("target_layer_ids", kind=list)
    if ids is not None and (not ids or not all(type(i) is int for i in ids)):
        reader.problems.append(f"target_layer_ids should be a list of layer numbers, found {ids!r}")
        return ()
    return tuple(ids or ())
