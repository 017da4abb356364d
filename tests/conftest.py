"""Four CPU devices, forced before jax starts, so that payloads really travel between devices."""

import os

os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=4'
)
