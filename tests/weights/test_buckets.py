"""Buckets hold every tensor once, aligned, and never more bytes than asked."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.weights.buckets import cut_buckets, manifest_bytes, manifest_digest
from megatron_grpo.weights.specs import TensorSpec

SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["float32", "bfloat16", "float16"])
    ),
    max_size=12,
).map(lambda rows: [TensorSpec(f"t{i}", tuple(s), d) for i, (s, d) in enumerate(rows)])


def test_three_tensors_of_eight_bytes_fill_two_buckets_of_sixteen():
    specs = [TensorSpec(name, (2,), "float32") for name in "abc"]
    first, second = cut_buckets(specs, 16)
    assert [(slot.spec.name, slot.offset_bytes) for slot in first.slots] == [("a", 0), ("b", 8)]
    assert [(slot.spec.name, slot.offset_bytes) for slot in second.slots] == [("c", 0)]
    assert (first.num_bytes, second.num_bytes) == (16, 8)


def test_a_tensor_larger_than_a_bucket_gets_one_to_itself():
    specs = [TensorSpec("s", (1,), "float32"), TensorSpec("big", (9,), "float32")]
    specs.append(TensorSpec("t", (1,), "float32"))
    assert [b.num_bytes for b in cut_buckets(specs, 16)] == [4, 36, 4]


def test_an_empty_manifest_has_no_buckets_and_an_empty_tensor_takes_no_room():
    assert cut_buckets([], 16) == ()
    assert [b.num_bytes for b in cut_buckets([TensorSpec("none", (0, 4), "float32")], 16)] == [0]


@settings(max_examples=200, deadline=None)
@given(SPECS, st.integers(1, 100))
def test_every_tensor_lies_once_aligned_and_apart_from_the_others(specs, limit):
    buckets = cut_buckets(specs, limit)
    assert [slot.spec for bucket in buckets for slot in bucket.slots] == specs
    for bucket in buckets:
        assert bucket.num_bytes <= limit or len(bucket.slots) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.offset_bytes % slot.spec.torch_dtype.itemsize == 0
            assert end <= slot.offset_bytes < end + 4
            end = slot.offset_bytes + slot.spec.num_bytes
        assert end == bucket.num_bytes


def test_the_digest_sees_name_shape_dtype_and_order_and_fits_int64():
    a, b = TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (2, 3), "float32")
    manifests = [
        [a, b],
        [b, a],
        [a],
        [a, TensorSpec("b", (3, 2), "float32")],
        [a, TensorSpec("b", (2, 3), "bfloat16")],
        [a, TensorSpec("c", (2, 3), "float32")],
    ]
    digests = {manifest_digest(m) for m in manifests}
    assert len(digests) == len(manifests)
    assert all(0 <= d < 2**63 for d in digests)
    assert manifest_digest([a, b]) == manifest_digest((a, b))
    assert manifest_bytes([a, b]) == 48
