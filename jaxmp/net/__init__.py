"""Messages between the processes of a run: encrypted, over one port, by view, step and tag.

A `Switch` is the one place that all processes reach: they meet there, it says who is present, and
it forwards messages between processes that do not reach each other. A `Peer` is the connection of
one process. A `Group` is what the processes of a view decide together.
"""
