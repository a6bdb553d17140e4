"""Make the embedded demo pair: a small Qwen3.5-style target and its DFlash drafter, on CPython's library and documentation.

    python scripts/train_demo.py all --work DIR [--docs DIR] [--minutes 50] [--drafter-minutes 25]

Stages, each resumable by running it again (finished parts are found in the work directory):
    data      corpus, byte-level BPE, train.npy and heldout.npy
    target    trains the target for --minutes of wall clock; checkpoints every five minutes
    generate  the target continues prompts cut from its training text: what the drafter learns from
    drafter   trains the drafter for --minutes on those continuations
    report    bits per byte and acceptance on held-out text
The pair is written to ddtree_jax/demo/{target,drafter} as Hugging Face directories.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1]))

from ddtree_jax.config import TargetConfig  # noqa: E402
from ddtree_jax.models import Target  # noqa: E402
from ddtree_jax.models.network import Network  # noqa: E402
from ddtree_jax.train.data import batch_at, join_documents, pack_windows  # noqa: E402
from ddtree_jax.train.losses import target_loss  # noqa: E402

DEMO = Path(__file__).parents[1] / "ddtree_jax" / "demo"
VOCAB = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
THINK = ("<think>", "</think>")
END, MASK = 0, 3
HELD_OUT_IN = 25
log = logging.getLogger("train_demo")

# ---- data ------------------------------------------------------------------------------------------------------------

# Words with one leading character, single digits, punctuation runs, line ends, indentation: code keeps its shape.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SKIPPED = re.compile(r"(^|/)(site-packages|test|tests|idle_test|lib2to3|encodings|pydoc_data|__pycache__)/|_sysconfigdata")


def library_files() -> dict[str, Path]:
    """CPython's own modules, without tests, generated tables and the copy of the documentation in pydoc_data."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {f"Lib/{p.relative_to(root).as_posix()}": p for p in sorted(root.rglob("*.py"))}
    return {name: path for name, path in files.items() if not SKIPPED.search(name)}


def documentation_files(root: Path) -> dict[str, Path]:
    """The reStructuredText sources under `root`; exits with a hint when there are none."""
    files = sorted(p for p in root.rglob("*") if p.name.endswith((".rst", ".rst.txt")))
    if not files:
        raise SystemExit(
            f"train_demo: no .rst or .rst.txt file under {root}. Install the Debian package python3.11-doc "
            "(sources in /usr/share/doc/python3.11/html/_sources) or unpack CPython's Doc/, and pass it as --docs DIR."
        )
    return {f"Doc/{p.relative_to(root).as_posix()}": p for p in files}


def read_corpus(files: dict[str, Path]) -> dict[str, str]:
    """Texts by name; empty files and files that are not UTF-8 are left out."""
    texts = {}
    for name, path in files.items():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts[name] = text
    return texts


def is_held_out(name: str) -> bool:
    """About 4 % of the files, chosen by the hash of their path."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % HELD_OUT_IN == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(s, special=True, normalized=False) for s in SPECIALS]
    think = [AddedToken(s, special=False, normalized=False) for s in THINK]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special + think,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    return join_documents([e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)], END)


def stage_data(args: argparse.Namespace) -> None:
    """Corpus -> tokenizer.json, train.npy, heldout.npy and data.json in the work directory."""
    if (args.work / "data.json").exists():
        log.info("data: already there")
        return
    texts = read_corpus(library_files() | documentation_files(args.docs))
    parts = {"train": [], "heldout": []}
    for name, text in texts.items():
        parts["heldout" if is_held_out(name) else "train"].append(text)
    tokenizer = train_tokenizer(parts["train"])
    tokenizer.save(str(args.work / "tokenizer.json"))
    facts = {}
    for part, chosen in parts.items():
        stream = encode_texts(tokenizer, chosen)
        np.save(args.work / f"{part}.npy", stream)
        size = sum(len(text.encode()) for text in chosen)
        facts[part] = {"files": len(chosen), "bytes": size, "tokens": len(stream), "bytes_per_token": size / len(stream)}
    (args.work / "data.json").write_text(json.dumps(facts, indent=1))
    log.info("data: %s", facts)


# ---- training --------------------------------------------------------------------------------------------------------

Leaves = tuple[jax.Array, ...]
LossOf = Callable[[Leaves, Any], tuple[jax.Array, Any]]
CHECKPOINT_SECONDS = 300
WARM_UP_STEPS = 60


def optimiser() -> optax.GradientTransformation:
    """AdamW behind a clip, without its learning rate: the step multiplies by that, since it follows the clock."""
    decay = optax.add_decayed_weights(0.05, mask=lambda leaves: jax.tree.map(lambda x: x.ndim > 1, leaves))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95), decay)


@partial(jax.jit, static_argnames="loss_of", donate_argnums=(0, 1))
def train_step(leaves: Leaves, moments: optax.OptState, batch: Any, rate: jax.Array, *, loss_of: LossOf):
    """One update; returns weights, moments and (loss, figures)."""
    value, gradient = jax.value_and_grad(loss_of, has_aux=True)(leaves, batch)
    updates, moments = optimiser().update(gradient, moments, leaves)
    return jax.tree.map(lambda w, u: w - rate * u, leaves, updates), moments, value


def learning_rate(peak: float, step: int, fraction: float) -> float:
    """Linear warm-up by steps, then a straight line to zero at the end of the time budget."""
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * max(1.0 - fraction, 0.0)


def save_arrays(path: Path, leaves: list[jax.Array], **facts: float) -> None:
    """Write leaves and facts; a killed write leaves the former file whole."""
    part = path.with_suffix(".part.npz")
    np.savez(part, **{f"leaf{i:04d}": np.asarray(x) for i, x in enumerate(leaves)}, **facts)
    os.replace(part, path)


def load_arrays(path: Path) -> tuple[list[np.ndarray], dict[str, float]]:
    with np.load(path) as stored:
        facts = {name: stored[name].item() for name in stored.files if not name.startswith("leaf")}
        return [stored[name] for name in sorted(stored.files) if name.startswith("leaf")], facts


def train(
    path: Path,
    leaves: Leaves,
    batches: Callable[[int], Any],
    loss_of: LossOf,
    *,
    minutes: float,
    peak: float,
    evaluate: Callable[[Leaves], str],
) -> Leaves:
    """Train for `minutes` of wall clock in all, counted over restarts, and return the last weights."""
    moments = optimiser().init(leaves)
    step, spent = 0, 0.0
    if path.exists():
        stored, facts = load_arrays(path)
        leaves, moments = jax.tree.unflatten(jax.tree.structure((leaves, moments)), map(jnp.asarray, stored))
        step, spent = int(facts["step"]), facts["spent"]
        log.info("%s: resumed at step %d after %.0f s", path.stem, step, spent)
    clock = saved = time.monotonic()
    first = step
    while spent < minutes * 60:
        rate = learning_rate(peak, step, spent / (minutes * 60))
        leaves, moments, (loss, figures) = train_step(leaves, moments, batches(step), rate, loss_of=loss_of)
        loss.block_until_ready()
        now = time.monotonic()
        spent += 0.0 if step == first else now - clock  # the first step of a process is compilation
        clock, step = now, step + 1
        if step % 50 == 0:
            log.info("%s: step %d, %.0f s, rate %.2e, loss %.4f %s", path.stem, step, spent, rate, loss, figures)
        if now - saved > CHECKPOINT_SECONDS or spent >= minutes * 60:
            save_arrays(path, jax.tree.leaves((leaves, moments)), step=step, spent=spent)
            log.info("%s: step %d, %.0f s, saved; %s", path.stem, step, spent, evaluate(leaves))
            clock = saved = time.monotonic()
    return leaves


# ---- target ----------------------------------------------------------------------------------------------------------

TARGET = dict(
    architectures=["Qwen3_5ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=None,
    dtype="float32",
    eos_token_id=END,
    head_dim=64,
    hidden_act="silu",
    hidden_size=256,
    initializer_range=0.02,
    intermediate_size=384,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_value_head_dim=32,
    max_position_embeddings=4096,
    model_type="qwen3_5_text",
    num_attention_heads=4,
    num_hidden_layers=8,
    num_key_value_heads=2,
    pad_token_id=END,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    tie_word_embeddings=True,
    use_cache=True,
    vocab_size=VOCAB,
)
TARGET_BATCH, TARGET_LENGTH, TARGET_PEAK = 8, 256, 3e-3


def new_target() -> Network:
    """A target with random weights: outputs into the residual stream scaled down, decays between slow and fast."""
    config = TargetConfig.from_hf(TARGET)
    target = Target(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for layer in target.layers:
        mixer_out = layer.linear_attn.out_proj if layer.linear else layer.self_attn.o_proj
        for output in (mixer_out, layer.mlp.down_proj):
            output.weight[...] = output.weight[...] / math.sqrt(2 * config.num_layers)
        if layer.linear:
            heads = config.delta.num_value_heads
            step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), heads))
            layer.linear_attn.dt_bias[...] = jnp.asarray(step + np.log(-np.expm1(-step)), jnp.float32)
            layer.linear_attn.A_log[...] = jnp.log(jnp.asarray(rng.uniform(1, 16, heads), jnp.float32))
    return Network.of(target)


def target_loss_of(network: Network) -> LossOf:
    return lambda leaves, ids: (target_loss(network.spec.bind(leaves), ids), ())


def bits_per_byte(args: argparse.Namespace, loss_of: LossOf, leaves: Leaves, windows: int | None = None) -> float:
    """On held-out text, in windows of 256 tokens that start with no context. `loss_of` is jitted by the caller."""
    facts = json.loads((args.work / "data.json").read_text())["heldout"]
    ids = pack_windows(np.load(args.work / "heldout.npy"), TARGET_LENGTH + 1)[:windows]
    parts = [loss_of(leaves, ids[i : i + 8])[0] for i in range(0, len(ids) - 7, 8)]
    return float(np.mean(parts)) / math.log(2) / facts["bytes_per_token"]


def stage_target(args: argparse.Namespace) -> None:
    """Train the target and write its directory."""
    stream = np.load(args.work / "train.npy")
    network = new_target()
    loss_of = target_loss_of(network)
    measure = partial(bits_per_byte, args, jax.jit(loss_of))
    log.info("target: %d parameters", network.num_parameters)
    leaves = train(
        args.work / "target.npz",
        network.leaves,
        lambda step: batch_at(stream, step, batch=TARGET_BATCH, length=TARGET_LENGTH + 1),
        loss_of,
        minutes=args.minutes,
        peak=TARGET_PEAK,
        evaluate=lambda leaves: f"held-out bits per byte {measure(leaves, 32):.4f}",
    )
    log.info("target: done, held-out bits per byte %.4f", measure(leaves))


# ---- command line ----------------------------------------------------------------------------------------------------

STAGES = {"data": stage_data, "target": stage_target}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="make the embedded demo pair")
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, required=True, help="work directory, outside the repository")
    parser.add_argument("--docs", type=Path, default=Path("/usr/share/doc/python3.11/html/_sources"))
    parser.add_argument("--minutes", type=float, default=50.0, help="time for the target")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    args.work.mkdir(parents=True, exist_ok=True)
    handlers = [logging.StreamHandler(), logging.FileHandler(args.work / "train_demo.log")]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)
    for stage in STAGES if args.stage == "all" else [args.stage]:
        STAGES[stage](args)


if __name__ == "__main__":
    main()
