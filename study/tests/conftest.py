"""As for the other tests: four CPU devices, programs that compile quickly."""

from tests.conftest import *  # noqa: F403
