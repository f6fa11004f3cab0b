from __future__ import annotations

import pytest

from tests.observe.recorded import Recorder


@pytest.fixture
def recorder() -> Recorder:
    """It has recorded a whole run."""
    recorder = Recorder()
    recorder.record()
    return recorder
