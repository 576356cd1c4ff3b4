"""What all tests share: how property-based tests draw their examples.

`make test` draws the same examples every time, so that it says the same of the same code; `make soak` runs all
property tests with new ones (HYPOTHESIS_PROFILE=explore), and what it finds becomes an `@example`. A loaded machine
makes drawing slow, which says nothing about the code under test.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("repeatable", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
