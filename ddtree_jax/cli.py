"""The command line: parse, call, print. jax is imported only once a command runs, so `--help` is immediate."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddtree_jax import __version__
from ddtree_jax.errors import InputError, report
from ddtree_jax.files import read_json

EXAMPLES = """examples:
  ddtree-jax generate --prompt "def quick_sort(items):" --stream
  ddtree-jax generate --target Qwen3.5-4B/ --drafter Qwen3.5-4B-DFlash/ --prompt "Why is the sky blue?" --tree-budget 64
  ddtree-jax generate --target DIR --drafter DIR --prompt-ids prompts.json --temperature 0.7 --seed 1 --json
  ddtree-jax demo
"""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help keeps the line breaks of its examples."""

    def __init__(self, **kwargs: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where the options are listed."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 after one line about a mistake in the input."""
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks is no reason to stop
    try:
        arguments.run(arguments)
        print(end="", flush=True)
    except InputError as error:
        return report("ddtree-jax", error)
    except BrokenPipeError:
        # whoever read our output has left: give what is still buffered, which Python flushes at exit, to nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    description = "Exact speculative decoding of Qwen hybrids with draft trees, in JAX."
    parser = OneLineParser(prog="ddtree-jax", description=description, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_demo(commands)
    _add_info(commands)
    _add_convert(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="continue prompts", description="Continue prompts.", epilog=EXAMPLES)
    parser.set_defaults(run=run_generate)
    _add_model_options(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to continue")
    what.add_argument("--prompt-ids", metavar="FILE.json", help="token ids: a list, or a list of lists for a batch")
    what.add_argument("--chat", action="store_true", help="a conversation: one message a line on standard input")
    _add_decode_options(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print text as it comes")
    output.add_argument("--json", action="store_true", help="print one JSON object (a list of them for a batch)")
    output.add_argument("--debug-round", action="store_true", help="show the first round: tree, scores, accepted path")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="DIR", help="Hugging Face directory of the target (default: the demo pair)")
    parser.add_argument("--drafter", metavar="DIR", help="Hugging Face directory of its DFlash drafter")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on an accelerator"
    )
    parser.add_argument("--keep-fp8", action="store_true", help="leave weights FP8 that are FP8 in the files")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="devices to split the model over (default 1)"
    )


def _add_decode_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--method",
        choices=("ar", "dflash", "ddtree"),
        help="plain, chain or tree; default ddtree where there is a drafter",
    )
    add("--tree-budget", type=int, default=16, metavar="N", help="drafted nodes a round (default 16)")
    add("--tree", choices=("best-first", "spine"), default="best-first", help="which nodes (default best-first)")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to add at most (default 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K best (0: off)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the nucleus of mass P (1: off)")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the best (0: off)")
    add("--seed", type=int, default=0, metavar="S", help="one seed, one text, whatever the method (default 0)")
    add("--couple", action="store_true", help="when sampling, draft with the target's noise: accepts more, same text")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="plain, chain and tree decoding side by side",
        description="The embedded pair decodes the same prompts by plain, chain and tree decoding.",
        epilog="example:\n  ddtree-jax demo --max-new-tokens 128",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens a prompt (default 128)")
    parser.add_argument("--tree-budget", type=int, default=8, metavar="N", help="drafted nodes a round (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and a table")
    parser.set_defaults(run=run_demo)


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="parameters, memory and what fits on a card",
        description="Parameters, memory for weights, KV and recurrent state, and the context that fits on a card.",
        epilog="examples:\n  ddtree-jax info Qwen3.5-27B\n  ddtree-jax info DIR --dtype float32 --json",
    )
    parser.add_argument("name", metavar="DIR|NAME", help="a Hugging Face directory, or a published target's name")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default %(default)s")
    parser.add_argument("--keep-fp8", action="store_true", help="count weights as FP8 that are FP8 in the directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_info)


def _add_convert(commands: Any) -> None:
    from convert import command

    parser = commands.add_parser(
        "convert",
        help="a Hugging Face checkpoint to Orbax",
        description=command.DESCRIPTION,
        epilog=command.EXAMPLES,
    )
    command.add_arguments(parser)
    parser.set_defaults(run=command.run_or_exit)


def run_generate(arguments: argparse.Namespace) -> None:
    """The command `generate`."""
    prompt_ids = None if arguments.prompt_ids is None else read_prompt_ids(arguments.prompt_ids)
    check(arguments, prompts=len(prompt_ids) if prompt_ids and is_batch(prompt_ids) else 1)
    model = load_model(arguments)
    options = decode_options(arguments, method="ddtree" if model.drafter else "ar")
    if arguments.chat:
        chat(model, options)
    elif arguments.debug_round:
        from ddtree_jax.debug import describe_round

        print(describe_round(model, **prompt_arguments(arguments, prompt_ids), **options))
    elif arguments.stream:
        stream_text(model, prompt_arguments(arguments, prompt_ids), options)
    else:
        print_results(arguments, model, prompt_ids, options)


def check(arguments: argparse.Namespace, prompts: int) -> None:
    """Refuse what can be refused before a model is loaded, which may take minutes."""
    from ddtree_jax.generation import Options

    if arguments.drafter and not arguments.target:
        raise InputError("--drafter needs --target; without both, the demo pair is used")
    if arguments.prompt == "" or prompts == 0:
        raise InputError("prompt 0 is empty; give at least one token")
    if arguments.chat and (arguments.json or arguments.debug_round):
        raise InputError("--chat streams its answers; --json and --debug-round take --prompt or --prompt-ids")
    if arguments.stream and prompts != 1:
        raise InputError(f"--stream takes one prompt, not a batch of {prompts}")
    Options(**decode_options(arguments, method="ar")).check(prompts)


def run_demo(arguments: argparse.Namespace) -> None:
    """The command `demo`."""
    from ddtree_jax.showcase import run

    run(arguments.max_new_tokens, arguments.tree_budget, as_json=arguments.json)


def run_info(arguments: argparse.Namespace) -> None:
    """The command `info`."""
    from ddtree_jax.info import describe

    print(describe(arguments.name, arguments.dtype, arguments.json, arguments.keep_fp8))


def load_model(arguments: argparse.Namespace) -> Any:
    """The model of the command's options."""
    import jax

    from ddtree_jax.loading import load

    dtype = arguments.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return load(
        arguments.target,
        arguments.drafter,
        dtype=dtype,
        keep_fp8=arguments.keep_fp8,
        tensor_parallel=arguments.tensor_parallel,
    )


def decode_options(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """Keyword arguments for `generate` and `stream`; `method` is what is used when the user chose none."""
    names = "tree_budget tree max_new_tokens temperature top_k top_p min_p seed couple".split()
    options = {name: getattr(arguments, name) for name in names}
    return options | {"method": arguments.method or method}


def read_prompt_ids(path: str) -> list[Any]:
    """A list of token ids, or a list of such lists, from a JSON file."""
    ids = read_json(Path(path))
    rows = ids if is_batch(ids) else [ids]
    if not all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows):
        raise InputError(f"{path} should hold a list of token ids, or a list of such lists")
    return ids


def is_batch(ids: Any) -> bool:
    """Whether a JSON value is a list of lists."""
    return isinstance(ids, list) and any(isinstance(row, list) for row in ids)


def prompt_arguments(arguments: argparse.Namespace, prompt_ids: list[Any] | None) -> dict[str, Any]:
    """`prompts` or `prompt_ids` for `generate` and `stream`."""
    if prompt_ids is None:
        return {"prompts": [arguments.prompt]}
    return {"prompt_ids": prompt_ids if is_batch(prompt_ids) else [prompt_ids]}


def print_results(
    arguments: argparse.Namespace, model: Any, prompt_ids: list[Any] | None, options: dict[str, Any]
) -> None:
    """Generate everything, then print it."""
    from tqdm import tqdm

    from ddtree_jax.generation import generate

    with tqdm(total=None, unit="token", disable=None, leave=False) as bar:

        def on_progress(done: int, most: int) -> None:
            bar.total = most
            bar.update(done - bar.n)

        results = generate(model, **prompt_arguments(arguments, prompt_ids), **options, on_progress=on_progress)
    if arguments.json:
        objects = [result.to_json() for result in results]
        print(json.dumps(objects if is_batch(prompt_ids) else objects[0]))
        return
    for result in results:
        print(result.output_ids if result.text is None else (arguments.prompt or "") + result.text)
        print(summary_line(result), file=sys.stderr)


def summary_line(result: Any) -> str:
    """One line of figures about a result."""
    return (
        f"[{result.completion_tokens} tokens, {result.finish_reason}; {result.rounds} rounds, mean acceptance length "
        f"{result.mean_acceptance_length:.2f}; {result.tokens_per_second:.1f} tokens/s; "
        f"prefill {result.prefill_seconds:.2f} s, decode {result.decode_seconds:.2f} s, "
        f"compile {result.compile_seconds:.2f} s]"
    )


def stream_text(model: Any, prompts: dict[str, Any], options: dict[str, Any]) -> str:
    """Print pieces of one prompt's text as they come; returns the whole."""
    from ddtree_jax.generation import stream

    if model.tokenizer is None:
        raise InputError("--stream needs a tokenizer.json in the target directory")
    pieces = []
    for piece in stream(model, **prompts, **options):
        pieces.append(piece.text)
        print(piece.text, end="", flush=True)
    print()
    return "".join(pieces)


def chat(model: Any, options: dict[str, Any]) -> None:
    """A conversation: every line of standard input is a message, every answer is streamed; ends with the input."""
    if model.tokenizer is None:
        raise InputError("--chat needs a tokenizer.json in the target directory")
    messages: list[dict[str, str]] = []
    while line := read_message():
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = model.tokenizer.encode(prompt, add_special_tokens=False)
        answer = stream_text(model, {"prompt_ids": [ids]}, options)
        messages.append({"role": "assistant", "content": answer})


def read_message() -> str:
    """The next line of standard input with its line break, '' at the end; on a terminal it is asked for."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError:
        raise InputError("standard input is not UTF-8 text") from None
