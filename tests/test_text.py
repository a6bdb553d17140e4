"""Tokenizer directories, chat templates, streaming of whole characters, stop ids (cases.md E3, E4, F5)."""

import functools
import itertools
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.errors import InputError
from ddtree_jax.text import IncrementalDecoder, Tokenizer, stop_ids

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINKING = ["<think>", "</think>"]
MISPLACED = '{"added_tokens_decoder": {"1": {"content": "<|im_end|>"}}}'
MIXED = "ab 🎉 안녕하세요 漢字かな naïve 👩‍👩‍👧 Ω\n\tend"

# As Qwen3.5's template ends: the reasoning block is opened in the prompt, and closed there too when thinking is off.
OPENING_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'developer' %}
        {{- raise_exception('no developer here') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""


def small_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of a few merges, some of which join half a Hangul syllable to its neighbour."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([MIXED, "안녕 안경 안개", "the end of the end"] * 4, trainer)
    backend.add_tokens(THINKING)
    return backend


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A complete tokenizer directory: eos_token as an object, the template in a file of its own."""
    small_backend().save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<|endoftext|>", "special": True},
        "bos_token": None,
        "model_max_length": 100,
        "added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(OPENING_TEMPLATE)
    return tmp_path


@functools.cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(small_backend())


@pytest.fixture
def small() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="module")
def real(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """Loads a real vocabulary, as a directory, by its name in the shared material."""

    @functools.cache
    def load(name: str) -> Tokenizer:
        directory = tmp_path_factory.mktemp(name)
        packed = shared / "tokenizers" / f"{name}.tokenizer.json.xz"
        (directory / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
        config = shared / "tokenizers" / f"{name}.tokenizer_config.json"
        if config.is_file():
            (directory / "tokenizer_config.json").write_bytes(config.read_bytes())
        return Tokenizer.from_directory(directory)

    return load


def with_template(template: str, **special: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), special, template)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# ---- reading a directory ---------------------------------------------------------------------------------------------


def test_directory_is_read(directory: Path):
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.special == {"eos_token": "<|endoftext|>"}
    assert tokenizer.vocab_size == 302
    assert tokenizer.chat_template == OPENING_TEMPLATE
    assert tokenizer.eos_ids == (0, 2)


def test_template_file_wins_over_the_config(directory: Path):
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_directory(directory).chat_template == OPENING_TEMPLATE
    (directory / "chat_template.jinja").unlink()
    assert Tokenizer.from_directory(directory).chat_template == "d"


def test_tokenizer_json_alone_is_enough(directory: Path):
    (directory / "tokenizer_config.json").unlink()
    (directory / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_ids == (2,)
    with pytest.raises(InputError, match="no chat template"):
        tokenizer.apply_chat_template(user("hello"))


def test_truncation_in_the_file_is_ignored(directory: Path):
    backend = small_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(directory / "tokenizer.json"))
    ids = Tokenizer.from_directory(directory).encode("zqxjk")
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "does not exist"),
        ("tokenizer.json", '{"version": "1.0"', "is not a tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", MISPLACED, "has elsewhere.*im_end"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "should map ids to tokens"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "should map ids to tokens"),
    ],
)
def test_bad_directories_are_refused(directory: Path, name: str, content: str | None, message: str):
    (directory / name).unlink() if content is None else (directory / name).write_text(content)
    with pytest.raises(InputError, match=message):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("template", [5, {"default": "x"}, [{"name": "default", "template": 5}]])
def test_templates_of_another_type_are_refused(directory: Path, template: object):
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InputError, match="chat_template in tokenizer_config.json must be a text"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("template", [None, [], [{"name": "tool_use", "template": "t"}], ["x"]])
def test_no_default_template_is_none(directory: Path, template: object):
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert Tokenizer.from_directory(directory).chat_template is None


def test_only_byte_level_tokenizers(tmp_path: Path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="byte-level"):
        Tokenizer.from_directory(tmp_path)


# ---- encode and decode -----------------------------------------------------------------------------------------------


def test_round_trip(small: Tokenizer):
    assert small.decode(small.encode(MIXED)) == MIXED


def test_special_tokens_in_text_become_their_ids_and_are_skipped(small: Tokenizer):
    ids = small.encode("a<|im_end|><think>")
    assert ids[1:] == [2, small.token_id("<think>")]
    assert small.decode(ids) == "a<think>"
    assert small.decode(ids, skip_special_tokens=False) == "a<|im_end|><think>"


def test_post_processor_decides_about_a_bos():
    backend = small_backend()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("z")[0] == 1
    assert tokenizer.encode("z", add_special_tokens=False)[0] != 1


def test_ids_beyond_the_vocabulary_are_silent(small: Tokenizer):
    assert small.decode([small.vocab_size, *small.encode("z"), 10_000]) == "z"


def test_lone_surrogates_are_refused(small: Tokenizer):
    with pytest.raises(InputError, match="character 2"):
        small.encode("ab\ud83d")


# ---- streaming -------------------------------------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, chunks: list[list[int]], **options: bool) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, **options)
    return [*map(decoder.push, chunks), decoder.finish()]


def cuts(ids: list[int], places: tuple[bool, ...]) -> list[list[int]]:
    """Cut `ids` after position i where places[i]."""
    borders = [0, *(i + 1 for i, cut in enumerate(places) if cut), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


def test_every_chunking_of_emoji_and_hangul_gives_the_same_text(small: Tokenizer):
    text = "안x🎉힣🦊"
    ids = small.encode(text)
    assert 2 * len(text) <= len(ids) <= 12  # several tokens a character, and few enough to try every cut
    for places in itertools.product([False, True], repeat=len(ids) - 1):
        pieces = stream(small, cuts(ids, places))
        assert "".join(pieces) == text


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_long_text_in_chunks(small: Tokenizer, size: int):
    ids = small.encode(MIXED)
    assert "".join(stream(small, [ids[i : i + size] for i in range(0, len(ids), size)])) == MIXED


def test_characters_come_whole_and_at_once(small: Tokenizer):
    byte_ids = [small.token_id(c) for c in small.backend.pre_tokenizer.pre_tokenize_str("🎉")[0][0]]
    assert len(byte_ids) == 4
    assert stream(small, [[i] for i in byte_ids]) == ["", "", "", "🎉", ""]


def test_a_truncated_tail_is_flushed_once(small: Tokenizer):
    byte_ids = [small.token_id(c) for c in small.backend.pre_tokenizer.pre_tokenize_str("🎉")[0][0]]
    decoder = IncrementalDecoder(small)
    assert decoder.push(byte_ids[:3]) == ""
    assert decoder.finish() == "\ufffd" == small.decode(byte_ids[:3])
    assert decoder.finish() == ""
    assert decoder.push(byte_ids) == "🎉"


@settings(max_examples=300)
@given(st.lists(st.integers(0, 310), max_size=24), st.lists(st.booleans(), min_size=24, max_size=24), st.booleans())
def test_any_ids_in_any_chunks_equal_the_full_decode(ids: list[int], places: list[bool], skip: bool):
    tokenizer = small_tokenizer()
    pieces = stream(tokenizer, cuts(ids, tuple(places[: max(len(ids) - 1, 0)])), skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_each_id_is_looked_up_once(small: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    look_up = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: seen.append(i) or look_up(self, i))
    ids = small.encode(MIXED) * 20
    stream(small, [[i] for i in ids])
    assert seen == ids


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_real_vocabularies_stream(real: Callable[[str], Tokenizer], name: str):
    tokenizer = real(name)
    for text in (MIXED, "¿Qué tal? 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ 한국어 텍스트 🇰🇷🏳️‍🌈"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        for size in (1, 2, 3):
            assert "".join(stream(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])) == text
        for end in range(len(ids)):
            assert "".join(stream(tokenizer, [[i] for i in ids[:end]])) == tokenizer.decode(ids[:end])


@pytest.mark.parametrize(("name", "rows"), [("qwen3", 151_936), ("qwen3_5", 248_320)])
def test_any_ids_of_a_real_vocabulary_in_any_chunks(real: Callable[[str], Tokenizer], name: str, rows: int):
    """Random ids, up to the rows of the embedding; those that are parts of characters, and special ones, often."""
    tokenizer = real(name)
    parts = [i for i in range(20_000) if "\ufffd" in tokenizer.token_bytes(i).decode(errors="replace")]
    assert len(parts) > 150
    any_id = st.one_of(st.sampled_from(parts), st.sampled_from(sorted(tokenizer.hidden)), st.integers(0, rows - 1))
    chunks = st.lists(st.lists(any_id, max_size=5), max_size=8)

    @settings(max_examples=300)
    @given(chunks, st.booleans())
    def run(chunks: list[list[int]], skip: bool) -> None:
        whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
        assert "".join(stream(tokenizer, chunks, skip_special_tokens=skip)) == whole

    run()


@pytest.mark.parametrize(("name", "entries"), [("qwen3", 151_669), ("qwen3_5", 248_077)])
def test_every_id_of_a_real_vocabulary(real: Callable[[str], Tokenizer], name: str, entries: int):
    """All of them in a row, forwards and backwards: parts of characters that fit and that do not, cut everywhere."""
    tokenizer = real(name)
    assert tokenizer.vocab_size == entries
    for ids in (range(entries), range(entries - 1, -1, -1)):
        chunks = [list(ids[i : i + 97]) for i in range(0, entries, 97)]
        assert "".join(stream(tokenizer, chunks)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_characters_of_a_real_vocabulary_come_whole(real: Callable[[str], Tokenizer], name: str):
    """Rare characters are several tokens, none of which shows before the last; special tokens in between are silent."""
    tokenizer = real(name)
    for character in "🫎𓀀":
        ids = tokenizer.encode(character)
        assert len(ids) > 1, character
        assert stream(tokenizer, [[i] for i in ids]) == [""] * (len(ids) - 1) + [character, ""]
        end_of_turn = tokenizer.token_id("<|im_end|>")
        assert stream(tokenizer, [[i, end_of_turn] for i in ids])[-2:] == [character, ""]


def test_real_ids(real: Callable[[str], Tokenizer]):
    tokenizer = real("qwen3")
    assert tokenizer.encode("Hello, world!") == [9707, 11, 1879, 0]
    assert tokenizer.eos_ids == (151645,)
    assert real("qwen3_5").eos_ids == (248046,)


# ---- stop ids (cases.md E3) ------------------------------------------------------------------------------------------

EOS_IN_TOKENIZER = {"eos_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("generation", "config", "special", "expected"),
    [
        (None, {}, None, ()),
        ({"eos_token_id": 7}, {}, None, (7,)),
        ({"eos_token_id": [9, 7]}, {}, None, (7, 9)),
        ({}, {"eos_token_id": 8}, None, (8,)),
        (None, {"text_config": {"eos_token_id": [5]}, "eos_token_id": None}, None, (5,)),
        ({"eos_token_id": [9]}, {"eos_token_id": 8, "text_config": {"eos_token_id": [7, 9]}}, None, (7, 8, 9)),
        (None, {}, {}, (2,)),  # <|im_end|> ends a turn though nothing names it
        (None, {}, EOS_IN_TOKENIZER, (0, 2)),
        ({"eos_token_id": 248044}, {"text_config": {"eos_token_id": 248044}}, EOS_IN_TOKENIZER, (0, 2, 248044)),
    ],
)
def test_stop_ids_are_the_union(generation, config, special, expected):
    tokenizer = None if special is None else Tokenizer(small_backend(), special)
    assert stop_ids(generation, config, tokenizer) == expected


@pytest.mark.parametrize("value", ["2", -1, [1, None], True, 1.0, 2**31])
def test_stop_ids_must_be_ids(value):
    with pytest.raises(InputError, match="eos_token_id"):
        stop_ids({"eos_token_id": value}, {}, None)


# ---- chat templates (cases.md E4) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ({}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_reasoning_is_opened_in_the_prompt(directory: Path, flags: dict[str, bool], end: str):
    text = Tokenizer.from_directory(directory).apply_chat_template(user("hi"), **flags)
    assert text == "<|im_start|>user\nhi<|im_end|>\n" + end


@pytest.mark.parametrize(
    ("flags", "end"),
    [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")],
)
def test_qwen3_template(real: Callable[[str], Tokenizer], flags: dict[str, bool], end: str):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "안녕 <b>"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "Again"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n안녕 <b><|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert real("qwen3").apply_chat_template(messages, **flags) == expected + end


def test_qwen3_template_with_tools(real: Callable[[str], Tokenizer]):
    tool = {"type": "function", "function": {"name": "find", "description": "où <là>"}}
    text = real("qwen3").apply_chat_template(user("go"), tools=[tool])
    assert '<tools>\n{"type": "function", "function": {"name": "find", "description": "où <là>"}}\n</tools>' in text


def test_template_conventions():
    blocks = "{% if true %}\n    a\n    {% endif %}\nb{{ eos_token }}"  # trim_blocks and lstrip_blocks
    assert with_template(blocks, eos_token="E").apply_chat_template(user("x")) == "    a\nbE"
    sorted_json = "{{ messages[0] | tojson(indent=1, sort_keys=true) }}"
    assert with_template(sorted_json).apply_chat_template(user("é'<")) == '{\n "content": "é\'<",\n "role": "user"\n}'
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    assert with_template(loop).apply_chat_template(user("x") * 3) == "user"
    marked = "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    assert with_template(marked).apply_chat_template(user("x") * 2) == "<x><x>"
    year = with_template("{{ strftime_now('%Y') }}").apply_chat_template(user("x"))
    assert len(year) == 4 and year.isdigit()


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (OPENING_TEMPLATE, [{"role": "developer", "content": "x"}], "no developer here"),
        (OPENING_TEMPLATE, [{"role": "user", "content": None}], "cannot be applied"),
        (OPENING_TEMPLATE, [{"role": "user"}], "content"),
        (OPENING_TEMPLATE, [{"content": "x"}], "with a role"),
        (OPENING_TEMPLATE, [], "at least one"),
        ("{% if %}", user("x"), "cannot be applied"),
        ("{{ messages.append(1) }}", user("x"), "cannot be applied"),
        ("{{ 1 / 0 }}", user("x"), "cannot be applied: division by zero"),
        ("{{ messages[0].content.index('y') }}", user("x"), "cannot be applied: substring not found"),
        ("{{ ''.__class__.__mro__ }}", user("x"), "unsafe"),
    ],
)
def test_template_errors_are_the_users(template: str, messages: list[dict], message: str):
    with pytest.raises(InputError, match=message):
        with_template(template).apply_chat_template(messages)
