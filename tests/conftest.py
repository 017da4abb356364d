"""Four CPU devices, forced before jax starts, so that payloads really travel between devices.

Programs compile quickly, which saves a third of the CPU time of all tests; what depends on how
users compile says so (tests/test_exact.py). Operations do not carry the lines of code that made
them. One compilation cache serves all workers, which compile many alike.
"""

import gc
import itertools
import os
import shutil
import tempfile

import pytest

OURS = None
if 'PYTEST_XDIST_WORKER' not in os.environ and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    OURS = os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='jaxmp-tests-')
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'
from tests.base import FLAGS, end_started  # noqa: E402, JAX reads the cache's place when it is imported

os.environ['XLA_FLAGS'] = (
    f'--xla_force_host_platform_device_count=4 {os.environ.get("XLA_FLAGS", FLAGS)}'
)
gc.set_threshold(200_000, 20, 50)  # compiled programs are many objects, none of which go
# Scripts, which a test runs: a look for doctests would run them once more in every worker.
collect_ignore = ['outside/stages.py', 'outside/replicas.py']


TESTS = itertools.count()
LONG = (  # files by the worker that begins with them, of the three in CI
    ('test_runtimes',),
    ('test_stage_faults', 'test_train.py', 'test_team', 'test_probe', 'test_grammar'),
    ('test_dataparallel', 'test_sweep', 'test_portable', 'test_nnx', 'test_gpt2', 'test_notebooks'),
)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """As by ``--dist worksteal``: a worker without tests takes half of another's."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(trylast=True)  # of those that run
def pytest_collection_modifyitems(items):
    """The long tests first in each third, so that at the end no worker waits for another's."""
    kinds = [[], [], [], []]
    for item in items:
        long = (k for k, names in enumerate(LONG) if any(name in item.nodeid for name in names))
        kinds[next(long, 3)].append(item)
    rest, third = iter(kinds.pop()), -(-len(items) // 3)
    for kind in kinds:
        kind += itertools.islice(rest, max(0, third - len(kind)))
    items[:] = [*itertools.chain(*kinds), *rest]


def pytest_collection_finish():
    """What was imported stays: no collection looks at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    if OURS:
        shutil.rmtree(OURS, ignore_errors=True)


def pytest_runtest_teardown():
    """Ends processes; frees programs before they are as many mappings as Linux gives a process.

    To count them takes 20 ms, so every 25th test does.
    """
    end_started()
    maps = '/proc/self/maps'
    if next(TESTS) % 25 == 0 and os.path.exists(maps):
        with open(maps) as lines:
            if sum(1 for _ in lines) > 30_000:
                import jax

                jax.clear_caches()
                gc.collect()
