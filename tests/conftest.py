"""Shared test modules explain their failures like test modules do."""

import pytest

pytest.register_assert_rewrite("contracts", "samples")
