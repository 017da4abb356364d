"""Text from a language model, in one process or over several."""
