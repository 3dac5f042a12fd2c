"""The in-process channel: the contract, and what is its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from contracts.weights import DEADLINE_S, MANIFEST, WeightChannelContract, tensors_of
from safetensors.torch import load_file
from tiny import save_tiny

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest


class TestInProcessChannel(WeightChannelContract):
    @pytest.fixture
    def ends(self):
        channel = InProcessChannel(MANIFEST, deadline_s=DEADLINE_S)
        return channel.sender, channel.receivers[0]


def test_every_receiver_gets_every_tensor_and_a_missing_one_is_named():
    channel = InProcessChannel(MANIFEST, deadline_s=0.5, num_receivers=3)
    with ThreadPoolExecutor(3) as pool:
        pulls = [pool.submit(lambda r=r: dict(r.receive(2))) for r in channel.receivers]
        assert channel.sender.send(2, iter(tensors_of(2))).num_tensors == 4
        for pull in pulls:
            assert torch.equal(pull.result(5)["scale"], tensors_of(2)[3][1])
        pulls = [pool.submit(lambda r=r: dict(r.receive(3))) for r in channel.receivers[:2]]
        with pytest.raises(WeightExchangeError, match=r"receivers \[2\] did not take it"):
            channel.sender.send(3, iter(tensors_of(3)))


def test_what_was_sent_does_not_change_when_training_goes_on():
    channel = InProcessChannel(MANIFEST, deadline_s=5.0)
    tensors = tensors_of(1)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: channel.sender.send(1, iter(tensors)))
        stream = channel.receivers[0].receive(1)
        received = [next(stream)]
        for _, tensor in tensors:
            tensor.zero_()  # an in-place optimizer step while the engine still reads
        received += list(stream)
        sent.result(5)
    for (_, found), (_, expected) in zip(received, tensors_of(1), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("llama", True), ("qwen3", False)])
def test_b5_the_manifest_names_what_a_checkpoint_holds_tied_weights_once(tmp_path, family, tied):
    folder = save_tiny(tmp_path / "model", family, tied=tied)
    stored = load_file(folder / "model.safetensors")
    manifest = hugging_face_manifest(folder)
    assert {spec.name: spec.shape for spec in manifest} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert len(manifest) == len(stored)
