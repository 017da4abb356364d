"""Young words and words of one paper: a file each, tested by the laws of all words.

A text names them like any other word, and `jaxmp.spec.Later` imports the file of each when it is
first named: `jaxmp.contrib.k_means`, `jaxmp.contrib.demo` and so on.
"""
