"""Benchmarks; each prints its command, machine and versions with its figures."""
