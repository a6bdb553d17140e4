"""A checkpoint's tensors -> the parameters of a module, strictly: every mismatch is reported, all at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from convert import fp8
from convert.checkpoint import Checkpoint, Directory, summary
from convert.recipes import Recipe, Shape, recipe, vocabulary_map
from ddtree_jax import parallel
from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models.network import Network, NetworkSpec
from ddtree_jax.models.quantised import SUFFIX, Quantised

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")  # first match wins
SKIPPED = ("mtp.", "model.visual.", "visual.")  # families that text decoding does not need
MASK = "t2d"  # of a drafter with its own head: which tokens of the target it covers, which d2t says too
EMBEDDING = "embed_tokens.weight"  # rows are looked up, not multiplied: never kept as FP8
LOG = logging.getLogger(__name__)

Config = TargetConfig | DrafterConfig
Problems = dict[str, list[str]]  # kind -> what is wrong


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module, and how it is made: what is read of each tensor, and what becomes of that."""

    name: str
    shape: Shape
    dtype: np.dtype
    recipe: Recipe
    read: Callable[[Checkpoint, str], np.ndarray] = Checkpoint.read

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """How the parameters of a module, in the order of `Network.leaves`, are made from a checkpoint.

    sources: tensor names by their names without prefix. problems: whatever keeps that from being possible; while there
    are any, nothing can be made.
    """

    checkpoint: Checkpoint
    spec: NetworkSpec
    parameters: tuple[Parameter, ...]
    sources: Mapping[str, str]
    problems: Problems

    def make(self, parameter: Parameter) -> np.ndarray:
        """A parameter in its dtype; perhaps a read-only view of the mapped file."""
        parts = (parameter.read(self.checkpoint, self.sources[name]) for name in parameter.recipe.tensors)
        return parameter.recipe.assemble(parts, parameter.shape, parameter.dtype)

    def dequantised(self) -> list[str]:
        """Parameters that are made of FP8 tensors and do not stay so."""
        stored = self.checkpoint.quantised()
        whole = (p for p in self.parameters if p.read is Checkpoint.read)
        return [p.name for p in whole if any(self.sources.get(tensor) in stored for tensor in p.recipe.tensors)]

    def check(self) -> None:
        """Raise InputError, all problems in one line, if there are any."""
        refuse(self.checkpoint, self.spec, self.problems)


def load_network(checkpoint: Checkpoint, spec: NetworkSpec, mesh: Mesh | None = None) -> Network:
    """Fill a network from a checkpoint; on a mesh, every device gets its part of each weight.

    Weights are cast to the dtype the module declares for them (the model's, or float32 where Hugging Face computes in
    float32). Raises InputError listing all missing, unknown and misshaped tensors, those that hold no floating point
    numbers, and FP8 tensors without scales; no parameter ever keeps an initial value.
    """
    made = plan(checkpoint, spec)
    made.check()
    if left_out := skipped(checkpoint, spec.config):
        LOG.info("%s: tensors left out: %s", checkpoint.directory, dict(left_out))
    places = parallel.shardings(spec.parameters(), spec.config, mesh)
    return Network(tuple(_on_device(made.make(one), places[one.name]) for one in made.parameters), spec, mesh)


def _on_device(parameter: np.ndarray, place: jax.sharding.Sharding) -> jax.Array:
    """A copy of a parameter, which outlives the mapped file; of each device's part only, where it is split."""
    return jax.make_array_from_callback(parameter.shape, place, lambda part: np.array(parameter[part]))


def plan(checkpoint: Checkpoint, spec: NetworkSpec) -> Plan:
    """Decide what is read for every parameter of a module; reads headers, and what has to be checked beyond them: a
    tied head, scales, the map of a draft vocabulary.
    """
    wanted = spec.parameters()
    tied = "embed_tokens.weight" in wanted and "lm_head.weight" not in wanted
    sources, problems = _sources(checkpoint, spec.config, tied)
    made = [
        Parameter(name, leaf.shape, np.dtype(leaf.dtype), _recipe(name, wanted, spec, sources), _reader(name, spec))
        for name, leaf in wanted.items()
    ]
    needed = {tensor: shape for one in made for tensor, shape in one.recipe.tensors.items()}
    whole = {name for one in made if one.dtype == np.int32 for name in one.recipe.tensors}
    found = [
        *problems,
        *_mismatches(checkpoint, needed, sources, whole),
        *_vocabulary_problems(checkpoint, spec.config),
    ]
    return Plan(checkpoint, spec, tuple(made), sources, grouped(found))


def keep_fp8(checkpoint: Checkpoint, spec: NetworkSpec) -> NetworkSpec:
    """The spec in which weights stay FP8 where the tensors are and blocks stay whole (`Recipe.keeps_blocks`)."""
    wanted, stored = spec.parameters(), checkpoint.quantised()
    sources, _ = _sources(checkpoint, spec.config, tied=False)

    def keeps(name: str) -> bool:
        made = _recipe(name, wanted, spec, sources)
        quantised = name != EMBEDDING and all(sources.get(tensor) in stored for tensor in made.tensors)
        return quantised and checkpoint.block is not None and made.keeps_blocks(wanted[name].shape, checkpoint.block)

    names = tuple(name for name in wanted if keeps(name))
    return replace(spec, fp8=Quantised(names, checkpoint.block)) if names and checkpoint.block else spec


def _recipe(
    name: str, wanted: Mapping[str, jax.ShapeDtypeStruct], spec: NetworkSpec, sources: Collection[str]
) -> Recipe:
    """A parameter's recipe; scales are put together as their weights are."""
    whole = name.removesuffix(SUFFIX)
    return recipe(whole, wanted[whole].shape, spec.config, sources)


def _reader(name: str, spec: NetworkSpec) -> Callable[[Checkpoint, str], np.ndarray]:
    """What a parameter takes of its tensors."""
    if name.endswith(SUFFIX):
        return Checkpoint.scales
    return Checkpoint.stored if spec.fp8 and name in spec.fp8.names else Checkpoint.read


def skipped(checkpoint: Checkpoint, config: Config) -> Counter[str]:
    """How many tensors of each family are left out on purpose."""
    families = (_family(name, config) for name in checkpoint.names())
    return Counter(family for family in families if family)


def _family(name: str, config: Config) -> str | None:
    """The family of a tensor that is left out, None for all others."""
    if name == MASK and _has_own_head(config):
        return MASK
    return next((family for family in SKIPPED if name.startswith(family)), None)


def _has_own_head(config: Config) -> TypeGuard[DrafterConfig]:
    return isinstance(config, DrafterConfig) and config.own_head


def refuse(source: Directory, spec: NetworkSpec, problems: Problems) -> None:
    """Raise InputError, all problems in one line, if there are any."""
    if problems:
        what = "".join(summary(kind, names) for kind, names in problems.items()).removesuffix("; ")
        raise InputError(f"{source.directory} does not fit {spec.module.__name__}: {what}")


def grouped(found: Iterable[tuple[str, str]]) -> Problems:
    """Pairs of a kind and a problem, by kind; kinds in the order of their first, problems sorted."""
    problems: Problems = {}
    for kind, what in found:
        problems.setdefault(kind, []).append(what)
    return {kind: sorted(what) for kind, what in problems.items()}


def mismatches(shapes: Mapping[str, Shape], found: Mapping[str, Shape]) -> Iterable[tuple[str, str]]:
    """Kind and name of what is needed and not found, found and not needed, or of another shape."""
    yield from (("missing", name) for name in shapes.keys() - found.keys())
    yield from (("unknown", name) for name in found.keys() - shapes.keys())
    for name in shapes.keys() & found.keys():
        if found[name] != shapes[name]:
            yield "shape", f"{name} is {list(found[name])}, should be {list(shapes[name])}"


def _mismatches(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], sources: Mapping[str, str], whole: Collection[str]
) -> Iterable[tuple[str, str]]:
    """Everything that keeps the tensors from being those that are needed; those in `whole` hold whole numbers."""
    quantisation = [(kind, what) for kind, what in checkpoint.problems() if not what.startswith(SKIPPED)]
    lone = {what for kind, what in quantisation if kind == fp8.LONE_SCALE}
    found = {name: checkpoint.shape(tensor) for name, tensor in sources.items() if tensor not in lone}
    yield from mismatches(shapes, found)
    for name in shapes.keys() & sources.keys():
        kind, wanted = checkpoint.dtype(sources[name]), jnp.integer if name in whole else jnp.floating
        if not jnp.issubdtype(kind, wanted):
            yield "not whole numbers" if name in whole else "not floating point", f"{name} is {kind}"
    yield from sorted(quantisation)


def _vocabulary_problems(checkpoint: Checkpoint, config: Config) -> Iterable[tuple[str, str]]:
    """What is wrong with the map of a reduced draft vocabulary, which may be in the file twice: d2t and t2d."""
    if not _has_own_head(config):
        return
    ids = np.arange(config.vocab_size)
    if "d2t" in checkpoint.names():
        if checkpoint.shape("d2t") != (config.draft_vocab_size,) or checkpoint.dtype("d2t").kind not in "iu":
            return  # which is a problem already
        ids = vocabulary_map(checkpoint.read("d2t"))
        if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) < len(ids):
            yield "draft vocabulary", f"d2t does not map one to one into the {config.vocab_size} tokens of the target"
            return
    if MASK in checkpoint.names():
        yield from _mask_problems(checkpoint, np.isin(np.arange(config.vocab_size), ids))


def _mask_problems(checkpoint: Checkpoint, covered: Bool[np.ndarray, " V"]) -> Iterable[tuple[str, str]]:
    """What is wrong with t2d, given the tokens that d2t maps to; without d2t those are all."""
    kind, shape = checkpoint.dtype(MASK), checkpoint.shape(MASK)
    if kind != np.bool_ or shape != covered.shape:
        yield "draft vocabulary", f"{MASK} is {kind} {list(shape)}, should be bool {list(covered.shape)}"
    elif not np.array_equal(checkpoint.read(MASK), covered):
        other = (
            "marks only some tokens, and there is no d2t" if covered.all() else "marks other tokens than d2t maps to"
        )
        yield "draft vocabulary", f"{MASK} {other}"


def _sources(checkpoint: Checkpoint, config: Config, tied: bool) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Module parameter name -> tensor name, with prefixes removed and skipped families left out; and problems."""
    sources: dict[str, str] = {}
    problems = []
    for name in checkpoint.names():
        if _family(name, config):
            continue
        short = next((name.removeprefix(p) for p in PREFIXES if name.startswith(p)), name)
        if short in sources:
            problems.append(("duplicate", f"{name} and {sources[short]} are the same parameter"))
        sources[short] = name
    if tied and "lm_head.weight" in sources and "embed_tokens.weight" in sources:
        problems += _tied_problem(checkpoint, sources.pop("lm_head.weight"), sources["embed_tokens.weight"])
    return sources, problems


def _tied_problem(checkpoint: Checkpoint, head: str, embedding: str) -> Collection[tuple[str, str]]:
    """A tied checkpoint may repeat its head, but not with other values: that would be a silent change of the model."""
    same_shape = checkpoint.shape(head) == checkpoint.shape(embedding)
    if same_shape and np.array_equal(checkpoint.read(head), checkpoint.read(embedding)):
        return ()
    what = f"tie_word_embeddings is true, but {head} differs from {embedding}; set it to false in config.json, or "
    return [("head", what + "remove the head")]
