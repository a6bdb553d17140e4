"""Make the embedded demo pair: a small Qwen3.5-style target and its DFlash drafter, on CPython's library and manual.

    python scripts/train_demo.py all --work DIR [--docs DIR] [--minutes 50] [--drafter-minutes 25]

Stages, each resumable by running it again (finished parts are found in the work directory):
    data      corpus, byte-level BPE, train.npy and heldout.npy
    target    trains the target for --minutes of wall clock; checkpoints every five minutes
    generate  the target continues prompts cut from its training text: what the drafter learns from
    drafter   trains the drafter for --drafter-minutes on those continuations
    report    bits per byte and acceptance on held-out text
The pair is written to ddtree_jax/demo/{target,drafter} as Hugging Face directories.
"""

import argparse
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.flax import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1]))

from ddtree_jax import generate, load  # noqa: E402
from ddtree_jax.config import DrafterConfig, TargetConfig  # noqa: E402
from ddtree_jax.models import Drafter, Target  # noqa: E402
from ddtree_jax.models.network import Network, NetworkSpec  # noqa: E402
from ddtree_jax.train.data import batch_at, join_documents, pack_windows, sample_anchors  # noqa: E402
from ddtree_jax.train.losses import (  # noqa: E402
    DraftBatch,
    draft_labels,
    draft_logits,
    drafter_loss,
    leading_matches,
    target_loss,
)

DEMO = Path(__file__).parents[1] / "ddtree_jax" / "demo"
VOCAB = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
THINK = ("<think>", "</think>")
END, END_OF_TURN, MASK = 0, 2, 3
HELD_OUT_IN = 25
log = logging.getLogger("train_demo")

# ---- data ------------------------------------------------------------------------------------------------------------

# Words with one leading character, single digits, punctuation runs, line ends, indentation: code keeps its shape.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SKIPPED = re.compile(
    r"(^|/)(site-packages|test|tests|idle_test|lib2to3|encodings|pydoc_data|__pycache__)/|_sysconfigdata"
)


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
        facts[part] = {
            "files": len(chosen),
            "bytes": size,
            "tokens": len(stream),
            "bytes_per_token": size / len(stream),
        }
    (args.work / "data.json").write_text(json.dumps(facts, indent=1))
    log.info("data: %s", facts)


# ---- training --------------------------------------------------------------------------------------------------------

Leaves = tuple[jax.Array, ...]
LossOf = Callable[[Leaves, Any], tuple[jax.Array, Any]]
CHECKPOINT_SECONDS = 300
WARM_UP_STEPS = 30


def optimiser() -> optax.GradientTransformation:
    """Muon for inner matrices, AdamW for the rest, behind a clip; `train_step` applies the learning rate."""

    def inner(x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        is_inner = x.ndim == 2 and min(x.shape) >= 64 and max(x.shape) < VOCAB
        return optax.contrib.MuonDimensionNumbers() if is_inner else None

    muon = optax.contrib.muon(
        1.0,
        weight_decay=0.05,
        adam_b2=0.95,
        adam_learning_rate=1.0,
        consistent_rms=0.2,  # updates as large as Adam's, so one rate serves both
        muon_weight_dimension_numbers=lambda leaves: jax.tree.map(inner, leaves),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


@partial(jax.jit, static_argnames="loss_of", donate_argnums=(0, 1))
def train_step(leaves: Leaves, moments: optax.OptState, batch: Any, rate: jax.Array, *, loss_of: LossOf):
    """One update; returns weights, moments and (loss, figures)."""
    value, gradient = jax.value_and_grad(loss_of, has_aux=True)(leaves, batch)
    updates, moments = optimiser().update(gradient, moments, leaves)
    return jax.tree.map(lambda w, u: w + rate * u, leaves, updates), moments, value


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
        if step % 25 == 0:
            shares = " ".join(f"{x:.2f}" for x in np.ravel(figures))
            log.info("%s: step %d, %.0f s, rate %.2e, loss %.4f %s", path.stem, step, spent, rate, loss, shares)
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
    dtype="bfloat16",
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


TOKENIZER_CONFIG = dict(
    tokenizer_class="PreTrainedTokenizerFast",
    eos_token=SPECIALS[END],
    pad_token=SPECIALS[END],
    additional_special_tokens=list(SPECIALS[1:]),
    clean_up_tokenization_spaces=False,
    model_max_length=TARGET["max_position_embeddings"],
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
KEPT_FLOAT32 = re.compile(r"linear_attn\.(A_log|norm\.weight)$")  # as the published checkpoints do


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def stored_tensor(name: str, leaf: jax.Array) -> jax.Array:
    """A parameter as it lies on disk: bfloat16 but for the exceptions, the convolution as [C, 1, K]."""
    if name.endswith("conv1d.weight"):
        leaf = leaf.T[:, None, :]
    return leaf if KEPT_FLOAT32.search(name) else leaf.astype(jnp.bfloat16)


def write_weights(path: Path, network: Network, prefix: str) -> None:
    """All parameters under their Hugging Face names."""
    names = [".".join(map(str, place)) for place, _ in nnx.to_flat_state(network.spec.abstract()[1])]
    tensors = {prefix + name: stored_tensor(name, leaf) for name, leaf in zip(names, network.leaves, strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_target(directory: Path, tokenizer: Path, network: Network) -> None:
    """The target's Hugging Face directory."""
    write_weights(directory / "model.safetensors", network, "model.")
    write_json(directory / "config.json", TARGET)
    write_json(
        directory / "generation_config.json", dict(eos_token_id=[END, END_OF_TURN], pad_token_id=END, do_sample=False)
    )
    write_json(directory / "tokenizer_config.json", TOKENIZER_CONFIG)
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    log.info("target: written to %s", directory)


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
    write_target(args.out / "target", args.work / "tokenizer.json", Network(leaves, network.spec))
    log.info("target: done, held-out bits per byte %.4f", measure(leaves))


# ---- generate --------------------------------------------------------------------------------------------------------

GENERATE_BATCH, NEW_TOKENS, SEQUENCE = 64, 190, 256
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of consecutive batches: half of the text is greedy
HELD_OUT_TEMPERATURES = (0.0, 0.8)


def cut_prompts(stream: np.ndarray, rng: np.random.Generator, count: int) -> list[list[int]]:
    """Prompts of 32 to 64 tokens from random places of a stream."""
    sizes = rng.integers(32, 65, count)
    starts = rng.integers(0, len(stream) - 64, count)
    return [stream[a : a + n].astype(int).tolist() for a, n in zip(starts, sizes, strict=True)]


def generate_batch(model: Any, prompts: list[list[int]], temperature: float, seed: int) -> dict[str, np.ndarray]:
    """The model's own continuations: ids uint16 [B, SEQUENCE] right-padded, prompt and length int32 [B]."""
    results = generate(
        model,
        prompt_ids=prompts,
        method="ar",
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        seed=[seed * GENERATE_BATCH + row for row in range(len(prompts))],
    )
    ids = np.zeros((len(prompts), SEQUENCE), np.uint16)
    for row, result in zip(ids, results, strict=True):
        row[: len(result.output_ids)] = result.output_ids
    length = np.array([len(r.output_ids) for r in results], np.int32)
    return dict(ids=ids, prompt=np.array([len(p) for p in prompts], np.int32), length=length)


def make_generations(args: argparse.Namespace, part: str, temperatures: Iterator[float], seconds: float) -> None:
    """Write generated/{part}_NNN.npz until the temperatures or the seconds run out; files that exist count too."""
    stream, model = np.load(args.work / f"{part}.npy"), load(args.out / "target", dtype="float32")
    folder = args.work / "generated"
    folder.mkdir(exist_ok=True)
    spent = 0.0
    for number, temperature in enumerate(temperatures):
        if spent >= seconds:
            break
        path = folder / f"{part}_{number:03d}.npz"
        if not path.exists():
            began = time.monotonic()
            prompts = cut_prompts(stream, np.random.default_rng((number, len(part))), GENERATE_BATCH)
            made = generate_batch(model, prompts, temperature, number)
            unfinished = path.with_suffix(".part.npz")
            np.savez(unfinished, seconds=time.monotonic() - began, **made)
            os.replace(unfinished, path)
            tokens = int(np.sum(made["length"] - made["prompt"]))
            log.info("generate: %s, temperature %.1f, %d tokens", path.stem, temperature, tokens)
        spent += float(np.load(path)["seconds"])


def stage_generate(args: argparse.Namespace) -> None:
    """Continuations by the target as written: of held-out prompts to measure on, of training prompts to learn from."""
    make_generations(args, "heldout", iter(HELD_OUT_TEMPERATURES), math.inf)
    make_generations(args, "train", itertools.cycle(TEMPERATURES), args.generate_minutes * 60)


def read_generations(args: argparse.Namespace, pattern: str) -> dict[str, np.ndarray]:
    """All generated sequences of the files that match, with at least two generated tokens."""
    parts = [dict(np.load(path)) for path in sorted((args.work / "generated").glob(pattern))]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in ("ids", "prompt", "length")}
    long_enough = whole["length"] >= whole["prompt"] + 2
    return {name: rows[long_enough] for name, rows in whole.items()}


# ---- drafter ---------------------------------------------------------------------------------------------------------

BLOCK, TAPS = 8, (1, 4, 6)
DRAFTER = dict(
    architectures=["DFlashDraftModel"],
    attention_bias=False,
    attention_dropout=0.0,
    dflash_config=dict(block_size=BLOCK, mask_token_id=MASK, target_layer_ids=list(TAPS)),
    dtype="bfloat16",
    head_dim=64,
    hidden_act="silu",
    hidden_size=TARGET["hidden_size"],
    initializer_range=0.02,
    intermediate_size=512,
    layer_types=["sliding_attention", "full_attention"],
    max_position_embeddings=TARGET["max_position_embeddings"],
    max_window_layers=2,
    model_type="qwen3",
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    num_target_layers=TARGET["num_hidden_layers"],
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    sliding_window=64,
    tie_word_embeddings=False,
    use_cache=True,
    use_sliding_window=True,
    vocab_size=VOCAB,
)
DRAFTER_BATCH, ANCHORS, DRAFTER_PEAK = 8, 32, 3e-3
DraftInput = tuple[Network, np.ndarray, np.ndarray, np.ndarray]  # target, ids, length, anchors


def draft_batch(target: Target, ids: jax.Array, length: jax.Array, anchors: jax.Array) -> DraftBatch:
    """The target reads whole sequences; what it says of each position is the drafter's context."""
    _, features = target(ids, TAPS)
    return DraftBatch(ids, features, length, anchors)


def drafter_loss_of(spec: NetworkSpec) -> LossOf:
    def loss_of(leaves: Leaves, batch: DraftInput) -> tuple[jax.Array, jax.Array]:
        network, *rows = batch
        target = network.module()
        return drafter_loss(spec.bind(leaves), target, draft_batch(target, *rows))

    return loss_of


def draft_input(
    target: Network, rows: dict[str, np.ndarray], chosen: np.ndarray, rng: np.random.Generator
) -> DraftInput:
    """Chosen sequences with random anchors among the generated tokens, each with at least one label."""
    ids, prompt, length = (rows[name][chosen] for name in ("ids", "prompt", "length"))
    return target, ids.astype(np.int32), length, sample_anchors(rng, prompt, length - 1, ANCHORS)


@partial(jax.jit, static_argnames="spec")
def matches(leaves: Leaves, batch: DraftInput, spec: NetworkSpec) -> tuple[jax.Array, jax.Array]:
    """Leading matches of every block [B, A], and whether all its labels exist."""
    network, *rows = batch
    target = network.module()
    drafting = draft_batch(target, *rows)
    labels, there = draft_labels(drafting, BLOCK)
    drafted = jnp.argmax(draft_logits(spec.bind(leaves), target, drafting), axis=-1)
    return leading_matches(drafted, labels), jnp.all(there, axis=-1)


def chain_tau(drafter: Network, target: Network, rows: dict[str, np.ndarray]) -> float:
    """Mean acceptance length of a chain round, over random anchors of given (greedy) continuations."""
    rng, total, count = np.random.default_rng(0), 0, 0
    for first in range(0, len(rows["ids"]) - DRAFTER_BATCH + 1, DRAFTER_BATCH):
        chosen = np.arange(first, first + DRAFTER_BATCH)
        length, whole = matches(drafter.leaves, draft_input(target, rows, chosen, rng), drafter.spec)
        total, count = total + int(np.sum(length * whole)), count + int(np.sum(whole))
    return 1 + total / max(count, 1)


def stage_drafter(args: argparse.Namespace) -> None:
    """Train the drafter on the target's continuations and write its directory."""
    target = load(args.out / "target", dtype="float32").target
    network = Network.of(Drafter(DrafterConfig.from_hf(DRAFTER), rngs=nnx.Rngs(1)))
    rows, held_out = read_generations(args, "train_???.npz"), read_generations(args, "heldout_000.npz")
    log.info("drafter: %d parameters, %d sequences", network.num_parameters, len(rows["ids"]))

    def batches(step: int) -> DraftInput:
        per_epoch = len(rows["ids"]) // DRAFTER_BATCH
        order = np.random.default_rng((0, step // per_epoch)).permutation(len(rows["ids"]))
        chosen = order[step % per_epoch * DRAFTER_BATCH :][:DRAFTER_BATCH]
        return draft_input(target, rows, chosen, np.random.default_rng((1, step)))

    def evaluate(leaves: Leaves) -> str:
        return f"held-out chain tau {chain_tau(Network(leaves, network.spec), target, held_out):.3f}"

    leaves = train(
        args.work / "drafter.npz",
        network.leaves,
        batches,
        drafter_loss_of(network.spec),
        minutes=args.drafter_minutes,
        peak=DRAFTER_PEAK,
        evaluate=evaluate,
    )
    write_weights(args.out / "drafter" / "model.safetensors", Network(leaves, network.spec), "")
    write_json(args.out / "drafter" / "config.json", DRAFTER)
    log.info("drafter: written to %s", args.out / "drafter")


# ---- report ----------------------------------------------------------------------------------------------------------

REPORT_PROMPTS, REPORT_TOKENS = 16, 128


def decoded_tau(model: Any, prompts: list[list[int]], **options: Any) -> float:
    """Tokens per target pass of real decoding, over all prompts together."""
    results = generate(model, prompt_ids=prompts, max_new_tokens=REPORT_TOKENS, **options)
    return sum(r.completion_tokens - 1 for r in results) / sum(r.rounds for r in results)


def stage_report(args: argparse.Namespace) -> None:
    """Figures of the pair as written, to report.json in the work directory and beside the pair."""
    model = load(args.out / "target", args.out / "drafter", dtype="float32")
    stream = np.load(args.work / "heldout.npy")
    prompts = cut_prompts(stream, np.random.default_rng(7), REPORT_PROMPTS)
    rows = read_generations(args, "heldout_000.npz")
    report = dict(
        data=json.loads((args.work / "data.json").read_text()),
        target_parameters=model.target.num_parameters,
        drafter_parameters=model.drafter.num_parameters,
        bits_per_byte=bits_per_byte(args, jax.jit(target_loss_of(model.target)), model.target.leaves),
        tau_chain_teacher_forced=chain_tau(model.drafter, model.target, rows),
        tau_chain=decoded_tau(model, prompts, method="dflash"),
        tau_tree={budget: decoded_tau(model, prompts, method="ddtree", tree_budget=budget) for budget in (8, 16, 32)},
        tau_chain_sampled=decoded_tau(model, prompts, method="dflash", temperature=0.8),
        tau_tree_sampled=decoded_tau(model, prompts, method="ddtree", tree_budget=16, temperature=0.8),
    )
    write_json(args.work / "report.json", report)
    write_json(args.out / "report.json", report)
    log.info("report: %s", report)


# ---- command line ----------------------------------------------------------------------------------------------------

STAGES = {
    "data": stage_data,
    "target": stage_target,
    "generate": stage_generate,
    "drafter": stage_drafter,
    "report": stage_report,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="make the embedded demo pair")
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, required=True, help="work directory, outside the repository")
    parser.add_argument("--docs", type=Path, default=Path("/usr/share/doc/python3.11/html/_sources"))
    parser.add_argument("--minutes", type=float, default=50.0, help="time for the target")
    parser.add_argument("--generate-minutes", type=float, default=10.0)
    parser.add_argument("--drafter-minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path, default=DEMO, help="where target/ and drafter/ are written")
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
