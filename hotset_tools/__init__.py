"""Offline tools behind the `hotset` command."""
