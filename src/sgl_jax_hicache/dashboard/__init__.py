"""Draws the Grafana dashboard of `docs/grafana` from a Prometheus, without a Grafana."""
