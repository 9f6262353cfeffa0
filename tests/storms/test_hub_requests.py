"""A short form of scripts/storms/hub_requests.py."""

import pytest
from storms.hub_requests import storm

pytestmark = pytest.mark.hub


def test_no_forged_request_is_accepted() -> None:
    assert storm(count=170, seed=2026) == []
