"""Token streams and the batches cut from them: NumPy on the host, pure functions of their arguments.

A batch depends on (stream, step, seed) alone, so a run that is killed and started again sees the same batches.
"""

import numpy as np


def join_documents(documents: list[list[int]], separator: int) -> np.ndarray:
    """One uint16 stream [n] of all documents, each followed by `separator`. Raises ValueError for ids beyond uint16."""
    flat = [token for document in documents for token in (*document, separator)]
    stream = np.asarray(flat, np.int64)
    if stream.size and (stream.min() < 0 or stream.max() > np.iinfo(np.uint16).max):
        raise ValueError("token ids must fit in uint16")
    return stream.astype(np.uint16)


def pack_windows(stream: np.ndarray, length: int, offset: int = 0) -> np.ndarray:
    """Consecutive windows int32 [(n - offset) // length, length] of a stream [n]; a tail that fills none is dropped."""
    count = max(len(stream) - offset, 0) // length
    return stream[offset : offset + count * length].reshape(count, length).astype(np.int32)


def batch_at(stream: np.ndarray, step: int, *, batch: int, length: int, seed: int = 0) -> np.ndarray:
    """Batch number `step` of an endless shuffled run over the stream: int32 [batch, length].

    Every epoch visits each window once, in a new order and with a new offset, so windows do not repeat exactly.
    """
    per_epoch = (len(stream) // length - 1) // batch
    if per_epoch < 1:
        raise ValueError(f"a stream of {len(stream)} tokens is too short for batches of {batch} x {length}")
    rng = np.random.default_rng((seed, step // per_epoch))
    offset = int(rng.integers(length))
    order = rng.permutation((len(stream) - offset) // length)
    at = (step % per_epoch) * batch
    starts = offset + order[at : at + batch] * length
    return stream[starts[:, None] + np.arange(length)].astype(np.int32)


def sample_anchors(rng: np.random.Generator, start: np.ndarray, stop: np.ndarray, count: int) -> np.ndarray:
    """Random block anchors int32 [B, count], uniform in start[b] <= anchor < stop[b] (repeats are allowed)."""
    return rng.integers(start[:, None], stop[:, None], (len(start), count)).astype(np.int32)
