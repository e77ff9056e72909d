"""The pipeline runtime of this project: 1F1B over any object that sends and receives.

``comm`` has ``rank``, ``num_ranks``, ``isend``, ``irecv`` and ``batch``. On
the cluster it is a thin layer over the framework's calls, in the tests one
over queues, which records the operations (``tests/recorded.py``).
"""

import numpy as np


def train_step(comm, weight, batches):
    """Run one step of a pipeline of ``y = tanh(x @ w)`` with loss ``sum(y**2) / 2``; return the gradient of ``w``.

    ``weight`` is this rank's weight, ``batches`` the micro-batches, which the first rank reads.
    """
    stage, last = comm.rank, comm.num_ranks - 1
    num_warmup = min(last - stage, len(batches))
    held, gradient = {}, np.zeros_like(weight)
    sent = []

    def forward(k, received):
        x = batches[k] if stage == 0 else received
        held[k] = x, np.tanh(x @ weight)
        return held[k][1]

    def backward(k, received):
        nonlocal gradient
        x, y = held.pop(k)
        through_tanh = (y if stage == last else received) * (1 - y * y)
        gradient = gradient + x.T @ through_tanh
        return through_tanh @ weight.T

    def receive_input(k):
        return None if stage == 0 else comm.irecv(stage - 1, name=f"{stage}RECV_F{k}")

    def send_output(k, y):
        if stage < last:
            sent.append(comm.isend(y, stage + 1, name=f"{stage}SEND_F{k}"))

    for k in range(num_warmup):
        handle = receive_input(k)
        send_output(k, forward(k, handle and handle.wait()))
    for k in range(len(batches)):
        ahead = k + num_warmup
        if ahead < len(batches):
            handle = receive_input(ahead)
            output = forward(ahead, handle and handle.wait())
            with comm.batch():  # messages that cross go into one call, so no order of the two can hang
                send_output(ahead, output)
                coming = None if stage == last else comm.irecv(stage + 1, name=f"{stage}RECV_B{k}")
        else:
            coming = None if stage == last else comm.irecv(stage + 1, name=f"{stage}RECV_B{k}")
        to_previous = backward(k, coming and coming.wait())
        if stage > 0:
            sent.append(comm.isend(to_previous, stage - 1, name=f"{stage}SEND_B{k}"))
    for handle in sent:
        handle.wait()
    return gradient
