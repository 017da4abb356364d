"""MNIST: 60,000 + 10,000 handwritten digits, grey, 28 x 28 pixels, from the published files.

Under ``data_dir``, or its folder ``mnist``, stand the four files ``train-images-idx3-ubyte``,
``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, each as it
is or as ``.gz``. Their contents are checked against the published ones. Ids are positions in them.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from jaxmp.data import Dataset, Split

_CLASSES = 10
_SIDE = 28
_HOME = 'https://ossci-datasets.s3.amazonaws.com/mnist'
