"""Text in and out: a Hugging Face tokenizer directory, its chat template, streaming of whole characters, stop ids."""

from __future__ import annotations

import codecs
import dataclasses
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from ddtree_jax.errors import InputError
from ddtree_jax.files import read_object_if_there, read_text

END_OF_TURN = "<|im_end|>"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The byte-level tokenizer of a Hugging Face directory.

    `special` holds the named special tokens (`eos_token`, `bos_token`, ...) that templates refer to; `hidden` the ids
    that `decode` leaves out when asked to skip special tokens.
    """

    backend: tokenizers.Tokenizer
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None
    hidden: frozenset[int] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        added = self.backend.get_added_tokens_decoder()
        object.__setattr__(self, "hidden", frozenset(i for i, token in added.items() if token.special))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja; the last two may be absent.

        Raises InputError for a missing or unreadable file, a tokenizer that is not byte-level, and added tokens whose
        ids differ between the two JSON files.
        """
        directory = Path(directory)
        backend = _read_backend(directory / "tokenizer.json")
        config = read_object_if_there(directory / "tokenizer_config.json")
        _check_added_tokens(backend, config, directory)
        special = {name: _content(value) for name, value in config.items() if name.endswith("_token") and value}
        special = {name: token for name, token in special.items() if token is not None}
        return cls(backend, special, _read_template(directory, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text: `eos_token` and the end of a chat turn, as far as this vocabulary has them."""
        ids = {self.token_id(token) for token in (self.special.get("eos_token"), END_OF_TURN) if token}
        return tuple(sorted(i for i in ids if i is not None))

    def token_id(self, token: str) -> int | None:
        """Id of one token by its exact spelling, None when the vocabulary lacks it."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it become their ids, as in Hugging Face.

        `add_special_tokens` adds what the tokenizer's post-processor adds: nothing for Qwen, a BOS for Llama. Raises
        InputError for text with lone surrogates, which no UTF-8 has.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode at character {error.start}") from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; none for an id outside the vocabulary."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_byte_alphabet()[c] for c in token)
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return token.encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; `variables` go to the template (`tools`, `enable_thinking`, ...).

        The text carries its own special tokens: encode it with `add_special_tokens=False`. Raises InputError when there
        is no template, a message has no role, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("this tokenizer has no chat template (chat_template.jinja); give a plain prompt instead")
        if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise InputError("messages must be a list of at least one object with a role")
        context = {"tools": None, "documents": None, **self.special, **variables}
        try:
            template = _compile_template(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **context)
        except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
            raise InputError(f"the chat template cannot be applied: {error}") from error


class IncrementalDecoder:
    """Turns ids into text as they come, whole characters only.

    All pieces together equal `tokenizer.decode` of all ids, however the ids were cut: each id costs its own bytes once,
    and at most three bytes of an unfinished character are held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        shown = (self._tokenizer.token_bytes(int(i)) for i in ids if int(i) not in self._hidden)
        return self._utf8.decode(b"".join(shown))

    def finish(self) -> str:
        """U+FFFD for a character left unfinished, else nothing; the decoder is then as new."""
        tail = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return tail


def stop_ids(
    generation_config: Mapping[str, Any] | None, config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Sorted union of every id that ends a text (algorithm.md section 9).

    Sources: `eos_token_id`, an integer or a list, of generation_config.json and of config.json, outer and
    `text_config`; the tokenizer's `eos_token` and <|im_end|>. Raises InputError for anything but ids there.
    """
    sources = (generation_config or {}, config, config.get("text_config") or {})
    ids = {i for source in sources for i in _id_list(source.get("eos_token_id"))}
    return tuple(sorted(ids.union(tokenizer.eos_ids if tokenizer else ())))


def _id_list(value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise InputError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return ids


# ---- reading the directory -------------------------------------------------------------------------------------------


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise InputError(f"{path} is not a tokenizer: {error}") from error
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        raise InputError(f"{path}: only byte-level tokenizers are supported, the decoder here is {backend.decoder}")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _content(value: Any) -> str | None:
    """Spelling of a token given as a string or as an AddedToken object."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _check_added_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], directory: Path) -> None:
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(key.isdecimal() for key in added):
        raise InputError(f"{directory}: added_tokens_decoder in tokenizer_config.json should map ids to tokens")
    declared = {int(i): _content(token) for i, token in added.items()}
    wrong = [f"{token!r} ({i})" for i, token in declared.items() if token is None or backend.token_to_id(token) != i]
    if wrong:
        raise InputError(f"{directory}: tokenizer.json lacks, or has elsewhere, the added tokens {', '.join(wrong)}")


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, whose entry is a text or a list of named templates."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str | None):
        raise InputError(f"{directory}: chat_template in tokenizer_config.json must be a text or a list of named ones")
    return template


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Byte by character: printable Latin-1 bytes are written as themselves, the others as U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


# ---- chat templates, by Hugging Face's conventions -------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=8)
def _compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML; prompts want the characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
