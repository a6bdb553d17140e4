"""Packing of token streams, on streams small enough to check by eye."""

import numpy as np
import pytest

from ddtree_jax.train.data import batch_at, join_documents, pack_windows, sample_anchors


def test_documents_are_separated_and_ended():
    stream = join_documents([[5, 6], [], [7]], separator=0)
    assert stream.dtype == np.uint16
    assert stream.tolist() == [5, 6, 0, 0, 7, 0]


def test_ids_beyond_uint16_are_refused():
    with pytest.raises(ValueError, match="uint16"):
        join_documents([[65536]], separator=0)


def test_windows_follow_each_other_and_the_tail_is_dropped():
    stream = np.arange(11, dtype=np.uint16)
    assert pack_windows(stream, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pack_windows(stream, 4, offset=3).tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]
    assert pack_windows(stream, 12).shape == (0, 12)
    assert pack_windows(stream, 4).dtype == np.int32


def test_an_epoch_sees_each_window_at_most_once_and_epochs_differ():
    stream = np.arange(100, dtype=np.uint16)
    per_epoch = 9 // 3  # ten windows of ten fit, one is kept back for the random offset
    first = np.concatenate([batch_at(stream, step, batch=3, length=10) for step in range(per_epoch)])
    second = np.concatenate([batch_at(stream, step, batch=3, length=10) for step in range(per_epoch, 2 * per_epoch)])
    assert np.array_equal(first, first[:, :1] + np.arange(10))
    assert len(set(first[:, 0].tolist())) == 9
    assert first.tolist() != second.tolist()


def test_a_batch_depends_on_the_step_alone():
    stream = np.arange(100, dtype=np.uint16)
    again = [batch_at(stream, 4, batch=3, length=10, seed=1) for _ in range(2)]
    assert np.array_equal(*again)


def test_a_stream_too_short_for_one_batch_is_refused():
    with pytest.raises(ValueError, match="too short"):
        batch_at(np.arange(39, dtype=np.uint16), 0, batch=4, length=10)


def test_anchors_lie_in_their_rows_range():
    start, stop = np.array([3, 10]), np.array([4, 13])
    anchors = sample_anchors(np.random.default_rng(0), start, stop, 50)
    assert set(anchors[0].tolist()) == {3}
    assert set(anchors[1].tolist()) == {10, 11, 12}
