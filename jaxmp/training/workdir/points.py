"""`Points`: the steps at which a run is tested, saved and ends.

A configuration says how long and how often in epochs, in steps or in a share of the run; everything
else counts steps.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxmp.config import Config, length_of


class Points(NamedTuple):
    """When something happens in a run, as numbers of steps.

    Attributes:
      epoch: steps of a pass over the training split.
      test: steps from one test to the next.
      save: steps from one checkpoint to the next.
      end: steps of the run, at whose end it is tested and saved.
      in_steps: its length was given in steps, in which it is then told.
    """

    epoch: int
    test: int
    save: int
    end: int
    in_steps: bool = False

    @property
    def epochs(self) -> int:
        """The epochs of the run; the last one may be left before its end."""
        return -(-self.end // self.epoch)

    def tests(self, step: int) -> bool:
        """Whether the run is tested after ``step``."""
        return step == self.end or step % self.test == 0

    def saves(self, step: int) -> bool:
        """Whether the run is saved after ``step``."""
        return step == self.end or step % self.save == 0

    def after(self, step: int) -> int:
        """The first point after ``step``, at most to the end of its epoch.

        >>> [Points(epoch=10, test=4, save=5, end=12).after(step) for step in (0, 4, 5, 8, 10)]
        [4, 5, 8, 10, 12]
        """
        return min(self.end, *((step // n + 1) * n for n in (self.epoch, self.test, self.save)))

    def before(self, step: int) -> int:
        """The last test before ``step``, or the start."""
        return (step - 1) // self.test * self.test if step else 0

    def epochs_at(self, step: int) -> float:
        """The epochs that ``step`` steps are, a whole number where they are whole.

        >>> [Points(epoch=10, test=4, save=5, end=12).epochs_at(step) for step in (4, 10)]
        [0.4, 1]
        """
        return step / self.epoch if step % self.epoch else step // self.epoch

    def name(self, step: int) -> str:
        """``step`` of all, as a line says it: in epochs, if tests and the end are at ends of some.

        >>> Points(epoch=10, test=10, save=5, end=30).name(20)
        'epoch 2/3'
        >>> Points(epoch=10, test=4, save=5, end=30).name(20)
        'step 20/30'
        """
        if self.in_steps or self.test % self.epoch or self.end % self.epoch:
            return f'step {step}/{self.end}'
        return f'epoch {step // self.epoch}/{self.epochs}'


def points_of(config: Config, epoch_steps: int) -> Points:
    """The points of a run whose epochs have ``epoch_steps`` steps."""
    end = config.steps or config.epochs * epoch_steps
    test = steps_of(config.eval_every, epoch_steps, end)
    save = steps_of(config.checkpoint_every, epoch_steps, end)
    return Points(epoch_steps, test, save, end, bool(config.steps))


def steps_of(length: str | float, epoch_steps: int, end: int) -> int:
    """The steps of a length of training; at least one, if it is not 0.

    Args:
      length: as `jaxmp.config.length_of` reads it.
      epoch_steps: of an epoch.
      end: of the run.

    Raises:
      ValueError: if it is no length.

    >>> [steps_of(text, 40, 200) for text in ('7 steps', '2 epochs', 0.5, '10%', '0.1%', 0)]
    [7, 80, 20, 20, 1, 0]
    """
    if (parsed := length_of(length)) is None:
        raise ValueError(f'{length!r} is no length of training')
    number, unit = parsed
    steps = round(number * {'steps': 1, 'epochs': epoch_steps, '%': end / 100}[unit])
    return max(1, steps) if number else 0
