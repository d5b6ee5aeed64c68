"""MLX streams that any thread may use, used by one engine at a time.

MLX cannot end a single stream, and on a CPU each keeps a thread. So an engine gives its own back, for the next one.
"""

import mlx.core as mx

_idle: dict[mx.DeviceType, list[mx.Stream]] = {}


def borrow() -> mx.Stream:
    device = mx.default_device()
    try:
        return _idle.setdefault(device.type, []).pop()
    except IndexError:
        return mx.new_thread_unsafe_stream(device)


def give_back(lane: mx.Stream) -> None:
    _idle.setdefault(lane.device.type, []).append(lane)
