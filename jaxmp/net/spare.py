"""`take_part`: a spare process waits until one of a run does not come back, and takes its part."""

from __future__ import annotations

import json
import secrets
import time

from jaxmp.net.address import ProcessGroupError, reach
from jaxmp.net.connect import START, Address, entrance
from jaxmp.net.peer import ANSWER
from jaxmp.net.sockets import SWITCH, Sockets, endpoint, put
from jaxmp.net.views import BEAT


def take_part(address: Address) -> Address | None:
    """The address with the number of a process that does not come back; None after the run.

    It can be any but that in which the switch runs, with which the others lose each other.

    Args:
      address: without a number.

    Raises:
      ProcessGroupError: if there is no switch, or it has another secret.
      ValueError: if the address has a number, or no time to wait for a process.
    """
    if address.process is not None or not address.back:
        raise ValueError(
            f'a spare process gets its number, and --back, from the run that it waits for; got '
            f'--process={address.process} and --back={address.back:g}: leave --process out, and '
            'give all the same --back, such as --back=60'
        )
    switch, keys = entrance(address._replace(process=0))
    reach(switch, START, 'nobody answers', 'start the run first, and check its port').close()
    sockets = Sockets(keys)
    socket = sockets.calling(f'-1.{secrets.token_hex(8)}', address.silent)
    socket.connect(endpoint(*switch))
    heard, patience, number = time.monotonic(), ANSWER, None
    while number is None and time.monotonic() - heard < patience:
        put(socket, SWITCH, {'kind': 'spare'})
        for _, _, frames in sockets.arrived(BEAT):
            heard, patience = time.monotonic(), address.silent + address.back
            number = json.loads(frames[0].bytes)['process']
        time.sleep(BEAT / 4)
    sockets.close()
    if patience == ANSWER:
        raise ProcessGroupError(
            f'the switch at {endpoint(*switch)} has not answered within {ANSWER:g} s: it has '
            'another token, is stopped, or is no switch of this run'
        )
    return None if number is None else address._replace(process=number)
