"""What is remembered: feedback rules make a channel, two state machines, out of a codec.

A channel has a state at each end of the link. The sender turns a tensor and its state into a
message and its next state; the receiver turns the message and its own state into what the next
stage sees. Buffers have the shape of the batch (position i of this batch meets position i of the
last one) and start at zero; AQ-SGD's has one slot per training example, that of anchors one per
token. Where both ends hold the same buffer the channel has a `shared_state`, of which a boundary
inside one process keeps a single copy.
"""

from jaxmp.feedback.anchored import anchored
from jaxmp.feedback.channel import Channel, Slots, check_codec
from jaxmp.feedback.klt import klt
from jaxmp.feedback.outliers import outliers
from jaxmp.feedback.rules import aqsgd, direct, ef, ef21, ef_mixed, warm
from jaxmp.feedback.slots import per_microbatch, put, take

__all__ = [
    'Channel',
    'Slots',
    'anchored',
    'aqsgd',
    'check_codec',
    'direct',
    'ef',
    'ef21',
    'ef_mixed',
    'klt',
    'outliers',
    'per_microbatch',
    'put',
    'take',
    'warm',
]
