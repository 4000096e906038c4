"""Under mpirun: one promise of the suite on the transport ``mpi`` with one hook made a no-op: mutant.py HOOK PROMISE.

Prints BROKEN and ends the job if the promise breaks, or if its ranks do not end in time.
"""

import faulthandler
import os
import sys
import threading

from mpi4py import MPI

from commbackend.config import Config
from commbackend.group import resolve_group
from commbackend.testing.harness import Setup, promises, run_promise
from commbackend.transports.mpi import MpiTransport

hook, promise = sys.argv[1:]
if hook != "none":
    setattr(MpiTransport, hook, lambda *args, **kw: hook == "_wait" or None)


def end() -> None:
    print("BROKEN", flush=True)
    faulthandler.dump_traceback()
    os._exit(7)


timer = threading.Timer(20.0, end)
timer.daemon = True
timer.start()
kept = next(p for p in promises() if p.name == promise)
group = resolve_group(MPI.COMM_WORLD, name="mutant", config=Config(init_timeout_s=15.0))
try:
    run_promise(group.rank, group, Setup("commbackend.transports.mpi:MpiTransport", "cpu", {}, 1.0), kept.fn)
except BaseException as e:
    print("BROKEN", type(e).__name__, e, flush=True)
    os._exit(7)
group.close()
timer.cancel()
print("KEPT", flush=True)
