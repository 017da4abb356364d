"""`Link`: rate and delay between two stages, as a text names them."""

from __future__ import annotations

import re
from typing import NamedTuple

FORM = re.compile(r'(\d+(?:\.\d+)?)([kmg])bit(?:,(\d+(?:\.\d+)?)ms)?', re.IGNORECASE)
MEGABITS = {'k': 1e-3, 'm': 1.0, 'g': 1e3}


class Link(NamedTuple):
    """A link between two stages.

    Attributes:
      rate: Mbit/s.
      delay: ms from the last byte's departure to its arrival.
      back: Mbit/s from the later stage to the earlier one; 0: as ``rate``.
    """

    rate: float
    delay: float = 0.0
    back: float = 0.0

    def seconds(self, nbytes: float, back: bool = False) -> float:
        """How long a message occupies the link, or that of the way back."""
        return 8 * nbytes / (1e6 * ((back and self.back) or self.rate))

    def turned(self) -> Link:
        """The link whose first stage is the second one of this.

        >>> Link(100, 5, back=10).turned()
        Link(rate=10, delay=5, back=100)
        """
        return Link(self.back or self.rate, self.delay, self.back and self.rate)


def parse(text: str) -> Link:
    """The link that a text names.

    Raises:
      ValueError: if the text is no link.

    >>> parse('100mbit,50ms'), parse('1gbit')
    (Link(rate=100.0, delay=50.0, back=0.0), Link(rate=1000.0, delay=0.0, back=0.0))
    """
    match = FORM.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ValueError(
            f'--link={text}: not a rate above 0, and perhaps a delay; write a number with kbit, '
            'mbit or gbit (per second), and ms, such as --link=100mbit,50ms or --link=1gbit'
        )
    return Link(float(match[1]) * MEGABITS[match[2].lower()], float(match[3] or 0))
