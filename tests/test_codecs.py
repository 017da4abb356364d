"""Laws of the codecs, over the tables of tests/laws.py."""

import pytest

from tests import laws


@pytest.mark.parametrize('text', laws.SPECS)
def test_laws(text):
    laws.check(text, laws.SPECS[text])


@pytest.mark.parametrize('text', laws.FLOAT32_SPECS)
def test_laws_float32(text):
    laws.check(text, laws.FLOAT32_SPECS[text], laws.FLOAT32)
