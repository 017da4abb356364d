"""The version, in a file of its own so that building the package imports nothing heavy."""

__version__ = '0.2.0'
