"""The error of a second training thread: ranks pair their backward passes by order, and the order of threads differs between ranks."""

from __future__ import annotations

import threading

from parwrap.coordination.call_site import location
from parwrap.errors import UsageError
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["OneThread"]


class OneThread:
    """Remembers which thread trains.

    Attributes:
        thread: the training thread, which need not :meth:`enter` again; ``None`` before the first, or after a refusal.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._place = ""
        self._refused: UsageError | None = None

    def enter(self, running: bool) -> None:
        """Record that a backward pass begins in this thread.

        Args:
            running: whether another backward is still running.

        Raises:
            UsageError: that backward belongs to another thread, which trains at the same time.
        """
        if self._refused is not None:
            raise UsageError(*self._refused.args)
        if running and current_graph_task_id() != NO_GRAPH_TASK:
            return  # inside the other, as for a checkpoint, where torch may use its own threads
        here = threading.current_thread()
        if running and self.thread is not None:
            self._refused = UsageError(
                f"two threads train at the same time: {self.thread.name}, at {self._place}, and {here.name}, at {location()}. Ranks "
                "match their backward passes by order, and the order of threads differs between ranks. Train one model after the other, "
                "call backward() once on the sum of the losses, or start a separate run for each model."
            )
            self.thread = None
            raise self._refused
        self.thread, self._place = here, location()

    def check(self) -> None:
        """At the end of training, raise again the error of a refused thread, which ended only that thread.

        Raises:
            UsageError: a thread was refused; its own error has ended only that thread.
        """
        if self._refused is not None:
            raise UsageError(*self._refused.args)
