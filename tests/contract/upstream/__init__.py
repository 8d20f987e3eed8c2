"""Upstream releases as snapshots: taken out of published wheels, and put together in pairs."""
