"""What PyTorch computes: logits, hidden states, module outputs and greedy tokens of the installed `transformers` class.

Imports torch, transformers, numpy and the standard library alone, so that this one file runs in another environment or
on another machine: `python reference.py CHECKPOINT OUT.npz`. `python -m convert compare` reads what it writes.

Arrays in the file, T tokens: input_ids int32 [T]; logits float32 [T, V]; hidden_00 (embeddings), hidden_01 (output of
layer 0), .., hidden_NN (after the final norm) float32 [T, H]; mixer_II and mlp_II, what layer II adds to the residual
stream, float32 [T, H]; greedy int32 [G] and greedy_margin float32 [G] (gap of the two best logits); meta, a JSON text.
"""

# pyright: reportMissingImports=false
# torch and transformers are imported where they are used: `--help`, and `compare` without --hf, do without them.

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SEED = 0
MOST_TOKENS = 1_000_000  # of an input or a continuation: more is a slip of the hand
Arrays = dict[str, np.ndarray]


class BadInput(Exception):
    """A mistake of the user's; the message is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `reference`."""
    parser.add_argument("source", metavar="SRC", help="Hugging Face checkpoint directory")
    parser.add_argument("out", metavar="OUT.npz", help="the file to write")
    add_input_arguments(parser)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default float32")
    parser.add_argument("--layers", metavar="0,4,8-11", help="layers to record (default: all)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Which tokens go in, and how many are continued: also options of `compare --hf`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ids", metavar="FILE.json", help="a list of token ids")
    what.add_argument("--prompt", metavar="TEXT", help="a text, for the checkpoint's tokenizer")
    what.add_argument("--random", type=int, metavar="N", help="N random token ids (default 64)")
    parser.add_argument("--greedy", type=int, default=16, metavar="N", help="tokens to continue with (default 16)")


def run(arguments: argparse.Namespace) -> int:
    """The command; returns the exit code: 0, or 2 after one line about a mistake in the input."""
    try:
        arrays = reference(arguments)
        write(Path(arguments.out), arrays)
    except BadInput as error:
        print(f"reference: error: {error}", file=sys.stderr)
        return 2
    meta = json.loads(str(arrays["meta"]))
    print(f"{arguments.out}: {meta['class']}, {meta['dtype']}, {len(arrays['input_ids'])} tokens, {len(arrays)} arrays")
    return 0


def reference(arguments: argparse.Namespace) -> Arrays:
    """Load the checkpoint and record it."""
    check_options(arguments)
    model = load(arguments.source, arguments.dtype, arguments.device)
    ids = read_ids(arguments, model.get_input_embeddings().num_embeddings)
    layers = parse_layers(arguments.layers, len(decoder_layers(model)))
    return record(model, ids, layers, arguments.greedy) | {"meta": np.array(json.dumps(describe(model, arguments)))}


def check_options(arguments: argparse.Namespace) -> None:
    """Raise BadInput for whatever can be told before a checkpoint is loaded, which takes minutes."""
    if not os.path.isdir(arguments.source):
        raise BadInput(f"{arguments.source} is not a directory; give a local Hugging Face checkpoint directory")
    if not 0 <= arguments.greedy <= MOST_TOKENS:
        raise BadInput(f"--greedy should be 0 to {MOST_TOKENS}")
    if arguments.random is not None and not 1 <= arguments.random <= MOST_TOKENS:
        raise BadInput(f"--random should be 1 to {MOST_TOKENS}")
    if arguments.ids is not None:
        read_id_file(arguments.ids)
    if arguments.layers is not None:
        layer_ranges(arguments.layers)
    check_destination(Path(arguments.out))
    check_device(arguments.device)


def check_destination(path: Path) -> None:
    """Raise BadInput where no file can be written."""
    if os.path.isdir(path):
        raise BadInput(f"{path} is a directory; name a file")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.open("wb").close()
        partial.unlink()
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from None


def check_device(name: str) -> None:
    """Raise BadInput where torch cannot compute on such a device."""
    torch = import_torch()
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError) as error:  # an assertion says that torch was built without CUDA
        raise BadInput(f"--device {name}: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """The beginning of what a foreign exception says."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."


def load(source: str | Path, dtype: str, device: str = "cpu") -> Any:
    """The causal language model of a checkpoint, with eager attention and experts. Refuses one whose weights it would
    have to make up. No pickle is loaded, and no code of the checkpoint's runs.
    """
    torch = import_torch()
    import transformers

    transformers.logging.set_verbosity_error()  # what is wrong is said once, by the exception below
    transformers.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model = model.to(device).eval()
    except Exception as error:  # a damaged file or setting fails anywhere in there, in any way
        raise BadInput(f"transformers cannot load {source}: {one_line(error)}") from None
    if bad := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise BadInput(f"transformers finds no fitting tensor for {len(bad)} parameters: {', '.join(bad[:6])}")
    return model


def import_torch() -> Any:
    """torch, with the reason why this needs it where it is absent."""
    try:
        import torch
    except ImportError:
        raise BadInput("torch is not installed here; run this file where torch and transformers are") from None
    return torch


def read_ids(arguments: argparse.Namespace, vocab: int) -> list[int]:
    """The token ids that the options name, all inside the vocabulary."""
    if arguments.ids is not None:
        ids = read_id_file(arguments.ids)
    elif arguments.prompt is not None:
        ids = tokenize(arguments.source, arguments.prompt)
    else:
        size = 64 if arguments.random is None else arguments.random
        ids = np.random.default_rng(SEED).integers(0, vocab, size).tolist()
    if not ids:
        raise BadInput("there are no token ids; give at least one")
    if outside := [i for i in ids if not 0 <= i < vocab]:
        raise BadInput(f"token ids outside the vocabulary of {vocab}: {outside[:5]}")
    return ids


def read_id_file(path: str) -> list[int]:
    """A JSON list of at least one whole number."""
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadInput(f"{path} should hold a list of token ids")
    if not ids:
        raise BadInput(f"{path} holds no token ids; give at least one")
    return ids


def tokenize(source: str, text: str) -> list[int]:
    """Token ids of a text."""
    import transformers

    try:
        options = dict(local_files_only=True, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # as in `load`
        raise BadInput(f"transformers cannot load a tokenizer: {one_line(error)}") from None
    return tokenizer(text)["input_ids"]


def parse_layers(text: str | None, count: int) -> list[int]:
    """'0,4,8-11' -> layer numbers, ascending; None is all of them."""
    if text is None:
        return list(range(count))
    ranges = layer_ranges(text)
    if outside := sorted({i for r in ranges for i in range(max(r.start, count), r.stop)[:5]}):
        raise BadInput(f"--layers {text}: the model has layers 0 to {count - 1}, not {outside}")
    return sorted({i for r in ranges for i in r})


def layer_ranges(text: str) -> list[range]:
    """The parts of '0,4,8-11', none of them empty."""
    ranges = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            ranges.append(range(int(first), int(last or first) + 1))
        except ValueError:
            raise BadInput(f"--layers {text}: {part!r} is no layer number or range") from None
        if not ranges[-1]:
            raise BadInput(f"--layers {text}: the range {part} is empty")
    return ranges


def record(model: Any, ids: Sequence[int], layers: Sequence[int], greedy: int) -> Arrays:
    """One pass over `ids`, and `greedy` further tokens; the arrays that the module's docstring lists, but meta."""
    torch = import_torch()
    tokens = torch.tensor([list(ids)], device=model.device)
    with torch.no_grad(), module_outputs(model, layers) as arrays:
        out = model(tokens, output_hidden_states=True, use_cache=False)
    last = len(out.hidden_states) - 1
    kept = {0, last, *layers, *(i + 1 for i in layers)}  # of each layer what goes in and what comes out
    hidden = {f"hidden_{i:02d}": to_numpy(x) for i, x in enumerate(out.hidden_states) if i in kept}
    arrays |= {"input_ids": np.array(ids, np.int32), "logits": to_numpy(out.logits)} | hidden
    return arrays | continuation(model, tokens, greedy)


@contextmanager
def module_outputs(model: Any, layers: Sequence[int]) -> Iterator[Arrays]:
    """A dictionary that fills, while a pass runs, with what the mixer and the feed-forward of each layer give out."""
    arrays: Arrays = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            arrays[name] = to_numpy(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = []
    for i in layers:
        layer = decoder_layers(model)[i]
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        handles += [mixer.register_forward_hook(keep(f"mixer_{i:02d}"))]
        handles += [layer.mlp.register_forward_hook(keep(f"mlp_{i:02d}"))]
    try:
        yield arrays
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(model: Any) -> Any:
    """The decoder's list of layers."""
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise BadInput(f"{type(model).__name__} has no list of decoder layers, so there is nothing to record")
    return layers


def to_numpy(tensor: Any) -> np.ndarray:
    """The first and only row of a batch, float32."""
    return tensor[0].detach().float().cpu().numpy()


def continuation(model: Any, tokens: Any, count: int) -> Arrays:
    """The `count` tokens that follow greedily, whatever they are, and how clear each choice was."""
    if count == 0:
        return {"greedy": np.zeros(0, np.int32), "greedy_margin": np.zeros(0, np.float32)}
    torch = import_torch()
    import transformers

    # the checkpoint's own settings may stop, sample or penalise: none of that belongs here
    model.generation_config = transformers.GenerationConfig()
    settings = transformers.GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
    best = torch.stack([step[0].float() for step in out.logits]).topk(2).values
    made = out.sequences[0, tokens.shape[1] :].cpu().numpy()
    return {"greedy": made.astype(np.int32), "greedy_margin": (best[:, 0] - best[:, 1]).cpu().numpy()}


def describe(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Where the numbers come from."""
    import transformers

    return {
        "source": str(arguments.source),
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "num_layers": len(decoder_layers(model)),
        "torch": str(import_torch().__version__),
        "transformers": transformers.__version__,
    }


def write(path: Path, arrays: Arrays) -> None:
    """Write the file in one step: a run that is stopped leaves none."""
    check_destination(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BadInput(f"{path} cannot be written: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a file of its own."""
    parser = argparse.ArgumentParser(prog="reference", description="Record what PyTorch computes for a checkpoint.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
