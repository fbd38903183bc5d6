"""python -m pytest tests/test_stream.py: how tensors are cut into chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream import packed_chunks


@given(st.lists(st.lists(st.integers(1, 5), min_size=0, max_size=3), max_size=12), st.integers(1, 200))
def test_chunks_hold_every_tensor_in_order_and_close_once_past_the_buffer(shapes, buffer):
    names = [f"p{i}" for i in range(len(shapes))]
    chunks = packed_chunks(names, ["bfloat16"] * len(names), shapes, buffer)
    assert [spec.name for chunk in chunks for spec in chunk] == names
    assert all(chunk for chunk in chunks)
    for chunk in chunks[:-1]:
        sizes = [spec.nbytes for spec in chunk]
        assert sum(sizes) > buffer >= sum(sizes[:-1])


def test_mixed_dtypes_that_would_misalign_are_refused_by_name():
    with pytest.raises(ValueError, match="second"):
        packed_chunks(["first", "second"], ["bfloat16", "float32"], [[3], [2]], 1000)
