"""scripts/check_gpu.py: what it reads from compiled programs, on small texts, and how it compares with the budget."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import check_gpu
import gpu_schedule
from gpu_schedule import Array

KV = Array("bf16", (1, 2, 64, 32))
STATE = Array("f32", (1, 4, 16, 16))

MODULE = """\
HloModule jit_rounds, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused_write (p0: bf16[1,2,64,32], p1: bf16[1,2,3,32], p2: s32[]) -> bf16[1,2,64,32] {
  %p0 = bf16[1,2,64,32]{3,2,1,0} parameter(0)
  %p1 = bf16[1,2,3,32]{3,2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %c = s32[] constant(0)
  ROOT %dus = bf16[1,2,64,32]{3,2,1,0} dynamic-update-slice(%p0, %p1, %c, %c, %p2, /*index=5*/%c)
}

%fused_add (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%p, %p)
}

%inner_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add
  %z = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused_add
  ROOT %r = (s32[], f32[8]{0}) tuple(%i, %z)
}

%inner_condition (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %less = pred[] fusion(%i), kind=kLoop, calls=%fused_less
}

%fused_less (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] constant(5)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

%body (s: (bf16[1,2,64,32], f32[8], f32[1,4,16,16])) -> (bf16[1,2,64,32], f32[8], f32[1,4,16,16]) {
  %s = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}, f32[1,4,16,16]{3,2,1,0}) parameter(0)
  %kv = bf16[1,2,64,32]{3,2,1,0} get-tuple-element(%s), index=0
  %v = f32[8]{0} get-tuple-element(%s), index=1
  %st = f32[1,4,16,16]{3,2,1,0} get-tuple-element(%s), index=2
  %w = bf16[1,2,64,32]{3,2,1,0} fusion(%kv, %v), kind=kLoop, calls=%fused_write
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %v)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%inner_condition, body=%inner_body, KNOWN
  %out = f32[8]{0} get-tuple-element(%loop), index=1
EXTRA
  ROOT %next = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}, f32[1,4,16,16]{3,2,1,0}) tuple(%w, %out, %st)
}

%more (s: (bf16[1,2,64,32], f32[8], f32[1,4,16,16])) -> pred[] {
  %s = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}, f32[1,4,16,16]{3,2,1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}
FUSIONS
ENTRY %main (a: bf16[1,2,64,32], b: f32[8], c: f32[1,4,16,16]) -> (bf16[1,2,64,32], f32[8], f32[1,4,16,16]) {
  %a = bf16[1,2,64,32]{3,2,1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %c = f32[1,4,16,16]{3,2,1,0} parameter(2)
  %copied = f32[8]{0} copy(%b)
  %init = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}, f32[1,4,16,16]{3,2,1,0}) tuple(%a, %copied, %c)
  ROOT %rounds = (bf16[1,2,64,32]{3,2,1,0}, f32[8]{0}, f32[1,4,16,16]) while(%init), condition=%more, body=%body
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}'


def counted(extra: str = "", fusions: str = "", known: str = TRIPS) -> gpu_schedule.Schedule:
    text = MODULE.replace("EXTRA", f"  {extra}").replace("FUSIONS", fusions).replace("KNOWN", known)
    return gpu_schedule.schedule(gpu_schedule.parse(text), [KV, STATE])


def test_launches_of_a_round_count_inner_loops_by_their_trips():
    plain = counted()
    # the write, five times two kernels, six times the condition; what happens once before the rounds is no part of it
    assert plain.launches == 1 + 5 * 2 + 6
    assert (plain.loops, plain.host_loops, plain.branches) == (1, 1, 0)
    assert (plain.cache_copies, plain.state_copies, plain.host_transfers, plain.sorts, plain.moves) == (0, 0, 0, 0, 0.0)


def test_a_loop_of_unknown_length_is_driven_by_the_host():
    unknown = counted(known="metadata={}")
    assert (unknown.launches, unknown.loops, unknown.host_loops) == (1 + 2 + 2, 0, 2)


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ("%x1 = bf16[1,2,64,32]{3,2,1,0} copy(%kv)", "cache_copies"),
        ("%x1 = bf16[2,32,64]{2,1,0} transpose(%kv), dimensions={0,2,1}", "cache_copies"),
        ("%x1 = bf16[1,2,64,32]{3,2,1,0} fusion(%kv), kind=kLoop, calls=%fused_select", "cache_copies"),
        ("%x1 = bf16[1,2,64,32]{3,2,1,0} fusion(%kv), kind=kLoop, calls=%fused_copy", "cache_copies"),
        ("%x1 = f32[1,4,16,16]{3,2,1,0} copy(%st)", "state_copies"),
        ("%x1 = f32[2,32]{1,0} infeed(%v)", "host_transfers"),
        ('%x1 = f32[8]{0} custom-call(%v), custom_call_target="xla_ffi_python_gpu_callback"', "host_transfers"),
        ("%x1 = f32[8]{0:S(5)} copy(%v)", "host_transfers"),
        ("%x1 = (f32[3,20000]{1,0}, s32[3,20000]{1,0}) sort(%v, %i), dimensions={1}, to_apply=%fused_less", "sorts"),
        ("%x1 = f32[8]{0} conditional(%i, %v), branch_computations={%fused_add}", "branches"),
    ],
)
def test_what_must_not_be_in_a_round_is_found(extra, field):
    fusions = """
%fused_select (p: bf16[1,2,64,32]) -> bf16[1,2,64,32] {
  %p = bf16[1,2,64,32]{3,2,1,0} parameter(0)
  ROOT %q = bf16[1,2,64,32]{3,2,1,0} select(%p, %p, %p)
}

%fused_copy (p: bf16[1,2,64,32]) -> bf16[1,2,64,32] {
  %p = bf16[1,2,64,32]{3,2,1,0} parameter(0)
  %t = bf16[1,2,32,64]{3,2,1,0} transpose(%p), dimensions={0,1,3,2}
  ROOT %q = bf16[1,2,64,32]{3,2,1,0} copy(%t)
}
"""
    found = counted(extra, fusions)
    fields = ("cache_copies", "state_copies", "host_transfers", "sorts", "branches")
    assert {name: getattr(found, name) for name in fields if getattr(found, name)} == {field: 1}


def test_a_small_sort_and_a_computed_state_are_no_fault():
    fusions = """
%fused_decay (p: f32[1,4,16,16]) -> f32[1,4,16,16] {
  %p = f32[1,4,16,16]{3,2,1,0} parameter(0)
  ROOT %q = f32[1,4,16,16]{3,2,1,0} multiply(%p, %p)
}
"""
    decay = counted("%x1 = f32[1,4,16,16]{3,2,1,0} fusion(%st), kind=kLoop, calls=%fused_decay", fusions)
    assert decay.state_copies == 0 and decay.launches == counted().launches + 1
    small = counted("%x1 = (f32[3,200]{1,0}, s32[3,200]{1,0}) sort(%v, %i), dimensions={1}, to_apply=%fused_less")
    assert small.sorts == 0


def test_large_moves_are_added_up():
    assert counted("%x1 = bf16[1024,1024]{1,0} concatenate(%v, %v), dimensions={0}").moves == 2.0
    assert counted("%x1 = bf16[512,512]{1,0} concatenate(%v, %v), dimensions={0}").moves == 0.0


def test_a_program_without_rounds_counts_whole():
    text = "ENTRY %main (a: f32[8]) -> f32[8] {\n  %a = f32[8]{0} parameter(0)\n  ROOT %b = f32[8]{0} copy(%a)\n}\n"
    assert gpu_schedule.schedule(gpu_schedule.parse(text)).launches == 1
    with pytest.raises(ValueError, match="no ENTRY"):
        gpu_schedule.parse("nothing")


def test_ptxas_output():
    text = """\
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Compiling entry function 'add' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    attend, add = gpu_schedule.kernels(text)
    assert attend == gpu_schedule.Kernel("attend", 255, 32, 16, 4096)
    assert add == gpu_schedule.Kernel("add", 12, 0, 0, 0)
    assert gpu_schedule.dynamic_shared("x shared_memory: 768 bytes\ny shared_memory: 98304 bytes") == 98304


FIGURES = dict.fromkeys((*check_gpu.TOLERANCE, "aliased", "arguments"), 0) | {"launches": 100, "temp": 1000, "loops": 2}


def test_within_the_budget_nothing_is_said():
    assert check_gpu.regressions("round", FIGURES, {"round": FIGURES}) == []
    assert check_gpu.regressions("round", FIGURES | {"temp": 1049, "launches": 90}, {"round": FIGURES}) == []


def test_every_regression_is_one_line():
    worse = FIGURES | {"launches": 101, "temp": 1051, "cache_copies": 1}
    assert check_gpu.regressions("round", worse, {"round": FIGURES}) == [
        "round: cache_copies is 1, must be 0",
        "round: launches 100 -> 101",
        "round: temp 1000 -> 1051",
    ]
    assert check_gpu.regressions("new", FIGURES, {}) == ["new: no budget for these versions; --update writes one"]
    assert check_gpu.regressions("bad", {"error": "RESOURCE_EXHAUSTED"}, {}) == [
        "bad: does not compile: RESOURCE_EXHAUSTED"
    ]


def test_an_update_keeps_what_was_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(check_gpu, "BUDGET", tmp_path / "budget.json")
    before = {"jax 1, cuda 12": {"a": {"launches": 1}}, "jax 1, cuda 13": {"b": {"launches": 2}}}
    check_gpu.write_budget(before, "jax 1, cuda 13", {"c": FIGURES, "d": {"error": "x"}})
    written = json.loads((tmp_path / "budget.json").read_text())
    assert written["jax 1, cuda 12"] == {"a": {"launches": 1}}
    assert written["jax 1, cuda 13"]["b"] == {"launches": 2}
    assert set(written["jax 1, cuda 13"]) == {"b", "c"} and set(written["jax 1, cuda 13"]["c"]) == set(
        check_gpu.TOLERANCE
    )


def options(*words: str) -> argparse.Namespace:
    return check_gpu.parser().parse_args(words)


def test_selection():
    cases = list(check_gpu.selected(options("--model", "Qwen3.5-4B", "--batch", "8")))
    assert [check_gpu.name(case) for case in cases] == [
        "Qwen3.5-4B round, budget 0, batch 8",
        "Qwen3.5-4B round, budget 16, batch 8",
        "Qwen3.5-4B round, budget 64, batch 8",
        "Qwen3.5-4B round, budget 256, batch 8",
        "Qwen3.5-4B read, batch 8",
        "Qwen3.5-4B write, batch 8",
    ]
    with pytest.raises(ValueError, match="Qwen9"):
        list(check_gpu.selected(options("--model", "Qwen9")))
    with pytest.raises(ValueError, match="no comma-separated"):
        list(check_gpu.selected(options("--budget", "1,x")))


def test_checked_in_budgets_are_whole():
    for section in json.loads(check_gpu.BUDGET.read_text()).values():
        for figures in section.values():
            assert set(figures) == set(check_gpu.TOLERANCE)
            assert not any(figures[key] for key in check_gpu.MUST_BE_ZERO)
