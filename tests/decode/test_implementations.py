"""Recorded texts with every writing of the operations: DDTREE_IMPLEMENTATION chooses one for a whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import numpy as np
import ddtree_jax

def outputs(target, drafter, arrays):
    model = ddtree_jax.load(target, drafter, dtype="float32")
    with np.load(arrays) as recorded:
        prompt, new = recorded["prompt_ids"].tolist(), recorded["spec_ids"].tolist()
    same = []
    for options in (dict(method="dflash", cap_block=True), dict(tree_budget=16), dict(method="ar")):
        result = ddtree_jax.generate(model, prompt_ids=[prompt], max_new_tokens=len(new), **options)[0]
        same.append(result.output_ids == prompt + new)
    return same

print(json.dumps([outputs(*pair) for pair in json.loads(sys.argv[1])]))
"""
PAIRS = [("qwen3", "dflash_qwen3"), ("qwen3_5", "dflash_qwen3_5_swa")]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "pallas"])  # every other test runs "xla"
def test_recorded_texts(golden, root: Path, implementation):
    """Chain, tree and plain decoding of the recorded pairs; kernels are interpreted, since there is no GPU."""
    pairs = [(str(golden(t)), str(golden(d)), str(golden(d).with_name(d + ".npz"))) for t, d in PAIRS]
    environment = os.environ | {"DDTREE_IMPLEMENTATION": implementation, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(pairs)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == [[True] * 3] * 2
