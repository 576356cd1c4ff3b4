"""What all tests share: a loaded machine makes drawing examples slow, which says nothing about the code under test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")
