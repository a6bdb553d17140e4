"""The command line as a user meets it: what it prints, and one line with exit code 2 for every mistake."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxtyping
import numpy as np
import pytest
from hf_directory import BYTES, SMALL_TARGET, VOCAB, edit_json, random_network, write_pair, write_target

import ddtree_jax
from ddtree_jax import loading, showcase
from ddtree_jax.cli import build_parser, decode_options, main
from ddtree_jax.decode.loop import decode_rounds
from ddtree_jax.generation import Options
from ddtree_jax.models.network import Network

FIELDS = {
    *("output_ids", "text", "finish_reason", "acceptance_lengths", "rounds", "prompt_tokens", "completion_tokens"),
    *("mean_acceptance_length", "acceptance_by_position", "mean_tree_nodes"),
    *("prefill_seconds", "decode_seconds", "compile_seconds", "tokens_per_second"),
}
LENGTH = ("--max-new-tokens", "12", "--tree-budget", "4")  # every test decodes by the same compiled programs
PROMPT = "naïve"


class Pair(NamedTuple):
    """Directories of a target and its drafter."""

    target: Path
    drafter: Path

    @property
    def options(self) -> tuple[str, ...]:
        return ("--target", str(self.target), "--drafter", str(self.drafter))


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Network, Network]:
    """The small pair on disk, and its networks."""
    directory = tmp_path_factory.mktemp("pair")
    return (Pair(directory / "target", directory / "drafter"), *write_pair(directory))


@pytest.fixture(scope="module")
def pair(written: tuple[Pair, Network, Network]) -> Pair:
    return written[0]


@pytest.fixture
def copy(pair: Pair, tmp_path: Path) -> Pair:
    """The pair once more, to be spoilt."""
    spoilt = Pair(tmp_path / "target", tmp_path / "drafter")
    for source, goal in zip(pair, spoilt, strict=True):
        shutil.copytree(source, goal)
    return spoilt


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command in this process."""

    def command(*arguments: str) -> Outcome:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse's way out
            code = int(str(error.code))
        return Outcome(code, *capsys.readouterr())

    return command


@pytest.fixture
def refused(run: Callable[..., Outcome]) -> Callable[..., str]:
    """Runs a command that has to be refused, and returns its one line."""

    def command(*arguments: str) -> str:
        outcome = run(*arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("ddtree-jax") and outcome.err.endswith("\n") and outcome.err.count("\n") == 1
        return outcome.err

    return command


@pytest.fixture
def ids_file(tmp_path: Path) -> Callable[[Any], str]:
    """Writes a JSON value to a file; returns its path."""

    def write(value: Any) -> str:
        (tmp_path / "ids.json").write_text(value if isinstance(value, str) else json.dumps(value))
        return str(tmp_path / "ids.json")

    return write


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python process with the project on its path."""
    root = Path(__file__).parents[1]
    return subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True, **options)


# ---- what it prints --------------------------------------------------------------------------------------------------


def test_what_was_written_is_loaded_bit_by_bit(written: tuple[Pair, Network, Network]):
    pair, target, drafter = written
    model = ddtree_jax.load(pair.target, pair.drafter, dtype="float32")
    for ours, theirs in ((model.target, target), (model.drafter, drafter)):
        assert ours.spec == theirs.spec
        for a, b in zip(ours.leaves, theirs.leaves, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert model.stop_ids == (0, 2)
    assert model.tokenizer.vocab_size == BYTES
    assert ddtree_jax.load(pair.target).drafter is None


def test_json_of_a_prompt(run: Callable[..., Outcome], pair: Pair):
    outcome = run("generate", *pair.options, "--prompt", PROMPT, *LENGTH, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    result = json.loads(outcome.out)
    assert result.keys() == FIELDS
    prompt = ddtree_jax.load(pair.target).tokenizer.encode(PROMPT)
    assert result["output_ids"][: len(prompt)] == prompt
    assert result["prompt_tokens"] == len(prompt) == 6  # one byte each, two for the ï
    assert result["completion_tokens"] == len(result["output_ids"]) - 6
    assert (result["finish_reason"], result["completion_tokens"]) in {("length", 12), *(("stop", n) for n in range(13))}
    assert len(result["acceptance_lengths"]) == result["rounds"]
    assert all(1 <= n <= 4 for n in result["acceptance_lengths"])  # block 4: at most 3 drafted nodes and the root
    assert result["mean_tree_nodes"] == 5.0
    assert all(result[f"{stage}_seconds"] >= 0 for stage in ("prefill", "decode", "compile"))


def test_a_batch_gives_a_list_and_a_flat_list_an_object(
    run: Callable[..., Outcome], pair: Pair, ids_file: Callable[[Any], str]
):
    def decode(value: Any, *options: str) -> Any:
        command = ("generate", *pair.options, "--prompt-ids", ids_file(value), *LENGTH, "--json")
        return json.loads(run(*command, *options).out)

    one = decode([5, 6, 7])
    assert one["output_ids"][:3] == [5, 6, 7]
    (single,) = decode([[5, 6, 7]])
    batch = decode([[5, 6, 7], [9]], "--method", "ar")
    assert [result["prompt_tokens"] for result in batch] == [3, 1]
    for result in (single, batch[0]):
        assert result["output_ids"] == one["output_ids"] and result.keys() == FIELDS


SAMPLED = ("--temperature", "1", "--top-k", "9", "--top-p", "0.95", "--min-p", "0.01", "--seed", "3")
OTHER_METHODS = (("--method", "dflash"), ("--tree", "spine"), ("--couple",))


@pytest.mark.parametrize(
    ("options", "methods"),
    [
        ((), (("--method", "ddtree"), ("--tree-budget", "0"))),
        pytest.param(SAMPLED, OTHER_METHODS, marks=pytest.mark.slow),
    ],
    ids=["greedy", "sampled"],
)
def test_every_method_prints_the_same_text(
    run: Callable[..., Outcome], pair: Pair, options: tuple[str, ...], methods: tuple[tuple[str, ...], ...]
):
    texts = set()
    for method in (("--method", "ar"), *methods):
        outcome = run("generate", *pair.options, "--prompt", PROMPT, *LENGTH, *options, *method)
        assert outcome.code == 0
        assert outcome.out.startswith(PROMPT)
        assert outcome.err.startswith("[") and outcome.err.count("\n") == 1 and "tokens/s" in outcome.err
        texts.add(outcome.out)
    assert len(texts) == 1


def test_every_option_reaches_generate():
    options = "--tree-budget 9 --tree spine --max-new-tokens 7 --method dflash --couple".split()
    parsed = build_parser().parse_args(["generate", "--prompt", "x", *options, *SAMPLED])
    assert decode_options(parsed, method="ar") == dict(
        method="dflash",
        tree_budget=9,
        tree="spine",
        max_new_tokens=7,
        temperature=1.0,
        top_k=9,
        top_p=0.95,
        min_p=0.01,
        seed=3,
        couple=True,
    )
    plain = decode_options(build_parser().parse_args(["generate", "--chat"]), method="ar")
    assert plain == {f.name: f.default for f in dataclasses.fields(Options) if f.name in plain} | {"method": "ar"}


def test_stream_prints_the_text_alone(run: Callable[..., Outcome], pair: Pair):
    command = ("generate", *pair.options, "--prompt", PROMPT, *LENGTH)
    text = json.loads(run(*command, "--json").out)["text"]
    assert run(*command, "--stream") == (0, text + "\n", "")
    assert run(*command).out == PROMPT + text + "\n"


def test_without_a_drafter_decoding_is_plain(run: Callable[..., Outcome], pair: Pair, refused: Callable[..., str]):
    command = ("generate", "--target", str(pair.target), "--prompt", PROMPT, *LENGTH)
    result = json.loads(run(*command, "--json").out)
    assert result["mean_tree_nodes"] == 1.0 and set(result["acceptance_lengths"]) == {1}
    with_drafter = json.loads(run("generate", *pair.options, "--prompt", PROMPT, *LENGTH, "--json").out)
    assert result["output_ids"] == with_drafter["output_ids"]
    assert "method 'ddtree' needs a drafter" in refused(*command, "--method", "ddtree")
    assert "method 'dflash' needs a drafter" in refused(*command, "--method", "dflash")


def test_without_a_tokenizer_there_are_only_ids(
    run: Callable[..., Outcome], refused: Callable[..., str], copy: Pair, ids_file: Callable[[Any], str]
):
    (copy.target / "tokenizer.json").unlink()
    command = ("generate", *copy.options, *LENGTH)
    assert "no tokenizer.json; give prompt_ids" in refused(*command, "--prompt", PROMPT)
    assert "--stream needs a tokenizer.json" in refused(*command, "--prompt-ids", ids_file([5]), "--stream")
    assert "--chat needs a tokenizer.json" in refused(*command, "--chat")
    result = json.loads(run(*command, "--prompt-ids", ids_file([5]), "--json").out)
    assert result["text"] is None
    assert run(*command, "--prompt-ids", ids_file([5])).out == f"{result['output_ids']}\n"


def test_an_empty_text_is_no_list_of_ids(run: Callable[..., Outcome], copy: Pair):
    edit_json(copy.target / "generation_config.json", eos_token_id=list(range(VOCAB)))  # whatever comes first ends it
    network = random_network(SMALL_TARGET, 0)
    leaves = [x * 0 if x.shape == (VOCAB, 48) else x for x in network.leaves]  # all logits 0: token 0, a special one
    write_target(copy.target, dataclasses.replace(network, leaves=tuple(leaves)))
    outcome = run("generate", *copy.options, "--prompt", PROMPT, *LENGTH)
    assert outcome.out == PROMPT + "\n"
    assert "[1 tokens, stop; 0 rounds" in outcome.err


def test_chat_answers_every_line(run: Callable[..., Outcome], pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("H\n\n  \nA"))
    outcome = run("generate", *pair.options, "--chat", *LENGTH, "--max-new-tokens", "3")
    assert (outcome.code, outcome.err) == (0, "")
    model = ddtree_jax.load(pair.target, pair.drafter, dtype="float32")
    messages, printed = [], ""
    for line in ("H", "A"):
        messages.append({"role": "user", "content": line})
        prompt = model.tokenizer.apply_chat_template(messages)
        (result,) = ddtree_jax.generate(model, [prompt], max_new_tokens=3, tree_budget=4)
        assert result.prompt_tokens <= 64  # one chunk of prefill, as everywhere here
        messages.append({"role": "assistant", "content": result.text})
        printed += result.text + "\n"
    assert outcome.out == printed


def test_debug_round_draws_a_tree(run: Callable[..., Outcome], pair: Pair):
    outcome = run("generate", *pair.options, "--debug-round", *LENGTH, "--prompt", PROMPT)
    assert (outcome.code, outcome.err) == (0, "")
    *tree, last = outcome.out.splitlines()
    assert len(tree) == 5  # the root and four nodes
    assert "of 5 nodes (root included); the target's tokens: " in last


def test_the_demo(run: Callable[..., Outcome], pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "DEMO", pair.target.parent)
    monkeypatch.setattr(showcase, "PROMPTS", (PROMPT, "x"))
    outcome = run("demo", *LENGTH)
    assert outcome.code == 0
    assert "The three texts are identical." in outcome.out
    assert outcome.out.count(f"--- {PROMPT} ...\n{PROMPT}") == 1
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("plain", "chain", "tree"))] == [
        "plain",
        "chain",
        "tree",
    ]
    report = json.loads(run("demo", *LENGTH, "--json").out)
    assert report["identical"] is True and len(report["texts"]) == 2
    assert report["methods"]["plain"]["mean_acceptance_length"] == 1.0
    assert report["methods"]["plain"]["target_passes_per_token"] == 1.0
    one = json.loads(run("demo", "--max-new-tokens", "1", "--tree-budget", "4", "--json").out)  # no round at all
    assert one["methods"]["tree"]["milliseconds_per_round"] == 0.0


def test_the_demo_pair_is_the_default(
    run: Callable[..., Outcome], refused: Callable[..., str], pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "DEMO", pair.target.parent)
    command = ("generate", "--prompt", PROMPT, *LENGTH)
    assert run(*command).out == run(*command, *pair.options).out
    monkeypatch.setattr(loading, "DEMO", pair.target / "nothing")
    assert "the demo pair is not installed" in refused(*command)
    assert "the demo pair is not installed" in refused("demo")


# ---- bad input: directories ------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def shard(directory: Path) -> None:
    """Call the weights a shard of an index that names another one, too."""
    shutil.move(directory / "model.safetensors", directory / "a.safetensors")
    weight_map = {"x": "b.safetensors", "y": "a.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def broken_index(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": 1}}')


def edit(name: str, **changes: Any) -> Callable[[Pair], None]:
    """Change keys of a config.json, "target" or "drafter"."""
    return lambda pair: edit_json(getattr(pair, name) / "config.json", **changes)


def taps(*ids: int) -> Callable[[Pair], None]:
    inner = {"block_size": 4, "mask_token_id": VOCAB - 1, "target_layer_ids": list(ids)}
    return edit("drafter", dflash_config=inner)


SPOILT: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "missing directory": (lambda p: shutil.rmtree(p.target), "target is not a directory"),
    "missing drafter": (lambda p: shutil.rmtree(p.drafter), "drafter is not a directory"),
    "no config": (lambda p: (p.target / "config.json").unlink(), "target has no config.json"),
    "no weights": (lambda p: (p.target / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "truncated": (lambda p: cut(p.target / "model.safetensors"), "model.safetensors is truncated"),
    "truncated drafter": (lambda p: cut(p.drafter / "model.safetensors"), "drafter/model.safetensors is truncated"),
    "empty weights": (lambda p: (p.target / "model.safetensors").write_text(""), "not a safetensors file or is trunc"),
    "missing shard": (lambda p: shard(p.target), "lacks 1 shard(s) named in its index: b.safetensors"),
    "broken index": (lambda p: broken_index(p.target), "should hold a weight_map"),
    "config is a list": (lambda p: (p.target / "config.json").write_text("[]"), "config.json must hold a JSON object"),
    "config is no JSON": (lambda p: (p.target / "config.json").write_text("{'a"), "config.json cannot be read as JSON"),
    "unknown architecture": (edit("target", model_type="mamba"), "unknown target architecture 'mamba'"),
    "no drafter": (edit("drafter", architectures=["X"]), "not a DFlash drafter: architectures is ['X']"),
    "other tensors": (edit("target", intermediate_size=32), "does not fit Target: shape: "),
    "tokenizer": (lambda p: (p.target / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer"),
    "stop ids": (lambda p: (p.target / "generation_config.json").write_text('{"eos_token_id": "x"}'), "eos_token_id"),
    "hidden size": (
        edit("drafter", hidden_size=32),
        "the drafter does not belong to this target: hidden size 32, the t",
    ),
    "vocabulary": (edit("drafter", vocab_size=300), "vocabulary 300, the target has 264"),
    "tap ids": (taps(0, 1), "tap layers [1] are outside 0..0"),
    "depth": (edit("drafter", num_target_layers=36), "made for 36 target layers, the target has 2"),
    "context": (edit("target", max_position_embeddings=6), "prompt 0 has 6 tokens; the model's context is 6"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_bad_directories(refused: Callable[..., str], copy: Pair, name: str):
    spoil, message = SPOILT[name]
    spoil(copy)
    assert message in refused("generate", *copy.options, "--prompt", PROMPT, *LENGTH)


def test_files_in_place_of_directories_and_swapped_directories(refused: Callable[..., str], pair: Pair):
    command = ("generate", "--prompt", "x", "--target")
    assert "config.json is not a directory" in refused(*command, str(pair.target / "config.json"))
    assert "is not a directory" in refused(*command, "Qwen/Qwen3.5-4B")
    assert "is not a directory" in refused(*command, "x" * 5000)
    assert "has no config.json" in refused(*command, "")
    assert "this is a DFlash drafter, not a target" in refused(*command, str(pair.drafter))
    assert "not a DFlash drafter" in refused(*command, str(pair.target), "--drafter", str(pair.target))


# ---- bad input: prompts and options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt 0 is empty"),
        ([[5], []], "prompt 1 is empty"),
        ([5, VOCAB], f"prompt 0 has ids outside the vocabulary of {VOCAB}: [{VOCAB}]"),
        ([[5], [-1]], "prompt 1 has ids outside the vocabulary"),
        ([10**30], "outside the vocabulary"),
        ([5] * 512, "prompt 0 has 512 tokens; the model's context is 512"),
        ([[1.5]], "should hold a list of token ids, or a list of such lists"),
        ([5, [6]], "should hold a list of token ids"),
        ([[[5]]], "should hold a list of token ids"),
        ([True], "should hold a list of token ids"),
        (["5"], "should hold a list of token ids"),
        ({"ids": [5]}, "should hold a list of token ids"),
        (5, "should hold a list of token ids"),
        ("[5,", "ids.json cannot be read as JSON"),
        ("[" * 100_000, "ids.json cannot be read as JSON"),
    ],
)
def test_bad_prompt_ids(
    refused: Callable[..., str], pair: Pair, ids_file: Callable[[Any], str], ids: Any, message: str
):
    assert message in refused("generate", *pair.options, "--prompt-ids", ids_file(ids), *LENGTH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tree-budget", "-1"), "tree budget should be between 0 and 4096"),
        (("--tree-budget", "4097"), "tree budget should be between 0 and 4096"),
        (("--tree-budget", "many"), "argument --tree-budget: invalid int value: 'many'"),
        (("--max-new-tokens", "0"), "max_new_tokens should be at least 1"),
        (("--temperature", "nan"), "temperature should be 0 (greedy) or between"),
        (("--temperature", "inf"), "temperature should be"),
        (("--temperature", "-1"), "temperature should be"),
        (("--temperature", "1e-40"), "temperature should be"),
        (("--temperature", "-inf"), "argument --temperature: expected one argument"),
        (("--top-k", "-1"), "top_k should be 0 (off) or more"),
        (("--top-k", str(2**31)), "top_k should be"),
        (("--top-p", "0"), "top_p should be above 0 and at most 1"),
        (("--top-p", "nan"), "top_p should be"),
        (("--min-p", "1.5"), "min_p should be between 0 and 1"),
        (("--seed", "-1"), "seed should be between 0 and 2**32 - 1"),
        (("--seed", str(2**32)), "seed should be"),
        (("--method", "magic"), "argument --method: invalid choice: 'magic'"),
        (("--dtype", "float64"), "argument --dtype: invalid choice"),
        (("--stream", "--json"), "not allowed with"),
        (("--speed", "9"), "unrecognized arguments: --speed 9"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    assert message in refused("generate", "--prompt", "x", *options)


def test_options_that_do_not_go_together(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, ids_file: Callable[[Any], str]
):
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    assert "--drafter needs --target" in refused("generate", "--drafter", "d", "--prompt", "x")
    assert "--stream takes one prompt, not a batch of 2" in refused(
        "generate", "--prompt-ids", ids_file([[1], [2]]), "--stream"
    )
    for output in ("--json", "--debug-round"):
        assert "--chat streams its answers" in refused("generate", "--chat", output)
    assert "one of the arguments --prompt --prompt-ids --chat is required" in refused("generate")
    assert "not allowed with" in refused("generate", "--prompt", "x", "--chat")
    assert "arguments are required: COMMAND" in refused()
    assert "invalid choice: 'generat'" in refused("generat")
    assert "max_new_tokens should be at least 1" in refused("generate", "--prompt", "x", "--max-new-tokens", "0")
    assert "nowhere.json does not exist" in refused("generate", "--prompt-ids", "nowhere.json")
    assert "cannot be read: Is a directory" in refused("generate", "--prompt-ids", ".")


def test_bad_texts(refused: Callable[..., str], pair: Pair):
    command = ("generate", *pair.options, *LENGTH, "--prompt")
    assert "prompt 0 is empty" in refused(*command, "")
    assert "the text is not valid Unicode at character 1" in refused(*command, "a\udcff")  # as Python reads raw bytes
    assert "prompt 0 has 600 tokens; the model's context is 512" in refused(*command, "x" * 600)


def test_bad_chats(refused: Callable[..., str], copy: Pair, monkeypatch: pytest.MonkeyPatch):
    command = ("generate", *copy.options, *LENGTH, "--chat")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert "standard input is not UTF-8 text" in refused(*command)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600))
    assert "the model's context is 512" in refused(*command)
    (copy.target / "chat_template.jinja").write_text("{{ raise_exception('two\nlines') }}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert "the chat template cannot be applied: two lines" in refused(*command)
    (copy.target / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja cannot be read" in refused(*command)
    (copy.target / "chat_template.jinja").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert "this tokenizer has no chat template" in refused(*command)


# ---- bad input: the Python interface ---------------------------------------------------------------------------------


@pytest.fixture
def as_users_call_it() -> Iterator[None]:
    """Without the type checks of these tests, which would refuse wrong types first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("as_users_call_it")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either prompts or prompt_ids"),
        ({"prompts": ["x"], "prompt_ids": [[5]]}, "give either prompts or prompt_ids"),
        ({"prompts": "x"}, "prompts should be a list of strings"),
        ({"prompts": [["x"]]}, "prompts should be a list of strings"),
        ({"prompts": []}, "there is no prompt"),
        ({"prompt_ids": []}, "there is no prompt"),
        ({"prompt_ids": [5, 6]}, "prompt 0 should be a list of token ids"),
        ({"prompt_ids": [[5], ["6"]]}, "prompt 1 should be a list of token ids"),
        ({"prompt_ids": [[5.0]]}, "prompt 0 should be a list of token ids"),
        ({"prompt_ids": [[5]], "method": "tree"}, "method 'tree' is unknown; use one of ar, dflash, ddtree"),
        ({"prompt_ids": [[5]], "tree": "chain"}, "tree 'chain' is unknown; use one of best-first, spine"),
        ({"prompt_ids": [[5]], "tree_budget": [4, 4]}, "tree_budget has 2 entries for 1 prompts"),
        ({"prompt_ids": [[5]], "tree_budget": 4.5}, "tree_budget should be a whole number"),
        ({"prompt_ids": [[5]], "seed": [None]}, "seed should be a whole number"),
        ({"prompt_ids": [[5], [6]], "seed": [1, -1]}, "seed should be between"),
        ({"prompt_ids": [[5]], "stop_ids": [-1]}, "stop_ids should be token ids"),
    ],
)
def test_bad_arguments_of_generate_and_stream(pair: Pair, arguments: dict[str, Any], message: str):
    model = ddtree_jax.load(pair.target, pair.drafter, dtype="float32")
    for function in (ddtree_jax.generate, ddtree_jax.stream):  # stream too refuses when it is called, not when read
        with pytest.raises(ddtree_jax.InputError, match=message):
            function(model, **arguments)


@pytest.mark.usefixtures("as_users_call_it")
def test_any_kind_of_integers_will_do(pair: Pair):
    model = ddtree_jax.load(pair.target, pair.drafter, dtype="float32")
    options: dict[str, Any] = dict(max_new_tokens=12, tree_budget=np.int64(4))
    (ours,) = ddtree_jax.generate(model, prompt_ids=np.array([[5, 6, 7]]), seed=np.array([0]), **options)
    (theirs,) = ddtree_jax.generate(model, prompt_ids=[[5, 6, 7]], max_new_tokens=12, tree_budget=4)
    assert ours.output_ids == theirs.output_ids


def test_the_number_of_stop_ids_compiles_nothing_anew(pair: Pair):
    model = ddtree_jax.load(pair.target, pair.drafter, dtype="float32")
    options: dict[str, Any] = dict(prompt_ids=[[5, 6, 7]], max_new_tokens=12, tree_budget=4)
    (whole,) = ddtree_jax.generate(model, stop_ids=[], **options)
    compiled = decode_rounds._cache_size()
    fifth = whole.output_ids[3 + 4]
    (cut,) = ddtree_jax.generate(model, stop_ids=[VOCAB, fifth, VOCAB + 1], **options)
    end = whole.output_ids.index(fifth, 3) + 1
    assert (cut.output_ids, cut.finish_reason) == (whole.output_ids[:end], "stop")
    assert decode_rounds._cache_size() == compiled


def test_a_dtype_of_load_is_checked(pair: Pair):
    with pytest.raises(ddtree_jax.InputError, match="dtype 'float16' is unknown; use one of bfloat16, float32"):
        ddtree_jax.load(pair.target, dtype="float16")


# ---- as processes ----------------------------------------------------------------------------------------------------


def test_a_mistake_is_one_line_of_a_process(pair: Pair):
    done = python("-m", "ddtree_jax", "generate", *pair.options, "--prompt", "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ddtree-jax: error: prompt 0 is empty; give at least one token\n"


@pytest.mark.slow
def test_a_process_generates(run: Callable[..., Outcome], pair: Pair):
    command = ("generate", *pair.options, "--prompt", PROMPT, *LENGTH)
    done = python("-m", "ddtree_jax", *command, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, run(*command).out)
    assert done.stderr.startswith("[") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [(), ("generate",), ("demo",)], ids=["all", "generate", "demo"])
def test_help_has_an_example(run: Callable[..., Outcome], command: tuple[str, ...]):
    outcome = run(*command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "\n  ddtree-jax " + (command[0] if command else "demo") in outcome.out.split("example")[1]
    assert run("--version").out == ddtree_jax.__version__ + "\n"


IMPORTS = """
import sys
import ddtree_jax
from ddtree_jax.cli import main
for command in ([], ["generate"], ["demo"]):
    try:
        main([*command, "--help"])
    except SystemExit as error:
        assert error.code == 0
heavy = {"jax", "flax", "numpy", "tokenizers", "jinja2"} & sys.modules.keys()
assert not heavy, heavy
ddtree_jax.InputError, ddtree_jax.__version__
assert not {"jax"} & sys.modules.keys()
assert callable(ddtree_jax.load) and "jax" in sys.modules
"""


def test_importing_the_package_and_asking_for_help_import_no_jax():
    done = python("-c", IMPORTS)
    assert (done.returncode, done.stderr) == (0, "")


PRINTS = "import sys\nfrom ddtree_jax import cli\ncli.run_demo = lambda _: print({text})\nsys.exit(cli.main(['demo']))"


def test_a_reader_who_leaves_is_no_fault():
    code = PRINTS.format(text="'x' * 1000000")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_a_terminal_without_the_character_gets_a_question_mark():
    done = python("-c", PRINTS.format(text="'na\\u00efve'"), env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "na?ve\n", "")
