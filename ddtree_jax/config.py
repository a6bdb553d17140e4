"""Model configurations: frozen dataclasses read from Hugging Face `config.json` dictionaries.

This is the only place that knows the keys of `config.json`. Whatever would change the mathematics and is not
implemented is refused, with every reason listed at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ddtree_jax.errors import InputError

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
DFLASH, DFLASH2, SPECULATORS = "DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator"
DRAFTERS = (DFLASH, DFLASH2, SPECULATORS)
MISSING = object()

# Keys that change the mathematics, with the only value that is implemented; absent is as good.
TARGET_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "mlp_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
}
DRAFTER_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "projector_type": "dflash",
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "shift_label": False,
    "sample_from_anchor": False,
}


@dataclass(frozen=True)
class Family:
    """What an architecture's name decides, apart from sizes (reference_models.md 1.0)."""

    hybrid: bool = False  # Gated DeltaNet layers, gated attention, zero-centred norms, partial rotary
    moe: bool = False
    qk_norm: bool = True
    packed_delta: bool = False  # on disk the delta projections are grouped by key head (qkvz, ba)
    always_normalised: bool = False  # router weights sum to 1 whatever norm_topk_prob says


FAMILIES = {
    "llama": Family(qk_norm=False),
    "qwen3": Family(),
    "qwen3_moe": Family(moe=True),
    "qwen3_next": Family(hybrid=True, moe=True, packed_delta=True),
    "qwen3_5": Family(hybrid=True),
    "qwen3_5_text": Family(hybrid=True),
    "qwen3_5_moe": Family(hybrid=True, moe=True, always_normalised=True),
    "qwen3_5_moe_text": Family(hybrid=True, moe=True, always_normalised=True),
}


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies interpolated, high ones kept; cos and sin are both multiplied by `attention_factor`."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, how many leading dimensions of a head are rotated, and its scaling.

    M-RoPE needs no entry: for text its three rows of positions are equal, and it is the ordinary embedding.
    """

    theta: float
    rotary_dim: int
    scaling: Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention: `gated` heads multiply their output by sigmoid(gate) (Qwen3.5); Llama has no `qk_norm`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    gated: bool
    qk_norm: bool = True


@dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet: Hk key heads of width dk, Hv value heads of width dv, a convolution of `conv_taps` taps."""

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
class MoeConfig:
    """Mixture of experts: the `top_k` best of `num_experts`, weights summing to 1 if `normalise`.

    shared_size: width of the expert that every token goes through, or None.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int | None
    normalise: bool


@dataclass(frozen=True)
class TargetConfig:
    """A decoder-only target model.

    layer_types: one entry a layer, linear_attention or full_attention.
    moe_layers: which layers have experts instead of the dense feed-forward.
    packed_delta: the checkpoint groups the delta projections by key head (Qwen3-Next); only reading it depends on that.
    """

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
    moe: MoeConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    packed_delta: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.layer_types) - {LINEAR, FULL})
        if unknown:
            raise InputError(f"layer types {unknown} cannot be decoded as a tree (only {LINEAR} and {FULL})")
        if LINEAR in self.layer_types and self.delta is None:
            raise InputError(f"{LINEAR} layers need a DeltaConfig")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return bool(self.moe_layers) and self.moe_layers[layer]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TargetConfig:
        """Read a target's `config.json` (for a vision-language checkpoint its `text_config`).

        Raises InputError with every problem found: unknown architecture, missing keys, values that are not implemented.
        """
        name = "target config.json"
        text = _Reader(config, name).mapping("text_config") or config
        reader = _Reader(text, name)
        family = FAMILIES[_architecture(config, text)]
        for key, value in TARGET_ONLY.items():
            reader.expect(key, value)
        reader.check_quantisation(config)
        layer_types = _layer_types(reader, family.hybrid)
        moe_layers = _moe_layers(reader, len(layer_types)) if family.moe else ()
        tied = config.get("tie_word_embeddings") or False
        result: dict[str, Any] = dict(
            model_type=text["model_type"],
            vocab_size=reader.size("vocab_size"),
            hidden_size=reader.size("hidden_size"),
            intermediate_size=0 if moe_layers and all(moe_layers) else reader.size("intermediate_size"),
            layer_types=layer_types,
            attention=_attention(reader, family.hybrid, 0.25 if family.hybrid else 1.0, family.qk_norm),
            delta=_delta(reader) if LINEAR in layer_types else None,
            moe=_moe(reader, family) if any(moe_layers) else None,
            moe_layers=moe_layers,
            packed_delta=family.packed_delta,
            norm_eps=reader.positive("rms_norm_eps", 1e-6),
            zero_centred_norm=family.hybrid,
            tie_word_embeddings=reader.get("tie_word_embeddings", tied, kind=bool),
            max_positions=reader.size("max_position_embeddings"),
        )
        reader.finish()
        return cls(**result)


class BlockRule(Enum):
    """What a slot of a drafter's block sees of the block."""

    BIDIRECTIONAL = "bidirectional"
    CAUSAL = "causal"  # itself and earlier slots


class WindowRule(Enum):
    """Where the window of a drafter's sliding layer begins; the two differ only in contexts longer than the window."""

    QUERY = "query"  # a slot sees W positions, its own the last of them; without causality also W - 1 later ones
    ANCHOR = "anchor"  # every slot sees the W positions before the block's first, and the block


@dataclass(frozen=True)
class BlockConvConfig:
    """DFlash2's convolutions over a block: `taps` slots, kernels predicted for groups of `group_size` channels."""

    taps: int
    group_size: int


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash2's candidate selector: scores of rank `rank` for pairs among the `top_k` best tokens of two slots."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash or DFlash2 drafter: Qwen3 layers over a block of masks, reading `target_layer_ids` of the target.

    rules, windows: one a layer; a window is how many positions a sliding layer looks back (counted as `window_rule`
      says), None for all.
    block_size: counts the root's slot, so the draft horizon is `block_size - 1`.
    conv, selector: what DFlash2 adds, else None.
    own_embedding, own_head: whether the drafter brings them; else it uses the target's.
    draft_vocab_size: tokens of its own head where it covers only some of the vocabulary (and brings a map), else None.
    """

    hidden_size: int
    intermediate_size: int
    attention: AttentionConfig
    rules: tuple[BlockRule, ...]
    windows: tuple[int | None, ...]
    norm_eps: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int
    draft_vocab_size: int | None = None
    window_rule: WindowRule = WindowRule.QUERY
    conv: BlockConvConfig | None = None
    selector: SelectorConfig | None = None
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and not self.own_head:
            raise InputError(f"a draft vocabulary of {self.draft_vocab_size} tokens needs a head of its own (lm_head)")

    @property
    def num_layers(self) -> int:
        """Number of drafter layers."""
        return len(self.windows)

    @property
    def horizon(self) -> int:
        """L: how many positions one block drafts."""
        return self.block_size - 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], tensors: Collection[str] = ()) -> DrafterConfig:
        """Read a drafter's `config.json`: the legacy schema (flat keys), that since June 2026 (in `dflash_config`), or
        that of speculators.

        tensors: the checkpoint's tensor names. Only they tell whether a speculators drafter brings its own embedding
          and head.
        Raises InputError with every problem found. A missing mask token is an error: guessing it would only cost
        acceptance.
        """
        if not is_drafter(config):
            found = config.get("architectures")
            raise InputError(f"not a DFlash drafter: architectures is {found}, not one of {', '.join(DRAFTERS)}")
        name = "drafter config.json"
        speculators = _is_speculators(config)
        inner = "transformer_layer_config" if speculators else "dflash_config"
        settings = {**config, **_Reader(config, name).mapping(inner)}
        reader = _Reader(settings | _speculators_settings(config) if speculators else settings, name)
        for key, value in DRAFTER_ONLY.items():
            reader.expect(key, value)
        reader.check_quantisation(config)
        rules, windows = _drafter_masks(reader, reader.size("num_hidden_layers"))
        vocab, dflash2 = reader.size("vocab_size"), DFLASH2 in _architectures(config)
        result: dict[str, Any] = dict(
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            attention=_attention(reader, gated=False, partial=1.0, qk_norm=True),
            rules=rules,
            windows=windows,
            norm_eps=reader.positive("rms_norm_eps", 1e-6),
            block_size=reader.size("block_size", 8 if speculators else 16, least=2),  # the root and one mask
            mask_token_id=reader.get("mask_token_id", kind=int),
            target_layer_ids=_tap_ids(reader),
            num_target_layers=reader.get("num_target_layers", None, kind=int),
            vocab_size=vocab,
            draft_vocab_size=_draft_vocabulary(reader, vocab, speculators),
            window_rule=WindowRule.ANCHOR if speculators else WindowRule.QUERY,
            conv=_block_conv(reader) if dflash2 else None,
            selector=_selector(reader) if dflash2 else None,
            own_embedding=speculators and "embed_tokens.weight" in tensors,
            own_head=speculators and "lm_head.weight" in tensors,
        )
        reader.finish()
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
        """The value of a key; null is as good as absent where there is a default. None when there is a problem."""
        value = self.config.get(key, MISSING)
        if value is MISSING or (value is None and default is not MISSING):
            value = default
        if value is MISSING:
            self.problems.append(f"{key} is missing")
            return None
        if kind is float and type(value) is int:
            return float(value)
        absent = value is None and default is None
        if kind is not None and type(value) is not kind and not absent:
            self.problems.append(f"{key} should be {kind.__name__}, found {value!r}")
            return None
        return value

    def size(self, key: str, default: Any = MISSING, least: int = 1) -> int:
        """A whole number of at least `least` (which also stands in for one that is not)."""
        value = self.get(key, default, kind=int)
        if value is not None and value < least:
            self.problems.append(f"{key} should be at least {least}, found {value}")
        return least if value is None else max(value, least)

    def positive(self, key: str, default: Any = MISSING) -> float:
        """A finite number above 0 (1 stands in for one that is not)."""
        value = self.get(key, default, kind=float)
        if value is not None and not 0 < value < math.inf:
            self.problems.append(f"{key} should be above 0, found {value}")
            return 1.0
        return 1.0 if value is None else value

    def names(self, key: str, default: Any = MISSING) -> tuple[str, ...]:
        """A list of strings."""
        value = self.get(key, default, kind=list)
        if value is not None and not all(isinstance(entry, str) for entry in value):
            self.problems.append(f"{key} should be a list of names, found {value!r}")
            return ()
        return tuple(value or ())

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object, {} where there is none. Raises at once: what it holds cannot be read."""
        value = self.config.get(key) or {}
        if not isinstance(value, Mapping):
            raise InputError(f"{self.name}: {key} should be an object, found {value!r}")
        return value

    def expect(self, key: str, value: Any) -> None:
        """Note a problem unless a key is absent, null or `value`."""
        found = self.config.get(key)
        if found not in (None, value):
            self.problems.append(f"{key} = {found!r} is not implemented (only {value!r})")

    def check_quantisation(self, config: Mapping[str, Any]) -> None:
        """Note a problem for quantised weights that cannot be read."""
        try:
            quantised_block(config)
        except InputError as error:
            self.problems.append(str(error))

    def finish(self) -> None:
        """Raise InputError when there were problems."""
        if self.problems:
            raise InputError(f"{self.name}: " + "; ".join(dict.fromkeys(self.problems)))


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash or DFlash2 drafter."""
    return any(name in DRAFTERS for name in _architectures(config))


def _is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's config.json is in the speculators format; its architecture may be called like the others."""
    return "speculators_model_type" in config or SPECULATORS in _architectures(config)


def _speculators_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the speculators format says otherwise: taps count from the embedding, and a flag lifts causality."""
    taps, lifted = config.get("aux_hidden_state_layer_ids"), config.get("sliding_window_non_causal")
    ids = [i - 1 if type(i) is int else i for i in taps] if isinstance(taps, list) else taps
    return {"target_layer_ids": ids, "is_causal": False if lifted else None}


def _architectures(config: Mapping[str, Any]) -> Sequence[str]:
    names = config.get("architectures")
    return names if isinstance(names, list) else []


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The model type of a target; InputError for one that this version cannot read."""
    if is_drafter(config):
        raise InputError("this is a DFlash drafter, not a target; give it as the drafter")
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"unknown target architecture {model_type!r}; this version reads {', '.join(FAMILIES)}")
    return model_type


def quantised_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a weight that share one scale in an FP8 checkpoint; None for weights that are not quantised.

    Which modules are quantised is not asked here: the tensors say it. Raises InputError for every other quantisation.
    """
    text = config.get("text_config") or {}
    found = config.get("quantization_config") or (isinstance(text, Mapping) and text.get("quantization_config"))
    if not found:
        return None
    if not isinstance(found, Mapping) or found.get("quant_method") != "fp8":
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise InputError(f"weights quantised by {method!r} are not implemented (only 'fp8')")
    reader = _Reader(found, "quantization_config")
    reader.expect("fmt", "e4m3")
    reader.expect("activation_scheme", "dynamic")
    block = reader.get("weight_block_size", [128, 128], kind=list) or []
    if not (len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        reader.problems.append(f"weight_block_size should be two sizes, found {block!r}")
    reader.finish()
    return block[0], block[1]


def _layer_types(reader: _Reader, hybrid: bool) -> tuple[str, ...]:
    """One kind a layer: the list where there is one, else full attention every `full_attention_interval` layers."""
    count = reader.size("num_hidden_layers")
    interval = reader.size("full_attention_interval", 4) if hybrid else 1
    types = reader.names("layer_types", [FULL if (i + 1) % interval == 0 else LINEAR for i in range(count)])
    if len(types) != count:
        reader.problems.append(f"layer_types has {len(types)} entries for num_hidden_layers = {count}")
    unknown = set(types) - ({LINEAR, FULL} if hybrid else {FULL})
    if unknown:
        reader.problems.append(f"layer types {sorted(unknown)} are not implemented for this architecture")
    return types


def _attention(reader: _Reader, gated: bool, partial: float, qk_norm: bool) -> AttentionConfig:
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    head_dim = reader.size("head_dim", max(reader.size("hidden_size") // heads, 1))
    if heads % kv_heads:
        reader.problems.append(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    return AttentionConfig(heads, kv_heads, head_dim, _rope(reader, head_dim, partial), gated, qk_norm)


def _rope(reader: _Reader, head_dim: int, partial: float) -> RopeConfig:
    """Rotary settings, flat (transformers 4) or in `rope_parameters` (5). A missing theta is an error, never 10,000."""
    new, old = reader.mapping("rope_parameters"), reader.mapping("rope_scaling")
    rope = _Reader({**reader.config, **old, **new}, reader.name, reader.problems)
    kinds = {kind for kind in (new.get("rope_type"), old.get("rope_type"), old.get("type")) if kind is not None}
    if len(kinds) > 1:
        reader.problems.append(f"rope type is given as {' and '.join(sorted(map(repr, kinds)))}")
    factor = rope.positive("partial_rotary_factor", partial)
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        reader.problems.append(f"partial_rotary_factor = {factor} rotates {rotary_dim} of {head_dim} dimensions")
    return RopeConfig(rope.positive("rope_theta"), rotary_dim, _scaling(rope, min(kinds, key=str, default="default")))


def _scaling(rope: _Reader, kind: str) -> Llama3Scaling | YarnScaling | None:
    """What stretches the rotations for long contexts (reference_models.md 1.2)."""
    if kind in ("default", "mrope"):
        return None
    if kind not in ("llama3", "yarn"):
        rope.problems.append(f"rope type {kind!r} is not implemented (only default, llama3, yarn)")
        return None
    factor = rope.positive("factor")
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        return Llama3Scaling(factor, low, high, rope.size("original_max_position_embeddings"))
    original = rope.size("original_max_position_embeddings", rope.config.get("max_position_embeddings", MISSING))
    default = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    for key in ("mscale", "mscale_all_dim", "truncate"):
        rope.expect(key, True if key == "truncate" else None)
    amplitude = rope.positive("attention_factor", default)
    return YarnScaling(factor, original, rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0), amplitude)


def _moe_layers(reader: _Reader, count: int) -> tuple[bool, ...]:
    """Which layers have experts (reference_models.md 1.6); every layer does in all that is published."""
    dense = reader.get("mlp_only_layers", [], kind=list) or []
    step = reader.size("decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(count))


def _moe(reader: _Reader, family: Family) -> MoeConfig:
    """Experts; `num_experts` on the hub, `num_local_experts` as transformers 5 writes it for qwen3_moe."""
    experts = reader.size("num_experts", reader.config.get("num_local_experts", MISSING))
    normalise = reader.get("norm_topk_prob", family.hybrid, kind=bool)
    moe = MoeConfig(
        num_experts=experts,
        top_k=reader.size("num_experts_per_tok"),
        expert_size=reader.size("moe_intermediate_size"),
        shared_size=reader.size("shared_expert_intermediate_size") if family.hybrid else None,
        normalise=family.always_normalised or bool(normalise),
    )
    if moe.top_k > moe.num_experts:
        reader.problems.append(f"num_experts_per_tok = {moe.top_k} of num_experts = {moe.num_experts}")
    return moe


def _delta(reader: _Reader) -> DeltaConfig:
    delta = DeltaConfig(
        num_key_heads=reader.size("linear_num_key_heads"),
        num_value_heads=reader.size("linear_num_value_heads"),
        key_dim=reader.size("linear_key_head_dim"),
        value_dim=reader.size("linear_value_head_dim"),
        conv_taps=reader.size("linear_conv_kernel_dim", least=2),
    )
    if delta.num_value_heads % delta.num_key_heads:
        reader.problems.append("linear_num_value_heads is not a multiple of linear_num_key_heads")
    return delta


def _drafter_masks(reader: _Reader, num_layers: int) -> tuple[tuple[BlockRule, ...], tuple[int | None, ...]]:
    """Causal rule and window of every layer (reference_models.md 5.1): sliding layers are causal unless `is_causal`
    says otherwise.
    """
    windowed = bool(reader.config.get("use_sliding_window"))  # then which layers slide has to be said
    types = reader.names("layer_types", MISSING if windowed else [FULL] * num_layers)
    if len(types) != num_layers or set(types) - {FULL, SLIDING}:
        reader.problems.append(f"layer_types should be {num_layers} entries of {FULL} or {SLIDING}")
    sliding = [kind == SLIDING for kind in types]
    window = reader.size("sliding_window") if any(sliding) else None
    is_causal = reader.get("is_causal", None, kind=bool)
    causal = [slides if is_causal is None else is_causal for slides in sliding]
    rules = tuple(BlockRule.CAUSAL if c else BlockRule.BIDIRECTIONAL for c in causal)
    return rules, tuple(window if slides else None for slides in sliding)


def _draft_vocabulary(reader: _Reader, vocab: int, speculators: bool) -> int | None:
    """The size of a reduced draft vocabulary, which only the speculators format has; None for the whole one."""
    if not speculators:
        reader.expect("draft_vocab_size", vocab)
        return None
    size = reader.size("draft_vocab_size", vocab)
    if size > vocab:
        reader.problems.append(f"draft_vocab_size = {size} is above vocab_size = {vocab}")
    return size if size < vocab else None


def _block_conv(reader: _Reader) -> BlockConvConfig:
    conv = BlockConvConfig(reader.size("conv_kernel_size"), reader.size("conv_group_size"))
    if reader.size("hidden_size") % conv.group_size:
        reader.problems.append(f"hidden_size is not a multiple of conv_group_size = {conv.group_size}")
    return conv


def _selector(reader: _Reader) -> SelectorConfig:
    return SelectorConfig(reader.size("selector_rank"), reader.size("selector_top_k"))


def _tap_ids(reader: _Reader) -> tuple[int, ...]:
    ids = reader.get("target_layer_ids", kind=list)
    if ids is not None and (not ids or not all(type(i) is int for i in ids)):
        reader.problems.append(f"target_layer_ids should be a list of layer numbers, found {ids!r}")
        return ()
    return tuple(ids or ())
