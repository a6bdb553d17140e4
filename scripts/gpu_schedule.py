"""What a compiled GPU program does, read from its texts: kernel launches, loops, copies of caches, sorts, host
transfers, registers. Nothing here needs JAX or a GPU.

XLA's optimised HLO is scheduled: every instruction of a computation that is not fused, except those that only name a
buffer, is one launch. A loop with a known trip count runs its body that many times; the loop over rounds has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

FREE = {  # they name buffers and launch nothing
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
FREE |= {"async-done", "async-update", "copy-done"}  # their start is counted
MOVES = {"concatenate", "convert", "copy", "copy-start", "pad", "reshape", "transpose"}
IN_PLACE = {"dynamic-update-slice", "scatter"}  # a fusion with such a root writes into its operand
TO_HOST = {"infeed", "outfeed", "recv", "send"}
HOST_CALL = re.compile(r"callback|host|pure_python", re.IGNORECASE)
WIDTHS = {"pred": 1, "s4": 1, "u4": 1, "bf16": 2, "c64": 8, "c128": 16}
LARGE = 1 << 20  # bytes from which on a move is listed
WIDE = 1 << 14  # entries from which on a sorted dimension counts as a whole vocabulary


@dataclass(frozen=True)
class Array:
    """An array type in HLO."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        digits = re.search(r"\d+", self.dtype)
        width = WIDTHS.get(self.dtype) or (max(int(digits[0]) // 8, 1) if digits else 0)
        return width * math.prod(self.shape)

    @property
    def sides(self) -> tuple[int, ...]:
        """The dimensions over 1 without their order, which a transpose does not change."""
        return tuple(sorted(n for n in self.shape if n > 1))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    text: str
    root: bool

    def called(self, role: str) -> list[str]:
        """Names of the computations it calls as `role` (body, condition, calls, to_apply, branch_computations)."""
        match = re.search(role + r"=(\{[^}]*\}|%?[\w.\-]+)", self.text)
        return re.findall(r"%?([\w.\-]+)", match[1]) if match else []

    @property
    def trips(self) -> int | None:
        """How often a loop runs, where the compiler knows."""
        match = re.search(r'known_trip_count"?:\{"n":"(\d+)"', self.text)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class Program:
    """The computations of an optimised HLO module."""

    computations: Mapping[str, list[Instruction]]
    entry: str

    def runs(self, name: str) -> Iterator[Instruction]:
        """The instructions that run in a computation and in what it calls, each once; fused ones are not listed."""
        for instruction in self.computations[name]:
            yield instruction
            if instruction.opcode not in ("fusion", "custom-call", "reduce", "sort", "scatter", "reduce-window"):
                for callee in self.callees(instruction):
                    yield from self.runs(callee)

    def callees(self, instruction: Instruction) -> list[str]:
        """Every computation that an instruction refers to."""
        roles = ("condition", "body", "calls", "to_apply", "branch_computations", "true_computation")
        names = (name for role in (*roles, "false_computation") for name in instruction.called(role))
        return [name for name in names if name in self.computations]

    def roots(self, instruction: Instruction) -> list[Instruction]:
        """What an instruction's results are: a fusion's are the roots of its computation, behind bitcasts."""
        if instruction.opcode != "fusion":
            return [instruction]
        body = self.computations[instruction.called("calls")[0]]
        named = {i.name: i for i in body}
        root = next(i for i in body if i.root)
        chosen = [named[name] for name in operands(root)] if root.opcode == "tuple" else [root]
        return [_behind_bitcasts(i, named) for i in chosen]

    def only_moves(self, instruction: Instruction) -> bool:
        """Whether an instruction computes nothing: a copy, cast or concatenation, alone or as a fusion."""
        if instruction.opcode != "fusion":
            return instruction.opcode in MOVES
        opcodes = {i.opcode for i in self.computations[instruction.called("calls")[0]]} - FREE - {"slice"}
        return bool(opcodes) and opcodes <= MOVES


@dataclass(frozen=True)
class Schedule:
    """What one round (or one call of a program without a loop over rounds) launches.

    launches: kernels and copies, inner loops counted as often as they run.
    loops: inner loops with a known trip count, which the host queues without looking. host_loops: the others, the loop
      over rounds included; each reads its condition back. branches: conditionals.
    cache_copies: results with the shape of a key or value cache that are not written in place; state_copies: copies of
      recurrent states. host_transfers: infeeds, callbacks, ...
    sorts: sorts over a whole vocabulary. moves: MiB of other copies, casts and concatenations of 1 MiB or more.
    """

    launches: int
    loops: int
    host_loops: int
    branches: int
    cache_copies: int
    state_copies: int
    host_transfers: int
    sorts: int
    moves: float
    details: dict[str, list[str]] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Read the text of an optimised module."""
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            body = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            body = None
        elif body is not None and (instruction := _instruction(line)):
            body.append(instruction)
    if not entry:
        raise ValueError("no ENTRY computation: this is no HLO module")
    return Program(computations, entry)


def schedule(program: Program, caches: Collection[Array] = ()) -> Schedule:
    """Count what a round launches: the body of the entry's loop, or the whole entry where there is none."""
    loops = [i for i in program.computations[program.entry] if i.opcode == "while" and i.trips is None]
    names = [program.entry] if not loops else [loops[0].called("body")[0], loops[0].called("condition")[0]]
    inside = [i for name in names for i in program.runs(name)]
    everything = [i for body in program.computations.values() for i in body]
    kept, states = ([c for c in caches if (c.dtype == "f32") is recurrent] for recurrent in (False, True))
    found = {
        "cache copies": [i for i in inside if _copies(program, i, kept) or _makes(program, i, kept)],
        "state copies": [i for i in inside if _copies(program, i, states)],
        "host transfers": [i for i in inside if _leaves_device(i)],
        "sorts": [i for i in everything if i.opcode == "sort" and max(_sides(i), default=0) >= WIDE],
        "moves": [i for i in inside if _moves(program, i) and not _copies(program, i, caches)],
    }
    inner = [i for i in inside if i.opcode == "while"]
    known = sum(i.trips is not None for i in inner)
    return Schedule(
        launches=sum(_launches(program, name) for name in names),
        loops=known,
        host_loops=len(inner) - known + len(loops[:1]),
        branches=sum(i.opcode == "conditional" for i in inside),
        cache_copies=len(found["cache copies"]),
        state_copies=len(found["state copies"]),
        host_transfers=len(found["host transfers"]),
        sorts=len(found["sorts"]),
        moves=round(sum(_bytes(i) for i in found["moves"]) / (1 << 20), 1),
        details={kind: [i.text.strip()[:300] for i in some] for kind, some in found.items() if some},
    )


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not match:
        return None
    rest = line[match.end() :]
    end = _type_end(rest)
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    if not opcode:
        return None
    arrays = (Array(m[1], _shape(m[2])) for m in re.finditer(r"([a-z]\w*)\[([\d,<=]*)\]", rest[:end]))
    return Instruction(match[2], opcode[1], tuple(arrays), line, bool(match[1]))


def _type_end(text: str) -> int:
    """Where the result type ends: a tuple's closing bracket, or the first blank."""
    if not text.startswith("("):
        return text.index(" ") if " " in text else len(text)
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return len(text)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n.lstrip("<=")) for n in text.split(",") if n)


def operands(instruction: Instruction) -> list[str]:
    """Names of what an instruction reads."""
    after = instruction.text.split(f" {instruction.opcode}(", 1)[-1]
    return re.findall(r"%([\w.\-]+)", after.split(")", 1)[0])


def _behind_bitcasts(instruction: Instruction, named: Mapping[str, Instruction]) -> Instruction:
    while instruction.opcode == "bitcast" and operands(instruction)[0] in named:
        instruction = named[operands(instruction)[0]]
    return instruction


def _launches(program: Program, name: str) -> int:
    return sum(_cost(program, i) for i in program.computations[name])


def _cost(program: Program, instruction: Instruction) -> int:
    if instruction.opcode in FREE:
        return 0
    if instruction.opcode == "while":
        trips = 1 if instruction.trips is None else instruction.trips
        body, condition = (_launches(program, instruction.called(role)[0]) for role in ("body", "condition"))
        return trips * body + (trips + 1) * condition
    if instruction.opcode in ("call", "async-start"):
        return sum(_launches(program, name) for name in program.callees(instruction))
    if instruction.opcode == "conditional":
        return max(_launches(program, name) for name in program.callees(instruction))
    return 1


def _sides(instruction: Instruction) -> list[int]:
    """The length of the sorted dimension."""
    match = re.search(r"dimensions=\{(\d+)\}", instruction.text)
    return [array.shape[int(match[1])] for array in instruction.results] if match else []


def _bytes(instruction: Instruction) -> int:
    return sum(array.size for array in instruction.results)


def _moves(program: Program, instruction: Instruction) -> bool:
    return program.only_moves(instruction) and _bytes(instruction) >= LARGE


def _copies(program: Program, instruction: Instruction, caches: Collection[Array]) -> bool:
    """Whether the result is a cache's contents at another place, perhaps transposed."""
    if not program.only_moves(instruction):
        return False
    return any(a.sides == c.sides and a.dtype == c.dtype for a in instruction.results for c in caches)


def _makes(program: Program, instruction: Instruction, caches: Collection[Array]) -> bool:
    """Whether a fusion computes a whole cache anew (a select instead of an update in place)."""
    if instruction.opcode != "fusion":
        return False
    made = [a for root in program.roots(instruction) if root.opcode not in IN_PLACE for a in root.results]
    return any(_squeezed(a) == _squeezed(c) and a.dtype == c.dtype for a in made for c in caches)


def _squeezed(array: Array) -> tuple[int, ...]:
    return tuple(n for n in array.shape if n > 1)


def _leaves_device(instruction: Instruction) -> bool:
    if instruction.opcode in TO_HOST:
        return True
    target = re.search(r'custom_call_target="([^"]*)"', instruction.text)
    in_host_memory = re.search(r"\{[\d,]*:[^}]*S\(5\)", instruction.text.split(" metadata=")[0])
    return bool(target and HOST_CALL.search(target[1])) or bool(in_host_memory)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel. spills: bytes of stores and loads; shared: static bytes."""

    name: str
    registers: int
    spills: int
    stack: int
    shared: int


def kernels(ptxas: str) -> list[Kernel]:
    """Read the output of `ptxas -v`."""
    found = []
    for part in re.split(r"Compiling entry function ", ptxas)[1:]:
        name = part.split("'")[1]

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        stack, shared = number(r"(\d+) bytes stack frame"), number(r"(\d+) bytes smem")
        found.append(Kernel(name, number(r"Used (\d+) registers"), spills, stack, shared))
    return found


def dynamic_shared(thunks: str) -> int:
    """The largest shared memory of a launch in XLA's list of thunks, in bytes."""
    return max(map(int, re.findall(r"shared_memory: (\d+) bytes", thunks)), default=0)
