"""Sizes without allocation: literal figures of published models, and what fits."""

import json

import pytest
from random_checkpoint import DENSE, random_tensors, write

from ddtree_jax.cli import main
from ddtree_jax.errors import InputError
from ddtree_jax.info import describe, memory
from ddtree_jax.sizes import SIZES, published


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-4B", 4.022), ("Qwen3-8B", 8.191), ("Llama-3.1-8B", 8.030), ("Qwen3-Coder-30B-A3B", 30.532)],
)
def test_parameters_are_those_that_the_names_promise(name, billions):
    assert memory(published(name)).parameters / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_every_published_size_has_shapes(name):
    sizes = memory(published(name))
    assert sizes.parameters > 0
    # float32 only for gates, decay and the gated norm: under a thousandth
    assert sizes.weights == pytest.approx(2 * sizes.parameters, rel=1e-3)


def test_memory_of_the_4b_hybrid():
    sizes = memory(published("Qwen3.5-4B"))
    # 8 full layers x 2 x 4 heads x 256 x 2 bytes; 24 delta layers of 32 heads x 128 x 128 x 4 bytes and 3 rows of 8192
    assert sizes.kv_per_token == 32768
    assert sizes.state_per_sequence == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert sizes.tokens_on(24) == (21_600_000_000 - sizes.weights - sizes.state_per_sequence) // 32768
    assert sizes.tokens_on(8) == 0
    assert sizes.tokens_on(24, sequences=2) < sizes.tokens_on(24) // 2


def test_command_prints_a_report_and_json(capsys):
    assert main(["info", "qwen3-8b"]) == 0
    assert "8.191 billion" in capsys.readouterr().out
    assert main(["info", "Qwen3-8B", "--json", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == 4 * report["parameters"]
    assert report["context_that_fits"]["141 GB"] == 40960  # the model's own context is the limit


def test_a_directory_may_hold_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert json.loads(describe(str(tmp_path), "float32", as_json=True))["parameters"] > 0


def test_directories_that_are_refused(tmp_path):
    (tmp_path / "outside.json").write_text(json.dumps(DENSE))
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="a has no config.json"):
        describe(str(tmp_path / "a"), "float32", as_json=False)
    (tmp_path / "a" / "config.json").symlink_to("../outside.json")
    with pytest.raises(InputError, match="config.json leaves the directory"):
        describe(str(tmp_path / "a"), "float32", as_json=False)
    for name in ("", "x" * 5000):
        with pytest.raises(InputError, match="is neither a directory nor one of"):
            describe(name, "float32", as_json=False)


def test_keeping_fp8_needs_something_to_keep(tmp_path):
    write(tmp_path, DENSE, random_tensors(DENSE))
    for name in (str(tmp_path), "Qwen3-8B"):
        with pytest.raises(InputError, match="has no FP8 weights that could be kept; leave out --keep-fp8"):
            describe(name, "bfloat16", as_json=False, keep_fp8=True)


def test_unknown_name_is_one_line(capsys):
    assert main(["info", "Qwen9"]) == 2
    assert "'Qwen9' is neither a directory nor one of Qwen3.5-0.8B" in capsys.readouterr().err
    with pytest.raises(InputError):
        published("Qwen9")
