from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support import Backend, backends, devices

settings.register_profile(
    "kdtree",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kdtree")


@pytest.fixture(scope="session", params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each array library on each device present."""
    return request.param


@pytest.fixture(scope="session", params=devices(), ids=lambda backend: backend.name)
def device(request: pytest.FixtureRequest) -> Backend:
    """One array library on each device present, for what is long."""
    return request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name without its backend, so that all see the same numbers."""
    name = request.node.name
    for fixture in ("backend", "device"):
        if fixture in request.fixturenames:
            name = name.replace(request.getfixturevalue(fixture).name, "")
    return np.random.default_rng(list(name.encode()))
