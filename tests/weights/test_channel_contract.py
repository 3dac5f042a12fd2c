"""The weight channel contract on the collective channel (gloo, in two threads)."""

from __future__ import annotations

import pytest
from contracts.weights import DEADLINE_S, MANIFEST, WeightChannelContract
from weights.exchange import Exchange


class TestCollectiveChannel(WeightChannelContract):
    @pytest.fixture
    def ends(self):
        with Exchange([MANIFEST], bucket_bytes=64, deadline_s=DEADLINE_S) as exchange:
            yield exchange.senders[0], exchange.receivers[0]
