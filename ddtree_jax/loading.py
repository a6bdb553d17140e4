"""`load()`: a target and its drafter from local directories to something that generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from convert.converted import Source, open_directory, read_network, with_fp8
from ddtree_jax import parallel
from ddtree_jax._cache import enable_compile_cache
from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.text import Tokenizer, stop_ids

DTYPES = ("bfloat16", "float32")
DEMO = Path(__file__).parent / "demo"


@dataclass(frozen=True)
class Model:
    """A target, perhaps its drafter, and its text side.

    tokenizer is None when the directory has no tokenizer.json: then only `prompt_ids` can be given. stop_ids: what ends
    a generation.
    """

    target: Network
    drafter: Network | None
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]


def load(
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    dtype: str = "bfloat16",
    keep_fp8: bool = False,
    tensor_parallel: int = 1,
) -> Model:
    """Load a checkpoint directory of a target, and one of a DFlash drafter: Hugging Face's, or converted ones.

    Args:
      target: directory with config.json, model.safetensors (or shards with an index) and, for text, tokenizer.json.
        None: the demo pair.
      drafter: directory of the drafter; None loads the target alone, which then decodes with method "ar".
      dtype: "bfloat16" or "float32", of weights and activations; gates, decay and recurrent state are float32 in both.
      keep_fp8: weights that are FP8 in a Hugging Face directory stay so in memory and are dequantised in each product,
        one at a time. Converted directories keep what they were converted to, whatever this says.
      tensor_parallel: devices to split weights and caches over; no device ever holds a whole model.

    Raises InputError with one line that lists what is wrong: missing or truncated files, unknown architectures, tensors
    that do not fit, a drafter of another target, nothing that could stay FP8. Whatever can be checked without the
    weights is checked before them.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if target is None:
        if drafter is not None:
            raise InputError("a drafter needs its target; without both, the demo pair is loaded")
        target, drafter = demo_directory("target"), demo_directory("drafter")
    mesh = parallel.make_mesh(tensor_parallel) if tensor_parallel != 1 else None
    checkpoint = open_directory(target)
    spec = NetworkSpec(Target, TargetConfig.from_hf(checkpoint.config), jnp.dtype(dtype))
    spec = with_fp8(checkpoint, spec, keep_fp8)
    draft = None if drafter is None else _open_drafter(drafter, spec, keep_fp8)
    if keep_fp8 and not (spec.fp8 or (draft and draft[1].fp8)):
        raise InputError(f"{checkpoint.directory} has no FP8 weights that could be kept; load without keep_fp8")
    tokenizer = _tokenizer(checkpoint)
    stops = stop_ids(checkpoint.json("generation_config.json"), checkpoint.config, tokenizer)
    enable_compile_cache()
    drafter_network = read_network(*draft, mesh) if draft else None
    return Model(read_network(checkpoint, spec, mesh), drafter_network, tokenizer, stops)


def demo_directory(part: str) -> Path:
    """The directory of the demo pair's target or drafter; InputError when it is not installed."""
    directory = DEMO / part
    if not directory.is_dir():
        raise InputError(f"the demo pair is not installed ({directory}); give a target, or run scripts/train_demo.py")
    return directory


def _open_drafter(directory: str | Path, target: NetworkSpec, keep_fp8: bool) -> tuple[Source, NetworkSpec]:
    """A drafter's checkpoint, checked against its target."""
    checkpoint = open_directory(directory)
    config = DrafterConfig.from_hf(checkpoint.config, checkpoint.names())
    config.check_against(target.config)
    return checkpoint, with_fp8(checkpoint, NetworkSpec(Drafter, config, target.dtype), keep_fp8)


def _tokenizer(checkpoint: Source) -> Tokenizer | None:
    """The directory's tokenizer, if it has one; InputError for files of it that are links to outside."""
    path, *_ = [checkpoint.file(n) for n in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")]
    return Tokenizer.from_directory(checkpoint.directory) if path.exists() else None
