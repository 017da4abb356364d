"""Processes and devices: rendezvous, placement of stages and replicas, detection of failures."""
