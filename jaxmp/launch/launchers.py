"""What launchers tell a process by environment variables: its number, their count, process 0.

JAX's own variables are read first (Kubeflow, JobSet, or by hand), then those of SkyPilot, then what
`jax.distributed` detects: Slurm, Open MPI, Kubernetes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxmp.net.connect import Address

Place = tuple[str, int, int]  # coordinator as host:port, number of processes, number of this one

JAX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
SKY = 'SKYPILOT_NODE_IPS', 'SKYPILOT_NUM_NODES', 'SKYPILOT_NODE_RANK'
SKY_PORT = 9876  # SkyPilot has hosts, and no port
STEP = 'SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS'  # unlike in a shell inside an allocation
COUNTS = {  # how many processes, and the number of this one
    'JAX_NUM_PROCESSES': 'JAX_PROCESS_ID',
    'SKYPILOT_NUM_NODES': 'SKYPILOT_NODE_RANK',
    'SLURM_NTASKS': '',  # also without a number: a shell inside an allocation has none
    'OMPI_COMM_WORLD_SIZE': 'OMPI_COMM_WORLD_RANK',
    'PMI_SIZE': 'PMI_RANK',
    'MV2_COMM_WORLD_SIZE': 'MV2_COMM_WORLD_RANK',
    'WORLD_SIZE': 'RANK',  # torchrun
    'NUM_PROCESSES': 'PROCESS_ID',  # Kubeflow's JAXJob
}


def place_of(env: Mapping[str, str] = os.environ) -> Place | None:
    r"""The place that a launcher gave this process; None if it is alone, or none is known.

    Raises:
      ValueError: if JAX's or SkyPilot's variables are incomplete, or no numbers.

    >>> place_of({'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2', 'SKYPILOT_NUM_NODES': '2',
    ...           'SKYPILOT_NODE_RANK': '1'})
    ('10.0.0.1:9876', 2, 1)
    """
    for names in (JAX, SKY):
        if any(env.get(name, '').strip() for name in names[1:]):
            coordinator, count, number = _complete(env, names)
            if names is SKY:
                first = coordinator.split()[0]
                coordinator = f'{f"[{first}]" if ":" in first else first}:{SKY_PORT}'
            return coordinator, count, number
    if all(env.get(name) for name in STEP) and env[STEP[0]] != env[STEP[1]]:
        return None
    return _detected()


def _complete(env: Mapping[str, str], names: tuple[str, str, str]) -> Place:
    """The values of three variables: an address and two numbers."""
    values = [env.get(name, '').strip() for name in names]
    if not (values[0] and values[1].isdecimal() and values[2].isdecimal()):
        said = ', '.join(f'{name}={value!r}' for name, value in zip(names, values, strict=True))
        raise ValueError(
            f'{said} do not say where process 0 is, how many processes there are and which one '
            'this is; set all three, or give --coordinator, --processes and --process'
        )
    return values[0], int(values[1]), int(values[2])


def _detected() -> Place | None:
    from jax._src.clusters import ClusterEnv  # the detection of jax.distributed; not public

    detect = ClusterEnv.auto_detect_unset_distributed_params
    coordinator, processes, process, _ = detect(None, None, None, None, None, 60)
    if coordinator is None or processes is None or process is None:
        return None
    return coordinator, processes, process


def check_alone(why: str, env: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError if a launcher says that there are several processes.

    Args:
      why: the reason for which this process would train alone nevertheless.
      env: the environment variables.

    >>> check_alone('', {'SLURM_NTASKS': '1'})
    """
    for count, number in COUNTS.items():
        if env.get(count, '').strip() in ('', '0', '1') or (number and number not in env):
            continue
        said = ' and '.join(f'{name}={env[name].strip()}' for name in (count, number) if name)
        raise ValueError(
            f'{said}: a launcher has started, or can start, several processes, and {why}; give '
            '--processes=1 to train in this process alone'
        )


def placed(address: Address) -> Address:
    """The address, or without one that of the launcher's variables, or of a single process.

    Raises:
      ValueError: if a launcher says that there are several processes and not where.
    """
    if any(a is not None for a in address[:3]):
        return address
    if (place := place_of()) is None:
        check_alone('no variable says where process 0 is: start it by srun or jaxmp launch')
    return Address(*(place or (None, 1, None)), *address[3:])
