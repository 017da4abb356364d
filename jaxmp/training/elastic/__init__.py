"""Replicas that come and go."""
