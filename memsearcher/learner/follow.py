"""Every rank but 0: does what rank 0 says until it says `close`. Started by `ranks.Ranks`."""

import ctypes
import inspect
import signal
import sys

from memsearcher.learner.deepspeed import Learner, Settings
from memsearcher.learner.ranks import Ranks


def follow() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # ends with rank 0, however that ends
    ranks = Ranks(0)
    learner: Learner | None = None
    while True:
        name, arguments = ranks.hear()
        if name == "open":
            (settings,) = arguments
            if not isinstance(settings, Settings):
                raise TypeError(f"open: expected Settings, got {type(settings).__name__}")
            learner = Learner(settings, ranks)
        elif name == "close" or learner is None:
            return
        else:
            result = getattr(learner, name)(*arguments)
            if inspect.isgenerator(result):  # weights: the gathering is collective
                for _ in result:
                    pass


if __name__ == "__main__":
    follow()
