"""What the C library does with freed memory: keeps it, so that the next frames lie where the last ones did.

Left alone, glibc maps each frame of 128 KiB and more afresh and gives it back; the page faults of 4 MiB frames cost as
much as a third of moving them. Decides for the whole process, so only those call it that run one role.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Names of malloc.h."""
MMAP_FROM_BYTES = 32 * 1024 * 1024
"""Larger blocks are still mapped and given back at once: vectors of parameters. It is the most that glibc takes."""
KEPT_BYTES = 512 * 1024 * 1024
"""So much may lie free at the end of the heap before any of it is given back."""


def keep_heap() -> bool:
    """Set this process's heap up for frames; call it before any thread is started. False where libc has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # One arena: an I/O thread's own would be given back whenever it is empty, whatever the threshold says.
    settings = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, MMAP_FROM_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES))
    taken = [mallopt(name, value) for name, value in settings]
    return all(taken)
