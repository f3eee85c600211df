"""Mixed precision: autocast, the dynamic loss scale, and half precision models, each with an interceptor in its own file.

It may import the loop and all rooms below it. Start with ``scaling.py``.

::

    choice.py        the requested precision: a dtype, or one of Apex's levels
    autocasting.py   autocast around the user's code
    scaling.py       dynamic loss scaling for fp16: intercepts backward, clipping and steps
    loss_scale.py    the loss scale: when it grows and shrinks, how many steps were skipped, and when an iteration ends
    unscaling.py     true-scale gradients from a scaled loss
    finite.py        whether gradients are finite
    halving.py       models in float16 without autocast: Apex's O2 and O3
    missing.py       operations that do not exist in half precision
    user_managed.py  the message when a script does a part of this itself
"""
