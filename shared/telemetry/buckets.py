"""Bucket bounds, apart from the metrics that use them: the serving loop counts without knowing Prometheus."""

from __future__ import annotations

DURATION_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 3600.0)
"""Upper bounds of every histogram of seconds: from a token to the longest build."""
