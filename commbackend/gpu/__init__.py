"""GPUs that map each other's memory: driver calls, heaps and their handles, slots, the watch thread, copy kernels.

Shared by the transports ``userbuffers``, ``mnnvl`` and ``nvshmem``.
"""
