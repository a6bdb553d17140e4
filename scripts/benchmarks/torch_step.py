"""The plain step of `transformers` on random weights, in a process of its own, so that both frameworks have the memory
to themselves. Run by `benchmark.py gpu` and `cpu`; prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

ATTENTIONS = ("flash_attention_3", "flash_attention_2", "sdpa", "eager")
KERNELS = ("fla", "causal_conv1d", "kernels")  # with these `transformers` runs the delta rule in its own fast kernels


@dataclass(frozen=True)
class Job:
    """What to time: steps after a random prompt of `context` tokens, `steps` of them a turn."""

    config: dict[str, Any]
    context: int
    dtype: str
    device: str
    turns: int
    steps: int = 16


def measure(job: Job) -> dict[str, Any]:
    """Milliseconds of a step with the attention that is fastest, or why there are none."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return {"skipped": "PyTorch or transformers is not installed"}
    done = subprocess.run([sys.executable, __file__, json.dumps(asdict(job))], capture_output=True, text=True)
    if done.returncode:
        return {"skipped": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """In the process of its own."""
    import torch
    import transformers

    job = Job(**json.loads(sys.argv[1]))
    if job.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"skipped": "PyTorch finds no CUDA device"}))
        return
    model = build(job)
    times, refused = {}, {}
    for attention in ATTENTIONS:
        try:
            model.set_attn_implementation(attention)
            times[attention] = milliseconds(model, job)
        except Exception as error:  # whatever an attention lacks here: a package, the device, the head size
            refused[attention] = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
    best = min(times, key=times.__getitem__)
    found = [name for name in KERNELS if importlib.util.find_spec(name)]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "kernels": found}
    print(json.dumps({"ms": times[best], "attention": best, "tried": times, "refused": refused, **versions}))


def build(job: Job) -> Any:
    """The model, its random weights made on the device."""
    import torch
    import transformers

    fields = {key: value for key, value in job.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(job.config["model_type"], **fields)
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job.dtype))
    return model.to(job.device).eval()


def milliseconds(model: Any, job: Job) -> float:
    """Median over the turns; the token chosen goes into the next step without a look at it."""
    import torch

    def synchronise() -> None:
        if job.device == "cuda":
            torch.cuda.synchronize()

    def turn() -> float:
        nonlocal token, past
        synchronise()
        start = time.perf_counter()
        for _ in range(job.steps):
            out = model(token, past_key_values=past, use_cache=True, logits_to_keep=1)
            token, past = out.logits[:, -1:].argmax(-1), out.past_key_values
        synchronise()
        return 1000 * (time.perf_counter() - start) / job.steps

    with torch.inference_mode():
        prompt = torch.randint(job.config["vocab_size"], (1, job.context), device=job.device)
        first = model(prompt, use_cache=True, logits_to_keep=1)
        token, past = first.logits[:, -1:].argmax(-1), first.past_key_values
        turn()
        return statistics.median(turn() for _ in range(job.turns))


if __name__ == "__main__":
    main()
