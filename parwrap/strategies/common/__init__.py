"""What several strategies share: the base class, the reducer, the autograd graph, and what ranks send each other.

::

    strategy.py              the base of all strategies
    reducer.py               torch's reducer for a list of parameters, armed by hand
    compression.py           gradients in fewer bytes
    sparse_gradients.py      sparse gradients, one after another
    agreement.py             parameters described to the other ranks, to compare them
    share.py                 what a rank contributes to a backward of others
    loss_divisors.py        losses with batch="global" whose divisor is not the number of samples
    training_buffers.py      buffers that training changes
    equal_state.py           other state that is equal on all ranks: buffers at an evaluation, learning rates, the loss of a closure
    parameter_broadcast.py   one rank's values of parameters, copied to all
    sent_values.py           the tensors of one rank, sent to all
    state_transfer.py        another rank's training state, for a rank that has missed steps
"""
